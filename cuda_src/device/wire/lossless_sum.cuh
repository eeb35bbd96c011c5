// Sums of bf16 tiles that were received in lossless compression.
#pragma once
#include "device/wire/lossless.cuh"

__device__ __forceinline__ void add(float (&total)[tile_rows][run_numel], const Tile<bf16>& t, bool is_first) {
#pragma unroll
  for (int j = 0; j < tile_rows; ++j) {
    float v[run_numel];
    t.unpack(j, v);
#pragma unroll
    for (int e = 0; e < run_numel; ++e) total[j][e] = is_first ? v[e] : __fadd_rn(total[j][e], v[e]);
  }
}

// The sum of this rank's tile and of the one at `from(r)` of every other rank r: in rank order, in fp32, rounded once.
template <int N, class From>
__device__ __forceinline__ Tile<bf16> sum_of_tiles(int rank, const Tile<bf16>& mine, From from) {
  constexpr int batch = 3;  // ranks whose tiles a warp has in flight
  float total[tile_rows][run_numel];
#pragma unroll
  for (int first = 0; first < N; first += batch) {
    LosslessCodes part[batch] = {};
#pragma unroll
    for (int r = first; r < first + batch && r < N; ++r)
      if (r != rank) part[r - first] = receive_tile(from(r));
#pragma unroll
    for (int r = first; r < first + batch && r < N; ++r)
      add(total, r == rank ? mine : decode_tile(from(r), part[r - first]), r == 0);
  }
  Tile<bf16> sum;
#pragma unroll
  for (int j = 0; j < tile_rows; ++j) sum.round(j, total[j]);
  return sum;
}

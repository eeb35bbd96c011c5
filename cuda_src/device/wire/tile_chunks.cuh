// How the warps of a block go through the tiles (wire.cuh) of a chunk.
#pragma once
#include "device/wire/wire.cuh"

// Calls `visit(owner, j)` for tile j of chunk k of each owner. With `Owners` = N - 1 these are all ranks but this one,
// with N also this rank, as the last. Each warp takes the next tile of the next owner, so that all links are busy.
template <int N, int Owners, class Chunks, class Visit>
__device__ __forceinline__ void for_each_tile(const Chunks& chunks, const Arguments& a, u32 k, Visit visit) {
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (u32 i = warp; i < Owners * chunks.length; i += warps) {
    const int owner = (a.rank + 1 + i % Owners) % N;
    const u32 j = i / Owners;
    if (j < chunks.count(k, owner)) visit(owner, j);
  }
}

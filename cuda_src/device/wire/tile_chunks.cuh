// How the warps of a block go through the tiles (wire.cuh) of a chunk.
#pragma once
#include "device/wire/wire.cuh"

// Calls `visit(hop, owner, j)` for tile j of chunk k of each owner, the rank that comes `hop` after this one. With
// `Owners` = N - 1 these are all ranks but this one, with N also this rank, as the last. Each warp takes the next tile
// of the next owner, so that all links are busy.
template <int N, int Owners, class Chunks, class Visit>
__device__ __forceinline__ void for_each_tile(const Chunks& chunks, const Arguments& a, u32 k, Visit visit) {
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (u32 i = warp; i < Owners * chunks.length; i += warps) {
    const int hop = (1 + i % Owners) % N, owner = (a.rank + hop) % N;
    const u32 j = i / Owners;
    if (j < chunks.count(k, owner)) visit(hop, owner, j);
  }
}

// How blocks and chunks share the tiles of parts that may differ in size. Chunk k of a block begins at the same tile of
// every part. All blocks of all ranks take as many chunks as the largest part needs.
template <int N>
struct PartChunks {
  const Arguments& a;
  u32 share;   // tiles of each part that a block handles
  u32 number;  // of chunks in a share
  u32 length;  // tiles in a chunk

  __device__ explicit PartChunks(const Arguments& arguments) : a(arguments) {
    u32 most = 0;
    for (int r = 0; r < N; ++r) most = max(most, tile_count(a.count[r]));
    share = (most + gridDim.x - 1) / gridDim.x;
    number = (share + a.chunk - 1) / a.chunk;
    length = (share + number - 1) / number;
  }

  // (28)
  __device__ __forceinline__ u32 hold() { return ::hold(share) | ::hold(number) | ::hold(length); }

  __device__ u32 begin(u32 k) const { return blockIdx.x * share + k * length; }
  __device__ u32 count(u32 k, int owner) const {
    const u32 end = min(min(begin(k) + length, (blockIdx.x + 1) * share), tile_count(a.count[owner]));
    return end > begin(k) ? end - begin(k) : 0;
  }
};

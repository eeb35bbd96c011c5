// How the ranks and blocks of a two-shot share the tiles (wire.cuh) of a tensor.
//
// Rank p owns shard p; block b handles part b of every shard, in chunks of equal size, at most a.chunk tiles of a shard.
#pragma once
#include "wire.cuh"

template <int N>
struct TileChunks {
  const u32 tiles;
  const u32 shard;   // tiles of one owner
  const u32 share;   // of these, in one block
  const u32 number;  // of chunks in a share
  const u32 length;  // tiles in a chunk

  __device__ explicit TileChunks(const Arguments& a)
      : tiles(tile_count(a.numel)),
        shard((tiles + N - 1) / N),
        share((shard + gridDim.x - 1) / gridDim.x),
        number((share + a.chunk - 1) / a.chunk),
        length((share + number - 1) / number) {}

  // Where chunk k of `owner` begins, and how many tiles it has: fewer, or none, at the end of a share or shard.
  __device__ u32 begin(u32 k, u32 owner) const { return owner * shard + blockIdx.x * share + k * length; }
  __device__ u32 count(u32 k, u32 owner) const {
    const u32 from = begin(k, owner);
    const u32 to = min(min(from + length, owner * shard + (blockIdx.x + 1) * share), min((owner + 1) * shard, tiles));
    return to > from ? to - from : 0;
  }
};

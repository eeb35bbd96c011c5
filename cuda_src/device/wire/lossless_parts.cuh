// What a reduce-scatter and an all-gather with lossless compression have in common: chunks of tiles of each rank's
// part, in the steps of push_pipeline.cuh.
#pragma once
#include "device/sync/push_pipeline.cuh"
#include "device/wire/lossless.cuh"
#include "device/wire/tile_chunks.cuh"

template <int N>
struct LosslessParts {
  const Arguments& a;
  PartChunks<N> chunks;
  u32 first_step = 0;

  __device__ LosslessParts(const Arguments& arguments, const Call&) : a(arguments), chunks(a) {}
  __device__ __forceinline__ u32 hold() { return chunks.hold(); }

  __device__ bool has_chunk(u32 k) const { return k < chunks.number; }
  __device__ bool has_step(u32 k) const { return k <= chunks.number; }

  // Tile j of a slot.
  __device__ LosslessTile place(int hop, u32 k, int from, u32 j) const {
    return lossless_tile(j, chunks.length, [&](u32 at) { return push_slot<N>(a, hop, first_step + k, from, at); });
  }
};

// How a block's warps go through the tiles (wire.cuh) of a chunk, with plain accesses: (2) orders them, and (20) holds.
#pragma once
#include "device/sync/push_pipeline.cuh"
#include "device/wire/wire.cuh"

// Calls `visit(hop, owner, j)` for tile j of chunk k of each owner, the rank `hop` after this one; with `Owners` = N
// also of this rank, as the last. Each warp takes the next tile of the next owner, so that all links are busy.
template <int N, int Owners, class Chunks, class Visit>
DEVICE void for_each_tile(const Chunks& chunks, const Arguments& a, u32 k, Visit visit) {
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
  for (u32 i = warp; i < Owners * chunks.length; i += warps) {
    const int hop = (1 + i % Owners) % N, owner = (a.rank + hop) % N;
    const u32 j = i / Owners;
    if (j < chunks.count(k, owner)) visit(hop, owner, j);
  }
}

// How blocks and chunks share the tiles of parts that may differ in size: the base of a body of push_pipeline.cuh.
// Chunk k of a block begins at the same tile of every part. The largest part tells the number of chunks.
template <int N>
struct PartChunks {
  const Arguments& a;
  u32 share;   // tiles of each part that a block handles
  u32 number;  // of chunks in a share
  u32 length;  // tiles in a chunk
  u32 first_step = 0;

  __device__ PartChunks(const Arguments& arguments, const Call&) : a(arguments) {
    u32 most = 0;
    for (int r = 0; r < N; ++r) most = max(most, tile_count(a.count[r]));
    share = (most + gridDim.x - 1) / gridDim.x;
    number = (share + a.chunk - 1) / a.chunk;
    length = (share + number - 1) / number;
  }

  DEVICE u32 hold() { return ::hold(share) | ::hold(number) | ::hold(length); }  // (16)

  __device__ Pack* slot(int hop, u32 k, int from, u32 at = 0) const {
    return push_slot<N>(a, hop, first_step + k, from, at);
  }
  __device__ bool has_chunk(u32 k) const { return k < number; }
  __device__ bool has_step(u32 k) const { return k <= number; }
  __device__ u32 begin(u32 k) const { return blockIdx.x * share + k * length; }
  __device__ u32 count(u32 k, int owner) const {
    const u32 end = min(min(begin(k) + length, (blockIdx.x + 1) * share), tile_count(a.count[owner]));
    return end > begin(k) ? end - begin(k) : 0;
  }
};

// Codes a tile of `x` into place j of a slot, with `number` for random bits, and with feedback its `errors`.
template <class C, class T>
DEVICE void send_tile(const Wire<C>& to, u32 j, const Tensor<T>& x, const Tensor<T>& errors, u32 tile, u64 number,
                      const Noise& noise) {
  const Tile<T> mine = load_values<C>(x, errors, tile);
  const Coded<C> coded = encode<C>(mine, number, noise);
  visit_coded(to, j, coded, Store{});
  if constexpr (C::feedback) store_error(errors, tile, mine, coded);
}

// Place j of the slots `slot_of(rank)`.
template <class C, class SlotOf>
struct FromSlots {
  SlotOf slot_of;
  u32 j;

  template <int Count>
  DEVICE bool operator()(int first, Received<C> (&part)[Count]) const {
#pragma unroll
    for (int r = 0; r < Count; ++r) visit_received(slot_of(first + r), j, part[r], Load{});
    return true;
  }
};

template <class C, int N, class SlotOf>
DEVICE void sum_of_slots(SlotOf slot_of, u32 j, float (&total)[tile_rows][run_numel]) {
  sum_of_parts<C, N>(FromSlots<C, SlotOf>{slot_of, j}, total);
}

// Encoded tiles in slots that flags announce: written and read with ordinary accesses, which the signals order.
#pragma once
#include "wire_sum.cuh"

// A tile of `x` to place j of a slot; where the codec feeds back, what it takes from the tile is left in the tile's place.
// `number` is the tile's for random bits.
template <class C, class T>
__device__ __forceinline__ void send_tile(const Wire<C>& to, u32 j, const Tensor<T>& x, u32 tile, u64 number,
                                          const Noise& noise) {
  const Tile<T> mine = load_tile(x, tile);
  const Coded<C> coded = encode<C>(mine, number, noise);
  visit_coded(to, j, coded, Store{});
  if constexpr (C::feedback) store_error(x, tile, mine, coded);
}

// What ranks sent to place j of the slots `slot_of(rank)`.
template <class C, class SlotOf>
struct FromSlots {
  SlotOf slot_of;
  u32 j;

  template <int Count>
  __device__ __forceinline__ bool operator()(int first, Received<C> (&part)[Count]) const {
#pragma unroll
    for (int r = 0; r < Count; ++r) visit_received(slot_of(first + r), j, part[r], Load{});
    return true;
  }
};

template <class C, int N, class SlotOf>
__device__ __forceinline__ void sum_of_slots(SlotOf slot_of, u32 j, float (&total)[rows][run]) {
  sum_of_parts<C, N>(FromSlots<C, SlotOf>{slot_of, j}, total);
}

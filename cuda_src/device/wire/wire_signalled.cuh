// Encoded tiles in slots that flags announce, written and read with plain accesses, which (2) orders; (20) holds.
#pragma once
#include "device/wire/wire_sum.cuh"

// Codes a tile of `x` into place j of a slot; with feedback `errors` has those of earlier calls, and gets this one's.
// `number` is the tile's number for random bits.
template <class C, class T>
__device__ __forceinline__ void send_tile(const Wire<C>& to, u32 j, const Tensor<T>& x, const Tensor<T>& errors,
                                          u32 tile, u64 number, const Noise& noise) {
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
  __device__ __forceinline__ bool operator()(int first, Received<C> (&part)[Count]) const {
    for (int r = 0; r < Count; ++r) visit_received(slot_of(first + r), j, part[r], Load{});
    return true;
  }
};

template <class C, int N, class SlotOf>
__device__ __forceinline__ void sum_of_slots(SlotOf slot_of, u32 j, float (&total)[tile_rows][run_numel]) {
  sum_of_parts<C, N>(FromSlots<C, SlotOf>{slot_of, j}, total);
}

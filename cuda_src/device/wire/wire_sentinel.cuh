// Encoded tiles with readiness in the data, as for packs (sentinel.cuh): a word of all ones means 'not yet'.
//
// No absmax codec has such a word on its wire (codec_reference.py): each word of codes holds a whole code, which is
// never all ones, and each word of scales holds a scale, which is not negative. So the sender need not change words.
// (3) and (4) hold for the words of a tile, whatever codec each call has: a call arms every word that its peers wrote.
//
// (8) All lanes of a bucket read the word that holds its scale. A lane that armed a shared word early would hide it
//     from a lane that has yet to read it. So a warp arms a tile's words only once all its lanes have seen all of
//     theirs, by a vote.
#pragma once
#include "device/sync/sentinel.cuh"
#include "device/wire/wire.cuh"

struct StoreRelaxed {
  template <int Count>
  __device__ __forceinline__ void operator()(Words<Count>* address, const u32* words) const {
    Words<Count> piece;
    for (int w = 0; w < Count; ++w) piece.word[w] = words[w];
    store_relaxed_sys(address, piece);
  }
};

struct LoadRelaxed {
  bool& complete;  // turns false where a word has not arrived

  template <int Count>
  __device__ __forceinline__ void operator()(const Words<Count>* address, u32* words) const {
    const Words<Count> piece = load_relaxed_sys(address);
    for (int w = 0; w < Count; ++w) {
      words[w] = piece.word[w];
      complete &= piece.word[w] != not_yet;
    }
  }
};

struct Arm {
  template <int Count>
  __device__ __forceinline__ void operator()(Words<Count>* address, const u32*) const {
    Words<Count> armed;
    for (int w = 0; w < Count; ++w) armed.word[w] = not_yet;
    store_relaxed_sys(address, armed);
  }
};

template <class C>
__device__ __forceinline__ void push(const Wire<C>& to, u32 tile, const Coded<C>& coded) {
  static_assert(C::scheme == absmax, "a codec with minmax spares no word");
  visit_coded(to, tile, coded, StoreRelaxed{});
}

// The slots on this rank in which the ranks' codes of a tile arrive.
template <class C>
struct Arrivals {
  const Arguments& a;
  const Call& call;
  u32 slots;  // offset of rank 0's slot
  u32 tiles;  // of a slot's wire
  u32 tile;
  u32 patience = 4;  // more for a tile that is a sum, as in receive (sentinel.cuh)

  __device__ __forceinline__ Wire<C> wire(int rank) const {
    return {reinterpret_cast<char*>(slot(a, 0, slots + rank * a.capacity)), tiles};
  }

  // Receives the tile from `first` and the ranks after it, and arms the words again. False in all lanes if one is late.
  template <int Count>
  __device__ __forceinline__ bool operator()(int first, Received<C> (&part)[Count]) const {
    Deadline deadline;
    while (true) {
      int missing = -1;
#pragma unroll
      for (int r = 0; r < Count; ++r) {
        bool complete = true;
        visit_received(wire(first + r), tile, part[r], LoadRelaxed{complete});
        if (!complete) missing = r;
      }
      if (!__any_sync(all_lanes, missing >= 0)) break;
      const u32 state = __shfl_sync(all_lanes, u32(deadline.check(a, call, patience)), 0);
      if (state == Deadline::waiting) continue;
      if (state == Deadline::expired && missing >= 0)
        report(a, timed_out, call.epoch, first + missing, call.epoch, not_yet);
      return false;
    }
#pragma unroll
    for (int r = 0; r < Count; ++r) visit_received(wire(first + r), tile, part[r], Arm{});
    return true;
  }
};

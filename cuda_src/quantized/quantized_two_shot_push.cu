// quantized_two_shot_push: two_shot_push with a codec on the wire, tile by tile (wire.cuh).
//
//   rank r: shard p of input -> codes -> scratch[p].scatter[parity][r]   on every rank p
//           scratch[r].scatter[parity][0 .. N-1] -> values -> sum of shard r -> codes -> values -> output
//           codes of the sum         -> scratch[p].gather[parity][r]    on every peer p
//           scratch[r].gather[parity][p] -> values -> output            from every peer p
//
// Every rank decodes the same bytes, the owner its own. A block's warps form N groups as in two_shot_push. Wins if its
// scratch, 4 times the wire, suffices.
#include "device/sync/sentinel.cuh"
#include "device/wire/wire.cuh"

// Readiness travels in the data, as in packs (sentinel.cuh): no absmax codec has a word of all ones on its wire
// (codec_reference.py). Each word of codes holds a whole code, which is never all ones, and each word of scales holds a
// scale, which is not negative. So the sender need not change words. (3) and (4) hold for the words of a tile, whatever
// codec each call has: a call arms every word that its peers wrote.
//
// (8) All lanes of a bucket read the word that holds its scale. A lane that armed it early would hide it from a lane
//     that has yet to read it. So a warp arms a tile's words once all its lanes have seen all of theirs, by a vote.
struct StoreRelaxed {
  template <int Count>
  DEVICE void operator()(Words<Count>* address, const u32* words) const {
    Words<Count> piece;
    for (int w = 0; w < Count; ++w) piece.word[w] = words[w];
    store_relaxed_sys(address, piece);
  }
};

struct LoadRelaxed {
  bool& complete;  // turns false where a word has not arrived

  template <int Count>
  DEVICE void operator()(const Words<Count>* address, u32* words) const {
    const Words<Count> piece = load_relaxed_sys(address);
    for (int w = 0; w < Count; ++w) {
      words[w] = piece.word[w];
      complete &= piece.word[w] != not_yet;
    }
  }
};

struct Arm {
  template <int Count>
  DEVICE void operator()(Words<Count>* address, const u32*) const {
    Words<Count> armed;
    for (int w = 0; w < Count; ++w) armed.word[w] = not_yet;
    store_relaxed_sys(address, armed);
  }
};

// The slots on this rank in which the ranks' codes of a tile arrive.
template <class C>
struct Arrivals {
  const Arguments& a;
  const Call& call;
  u32 slots;  // offset of rank 0's slot
  u32 tiles;  // of a slot's wire
  u32 tile;
  u32 patience = 4;  // more for a tile that is a sum, as in receive (sentinel.cuh)

  DEVICE Wire<C> wire(int rank) const {
    return {reinterpret_cast<char*>(slot(a, 0, slots + rank * a.capacity)), tiles};
  }

  // Receives the tile from `first` and the ranks after it, and arms the words again. False in all lanes if one is late.
  template <int Count>
  DEVICE bool operator()(int first, Received<C> (&part)[Count]) const {
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
    for (int r = 0; r < Count; ++r) visit_received(wire(first + r), tile, part[r], Arm{});
    return true;
  }
};

template <class T, int N, class C>
__global__ void __launch_bounds__(512, 1) quantized_two_shot_push(const __grid_constant__ Arguments a) {
  static_assert(C::scheme == absmax, "a codec with minmax spares no word");
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel), errors(a.errors, a.numel);
  const u32 tiles = tile_count(a.numel);
  u32 shard = (tiles + N - 1) / N;
  const u32 warp = threadIdx.x / 32, width = blockDim.x / 32 / N;
  u32 hop = (warp / width + 1) % N;
  const u32 owner = (a.rank + hop) % N;
  u32 begin = min(owner * shard, tiles), end = min(begin + shard, tiles);
  u32 first = begin + blockIdx.x * width + warp % width;
  const u32 stride = gridDim.x * width;

  HeldCall call = begin_call(a, shard, hop, begin, end, first);
  if (blockDim.x <= 256) release_next_kernel();  // such a block takes half an SM at most: (18) in kernel_order.cuh
  Tile<T> mine;
  if (first < end) mine = load_values<C>(input, errors, first);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 scatter = (call.epoch & 1) * N * a.capacity;
  const u32 gather = scatter + 2 * N * a.capacity;
  const auto wire = [&](int hop, u32 slots) {
    return Wire<C>{reinterpret_cast<char*>(slot(a, hop, slots + a.rank * a.capacity)), shard};
  };
  for (u32 t = first; t < end;) {
    const Coded<C> coded = encode<C>(mine, t, {a.seed, call.epoch, a.rank});
    visit_coded(wire(hop, scatter), t - begin, coded, StoreRelaxed{});
    if constexpr (C::feedback) store_error(errors, t, mine, coded);
    t += stride;
    if (t < end) mine = load_values<C>(input, errors, t);
  }
  advance_epoch(a, call);
  for (u32 t = first; t < end; t += stride) {
    Received<C> sum[1];
    if (hop == 0) {
      float total[tile_rows][run_numel];
      if (!sum_of_parts<C, N>(Arrivals<C>{a, call, scatter, shard, t - begin}, total)) break;
      const Coded<C> coded = encode<C>(tile_of(total), t, {a.seed, call.epoch, noise_of_sum});
      for (int peer = 1; peer < N; ++peer) visit_coded(wire(peer, gather), t - begin, coded, StoreRelaxed{});
      sum[0] = as_received(coded);
    } else if (!Arrivals<C>{a, call, gather, shard, t - begin, 5}(owner, sum)) {
      break;
    }
    store_values(output, t, sum[0]);
  }
  end_call(a, call);
}

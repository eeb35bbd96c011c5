// The pipeline of a two-shot: reduce-scatter and all-gather by pushes, in chunks that flags announce.
//
//   step k of block b on rank r:
//     1. scatter  input chunk k, piece p                 ---> slot(scattered, k)[r]     on every peer p
//     2. wait until every peer has finished step k - 1
//     3. reduce   slot(scattered, k - 1) + own piece     -> sum -> output, piece r of chunk k - 1
//                 sum                                    ---> slot(reduced, k - 1)[r]   on every peer p
//     4. signal every peer: step k is finished
//     5. gather   slot(reduced, k - 2)[p]                -> output, piece p of chunk k - 2
//
// Rank p owns shard p. Block b handles share b of every shard, in chunks of equal size, and meets only block b of its
// peers. Other blocks fill the links while one waits. The scratch has a fixed size, whatever the size of the tensor.
//
// (11) Slots are reused after `pipeline_depth` = 3 chunks.
//     - Scattered: step k overwrites what the peer read in part 3 of its step k - 2. The wait of step k - 1 saw the
//       peer finish step k - 2.
//     - Reduced: part 3 of step k writes slot k - 1, which the peer read in part 5 of its step k - 2. That precedes the
//       peer's signal of step k - 1, which the wait of step k saw.
//     - Between calls: the last wait of a call, in step chunks + 1, sees every peer past its last read of a scattered
//       slot. The next call writes reduced slots only after a wait, by which the peer's previous call is over (13).
//     - Slots depend on block, shot, chunk and source alone, so the two shots never share one, whatever the grid.
//     - Slots are read with plain loads (20).
#pragma once
#include "device/pack.cuh"
#include "device/sync/signal_pad.cuh"

constexpr u32 pipeline_depth = 3;  // PIPELINE_DEPTH in graphar/plan/scratch.py

enum Shot { scattered, reduced };

// The slot, on the rank `hop` after this one, of chunk k from rank `from`: its pack, or half pack, `at`.
template <int N, class P = Pack>
DEVICE P* pipeline_slot(const Arguments& a, Shot shot, int hop, u32 k, int from, u32 at = 0) {
  const u64 index = ((u64(blockIdx.x) * 2 + shot) * pipeline_depth + k % pipeline_depth) * N;
  Pack* const slots = after_signal_pad(a.ring[hop]) + index * a.capacity;
  return reinterpret_cast<P*>(slots) + (in_a_pack<P> * from * a.capacity + at);
}

// How ranks, blocks and chunks share `total` units, in whole multiples of `Line`; the last may have fewer, or none.
template <class Index, int Line, int N>
struct Chunks {
  const Index total;
  Index shard;  // of one owner
  Index share;  // of a shard, in one block
  u32 number;   // of chunks in a share
  u32 length;   // of a chunk, at most a.chunk

  __device__ Chunks(const Arguments& a, Index units)
      : total(units),
        shard(equal_share<Index, Line>(total, N)),
        share(equal_share<Index, Line>(shard, gridDim.x)),
        number((share + a.chunk - 1) / a.chunk),
        length(equal_share<Index, Line>(share, number)) {}

  DEVICE u32 hold() { return ::hold(shard) | ::hold(share) | ::hold(number) | ::hold(length); }

  // Where chunk k of `owner` begins, and its size: smaller, or 0, at the end of a share or shard.
  __device__ Index begin(u32 k, Index owner) const { return owner * shard + blockIdx.x * share + Index(k) * length; }
  __device__ u32 count(u32 k, Index owner) const {
    const Index from = begin(k, owner);
    return from < total ? min(total - from, Index(most(k))) : 0;
  }
  // The size of chunk k of an owner whose shard is whole.
  __device__ u32 most(u32 k) const {
    const Index from = begin(k, 0), to = min((blockIdx.x + 1) * share, shard);
    return to > from ? min(to - from, Index(length)) : 0;
  }
};

// The kernel. The body is made of arguments and call before that is read. It has `chunks`, named in the wait (16), the
// parts 1, 3 and 5 as scatter(k), reduce(k) and gather(k), and whether it `gathers` at all. With `HalfSm` a block
// takes half an SM at most, and the kernel releases the next one: (18) in kernel_order.cuh.
template <int N, class Body, bool HalfSm = false>
DEVICE void run_two_shot_pipeline(const Arguments& a) {
  HeldCall call{};
  Body body{a, call};
  call = begin_call(a, body.chunks);
  if constexpr (HalfSm) release_next_kernel();
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Signals signals(a);
  advance_epoch(a, call);
  const u32 chunks = body.chunks.number;

  for (u32 k = 0; k < chunks + 2; ++k) {
    if (k < chunks) body.scatter(k);
    if (!signals.wait<N>(a, call, k)) break;
    if (k >= 1 && k <= chunks) body.reduce(k - 1);
    signals.send<N>(a, call, k + 1);
    if (Body::gathers && k >= 2) body.gather(k - 2);
  }
  signals.end(a, chunks + 2);
  end_call(a, call);
}

// The pipeline of a reduce-scatter or an all-gather by pushes, in chunks that flags announce.
//
//   step k of block b on rank r:
//     1. send      chunk k                  ---> slot(k)[r]   on every rank that needs it
//     2. signal    every peer: step k is sent
//     3. wait      until every peer has sent step k - 1
//     4. receive   slot(k - 1)[0 .. N-1]    -> output, chunk k - 1
//
// Block b meets only block b of its peers, so that others fill the links while one waits. The scratch stays in L2.
//
// (12) Slots are reused after `push_depth` = 4 steps. A block numbers its steps on from call to call, and a slot
//     depends on block, step and source alone, so calls with other grids and sizes continue one sequence. Step s
//     overwrites what step s - 4 brought to the peer. Before it, this rank has seen the peer's signal of step s - 2: in
//     part 3 of the step before, or, at the start of a call, in the last wait of the previous one. That signal follows
//     part 4 of the peer's step s - 3, its last read of what step s - 4 had brought: by (2) in one call, and between
//     calls by (13). Steps may wrap: 2^32 is a multiple of 4. Slots are read with plain loads (20).
#pragma once
#include "device/pack.cuh"
#include "device/sync/signal_pad.cuh"

constexpr u32 push_depth = 4;  // PUSH_DEPTH in graphar/plan/scratch.py

// The slot, on the rank that comes `hop` after this one, for what rank `from` sends in a step: its pack `at`.
template <int N>
DEVICE Pack* push_slot(const Arguments& a, int hop, u32 step, int from, u32 at = 0) {
  const u64 index = (blockIdx.x * push_depth + step % push_depth) * N;
  return after_signal_pad(a.ring[hop]) + index * a.capacity + (from * a.capacity + at);
}

// The kernel. The body is made before the call is read. It has parts 1 and 4 as send(k) and receive(k), and takes
// `first_step`. has_chunk(k) and has_step(k) must be the same on all ranks; there is one step more than chunks. With
// `HalfSm` a block takes half an SM at most, and the kernel releases the next one: (18) in kernel_order.cuh. With
// `MayAsk`, a body that asks_first() receives chunk 0 before it decides on chunk 1; ranks may differ in that.
template <int N, class Body, bool HalfSm = false, bool MayAsk = false, class Args>
DEVICE void run_push_pipeline(const Args& a) {
  HeldCall call{};
  Body body{a, call};
  call = begin_call(a, body);
  if constexpr (HalfSm) release_next_kernel();
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Signals signals(a);
  advance_epoch(a, call);
  body.first_step = signals.first_step();

  u32 k = 0, idle = 0;  // the step that receives nothing
  if constexpr (MayAsk) idle = body.asks_first();
  for (; body.has_step(k); ++k) {
    if (body.has_chunk(k)) {
      body.send(k);
      signals.send<N>(a, call, k + 1);
    }
    if (k == idle) continue;
    const u32 chunk = MayAsk && k == 0 ? 0 : k - 1;
    if (!signals.wait<N>(a, call, chunk + 1)) break;
    body.receive(chunk);
  }
  signals.end(a, MayAsk && k == 0 ? 0 : k - 1);
  end_call(a, call);
}

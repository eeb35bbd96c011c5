// What ranks call: each tells the others, and compares.
//
// Ranks that call different things with one algorithm would sum or copy what does not belong together. Where flags
// announce the data, they carry the fingerprint of the call, compared before any data is read: (25) in signal_pad.cuh,
// and flagged.cuh. Elsewhere each rank tells all ranks its fingerprint, and at every eighth call its last block
// compares what they told of the last calls; the host compares the calls after that (compare_last_calls in
// graphar/runtime/runner.py). To wait for what ranks tell of this very call took one_shot_push 4 % longer at 2 KB.
// But who waits for a peer for some time looks whether that calls something else (deadline.cuh).
//
// (19) Relaxed accesses suffice: an entry is one word with its call's number, and publishes no other location. In call
//      e, what a peer told of e - 2 has arrived: this rank has ended call e - 1, in which it heard from every rank, and
//      by (13) the peers' calls e - 2 were over then. It is still there, since no peer is more than one call ahead, and
//      kept_calls is larger than calls_a_comparison + 2. Younger entries are compared only by a thread that has waited
//      for some time: a rank that finds a difference stops, so that others wait for it until they look, too.
#pragma once
#include "device/sync/record.cuh"

constexpr u32 calls_a_comparison = 8;

DEVICE bool is_last_block() { return blockIdx.x == gridDim.x - 1; }

DEVICE void tell_call(const Arguments& a, u32 epoch) {
  if (!is_last_block() || threadIdx.x >= max_ranks) return;
  Counters* const there = a.peer_counters[threadIdx.x];
  if (there != nullptr)
    store_relaxed_sys(&there->called[a.rank][epoch % kept_calls], u64(epoch + 1) << 32 | a.fingerprint);
}

// By all threads, in call `now`.
DEVICE void compare_calls(const Arguments& a, u32 now) {
  if (!is_last_block()) return;
  for (u32 i = threadIdx.x; i < a.world_size * kept_calls; i += blockDim.x) {
    const u32 peer = i / kept_calls;
    const u64 own = load_relaxed_sys(&a.counters->called[a.rank][i % kept_calls]);
    const u64 told = load_relaxed_sys(&a.counters->called[peer][i % kept_calls]);
    const u32 epoch = u32(own >> 32) - 1;
    if (disagree(own, told) && now - epoch >= 2)
      report(a, disagreed, epoch, peer, u32(own), u32(told));
  }
}

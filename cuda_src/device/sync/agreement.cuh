// What ranks call: each tells the others, and compares.
//
// Ranks that call different things with one algorithm would sum or copy what does not belong together. So each rank
// tells all ranks the fingerprint of its call, and at every eighth call compares what they told of the last calls with
// its own. A difference is reported as an expired wait is. The host compares the calls that no such comparison follows
// (compare_last_calls in graphar/runtime/failures.py). The last block does this: for small tensors, it has no other
// work (graphar/plan/shapes.py). Where it has, as in norms and large sums, comparing at every call would cost some
// 0.2 us.
//
// (19) Relaxed accesses suffice: an entry is one word with its call's number, and publishes no other location. In call
//      e, what a peer told of e - 2 has arrived: this rank has ended call e - 1, in which it heard from every rank, and
//      by (13) the peers' calls e - 2 were over then. It is still there, since no peer is more than one call ahead, and
//      kept_calls is larger than calls_a_comparison + 2. Younger entries are not compared there: a rank that finds a
//      difference early stops, and the others would wait for it. A rank that waits for long in call e compares the
//      entries of e. Where it finds a difference, so does every other rank that waits in e: all ranks tell all.
#pragma once
#include "device/sync/record.cuh"

constexpr u32 calls_a_comparison = 8;

__device__ __forceinline__ bool is_last_block() { return blockIdx.x == gridDim.x - 1; }

__device__ __forceinline__ void tell_call(const Arguments& a, u32 epoch) {
  if (!is_last_block() || threadIdx.x >= max_ranks) return;
  Counters* const there = a.peer_counters[threadIdx.x];
  if (there != nullptr)
    store_relaxed_sys(&there->called[a.rank][epoch % kept_calls], u64(epoch + 1) << 32 | a.fingerprint);
}

// By a thread that has waited for long: the last rank that calls something else in this very call, and its fingerprint;
// 0 if there is none.
struct Unlike {
  u32 peer;
  u32 fingerprint;
};

__device__ __forceinline__ Unlike find_unlike(const Arguments& a, u32 epoch) {
  const u64 own = u64(epoch + 1) << 32 | a.fingerprint;
  Unlike found{0, 0};
#pragma unroll 1
  for (u32 peer = 0; peer < a.world_size; ++peer) {
    const u64 told = load_relaxed_sys(&a.counters->called[peer][epoch % kept_calls]);
    if (disagree(own, told)) found = {peer, u32(told)};
  }
  return found;
}

// By all threads, in call `now`.
__device__ __forceinline__ void compare_calls(const Arguments& a, u32 now) {
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

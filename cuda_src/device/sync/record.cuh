// The record of why a kernel gave up, which the host reads.
#pragma once
#include "device/arguments.cuh"

// Record::kind: a wait that expired.
constexpr u32 timed_out = 1;
// Two calls of a rank that overlap (22).
constexpr u32 overlapped = 2;
// Ranks that call different things: `expected` is this rank's fingerprint, and `seen` the peer's.
constexpr u32 disagreed = 3;

// Internal: makes later calls of this algorithm send nothing.
__device__ __noinline__ void stop_sending(const Arguments& a) {
#pragma unroll 1
  for (EpochState* state = a.counters->epoch_state, *const end = state + max_blocks; state != end; ++state)
    store_relaxed_gpu(&state->aborted, 1);
}

// Internal: whether two entries of `called` are about one call, and differ.
DEVICE bool disagree(u64 own, u64 told) { return own != told && own >> 32 == told >> 32 && own != 0 && told != 0; }

// By any thread that gives up, which then ends its waits. The first one on this rank writes the record, and publishes
// `kind` to the host with a release store of system scope; others change nothing. Everything queued behind sees `abort`
// and does not wait again.
__device__ __noinline__ void report(const Arguments& a, u32 kind, u32 epoch, u32 peer, u32 expected, u32 seen) {
  if (exchange_relaxed_gpu(a.abort, 1) != 0) return;
  Record* r = a.record;
  r->algorithm = a.algorithm;
  r->sequence = epoch;
  r->rank = a.rank;
  r->peer = peer;
  r->block = blockIdx.x;
  r->expected = expected;
  r->seen = seen;
  stop_sending(a);  // here, where few other values need registers
  store_release_sys(&r->kind, kind);
}

// Internal: by a thread that has waited in call `now` for some time: whether a peer has told of another call than this
// rank's. The awaited rank may be missing because it has found that. The earliest such call is reported.
__device__ __noinline__ bool found_difference(const Arguments& a, u32 now) {
#pragma unroll 1
  for (u32 age = kept_calls; age > 0; --age) {
    const u32 entry = (now + 1 - age) % kept_calls;
    const u64 own = load_relaxed_sys(&a.counters->called[a.rank][entry]);
#pragma unroll 1
    for (u32 peer = 0; peer < a.world_size; ++peer) {
      const u64 told = load_relaxed_sys(&a.counters->called[peer][entry]);
      if (!disagree(own, told)) continue;
      report(a, disagreed, u32(own >> 32) - 1, peer, u32(own), u32(told));
      return true;
    }
  }
  return false;
}

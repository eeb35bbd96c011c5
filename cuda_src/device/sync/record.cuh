// The record of why a kernel gave up, which the host reads, and what ranks tell each other of their calls.
//
// Ranks whose calls of one algorithm differ would sum or copy what does not belong together. Where flags
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
#include "device/arguments.cuh"

// Record::kind: a wait that expired.
constexpr u32 timed_out = 1;
// Two calls of a rank that overlap (22).
constexpr u32 overlapped = 2;
// Ranks whose calls differ: `expected` is this rank's fingerprint, and `seen` the peer's.
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
// `kind` to the host with a release store of system scope. Everything queued behind sees `abort` and does not wait.
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

constexpr u32 calls_a_comparison = 8;

// Internal.
DEVICE bool is_last_block() { return blockIdx.x == gridDim.x - 1; }

// Internal: by all threads, in call `epoch`.
DEVICE void tell_call(const Arguments& a, u32 epoch) {
  if (!is_last_block() || threadIdx.x >= max_ranks) return;
  Counters* const there = a.peer_counters[threadIdx.x];
  if (there != nullptr)
    store_relaxed_sys(&there->called[a.rank][epoch % kept_calls], u64(epoch + 1) << 32 | a.fingerprint);
}

// Internal: by all threads, in call `now`.
DEVICE void compare_calls(const Arguments& a, u32 now) {
  if (!is_last_block()) return;
  for (u32 i = threadIdx.x; i < a.world_size * kept_calls; i += blockDim.x) {
    const u32 peer = i / kept_calls;
    const u64 own = load_relaxed_sys(&a.counters->called[a.rank][i % kept_calls]);
    const u64 told = load_relaxed_sys(&a.counters->called[peer][i % kept_calls]);
    const u32 epoch = u32(own >> 32) - 1;
    if (disagree(own, told) && now - epoch >= 2) report(a, disagreed, epoch, peer, u32(own), u32(told));
  }
}

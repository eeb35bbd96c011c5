// The record of why a kernel gave up, which the host reads.
#pragma once
#include "device/arguments.cuh"

// Record::kind.
constexpr u32 timed_out = 1;
constexpr u32 overlapped = 2;
constexpr u32 disagreed = 3;  // `expected` is this rank's fingerprint, and `seen` the peer's

// Makes later calls of this algorithm send nothing.
__device__ __noinline__ void stop_sending(const Arguments& a) {
#pragma unroll 1
  for (int b = 0; b < max_blocks; ++b) store_relaxed_gpu(&a.counters->epoch_state[b].aborted, 1);
}

// Whether two entries of `called` are about one call, and differ.
__device__ __forceinline__ bool disagree(u64 own, u64 told) {
  return own != told && own >> 32 == told >> 32 && own != 0 && told != 0;
}

// The first thread that gives up writes the record. Everything queued behind sees `abort` and does not wait again. A
// rank may be missing because it has found a difference, so an expired wait is reported as the earliest of those.
__device__ __noinline__ void report(const Arguments& a, u32 kind, u32 epoch, u32 peer, u32 expected, u32 seen) {
  if (exchange_relaxed_gpu(a.abort, 1) != 0) return;
  stop_sending(a);
  const u32 now = epoch;
  for (u32 i = 0; kind == timed_out && i < a.world_size * kept_calls; ++i) {
    const u32 entry = (now + 1 + i / a.world_size) % kept_calls, p = i % a.world_size;
    const u64 own = load_relaxed_sys(&a.counters->called[a.rank][entry]);
    const u64 told = load_relaxed_sys(&a.counters->called[p][entry]);
    if (disagree(own, told))
      kind = disagreed, epoch = u32(own >> 32) - 1, peer = p, expected = u32(own), seen = u32(told);
  }
  Record* r = a.record;
  r->algorithm = a.algorithm;
  r->sequence = epoch;
  r->rank = a.rank;
  r->peer = peer;
  r->block = blockIdx.x;
  r->expected = expected;
  r->seen = seen;
  store_release_sys(&r->kind, kind);
}

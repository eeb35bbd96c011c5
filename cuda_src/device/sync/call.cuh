// The frame of every collective kernel: its epoch, waits with a deadline, and the record of a wait that expired.
#pragma once
#include "device/arguments.cuh"

// ---- epochs ---------------------------------------------------------------------------------------------------------
//
// Epochs live in device memory, so a replayed graph continues where the last call stopped. Each block has a counter,
// and all counters are equal between kernels. A block reads its own. Once all its warps have read it, the block
// advances every counter congruent to its index modulo the grid. That needs no atomic, and grids of any size may follow
// each other.
//
// (1) Kernels of one communicator and algorithm run one after another: each begins with wait_for_previous_kernel, which
//     makes the previous kernel complete and visible even where this one was launched early. So whatever a peer
//     receives from call e + 1 was sent after all blocks of this rank's call e had ended.
//
// (18) Two communicators. Ranks may launch kernels of two communicators in different orders. Then one rank's kernel may
//     wait for a peer's that is queued behind the other communicator's, and so on around. All of them make progress:
//     - One block is enough, of a grid in clusters one cluster. A block exchanges data with the blocks of its index
//       alone, and blocks start in the order of their indices, so on all ranks the first unfinished blocks are on their
//       GPUs or will be. Where K differs between the ranks of a matmul, tiles may differ, and then this does not hold:
//       (10) in warpgroup_tile.cuh.
//     - Kernels of half SMs find room for a block. __launch_bounds__ asks for two blocks of up to 512 threads on an SM,
//       and a grid has fewer blocks than there are SMs. Such a kernel releases the next one after it has waited for the
//       previous one, so at most two of a communicator are on a GPU, one of them waiting for the other. If both are of
//       half SMs, they are fewer blocks than there are halves. If the second takes whole SMs, it leaves a half beside
//       each block of the first.
//     - Kernels of whole SMs release no other while they wait for ranks, and their grids leave an SM free, those of
//       clusters two clusters' SMs. So another communicator's kernels of half SMs go on beside them and end, and of two
//       kernels of whole SMs the second has free SMs; of a kernel in clusters and one without, the one without has.
//       Where both communicators' kernels wait for whole SMs, those of half SMs before them end first.
//     - Clusters of norms (rms_norm.cuh) find room beside kernels of half SMs, but none on a single free SM, whatever
//       its registers (H200). So it is the kernel of whole SMs that goes on: such a norm, alone of its communicator
//       until it waits for no rank, has at most half of each SM but one.
struct Call {
  u32 epoch;
  u32 was_busy;
  u32 aborted;  // an earlier call gave up waiting; this one must send nothing, since peers may still be in the earlier
                // call and would take this one's data for its data
};

// First of all. It reads an argument of each of the first three lines before it waits, so that they are in the constant
// cache when a small call needs them.
__device__ __forceinline__ void wait_for_previous_kernel(const Arguments& a) {
  wait_for_previous_kernel(a.counters, a.ring[0], a.peer_counters[0]);
}

// First after wait_for_previous_kernel: its latency is the longest, and it is used in advance_epoch only.
__device__ __forceinline__ Call begin_call(const Arguments& a) {
  return {0, threadIdx.x == 0 ? exchange_relaxed_gpu(&a.counters->busy[blockIdx.x], 1) : 0, 0};
}

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

// ---- what ranks call ------------------------------------------------------------------------------------------------
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
//      by (1) a rank sends nothing in e - 1 before its call e - 2 is complete and visible. It is still there, since no
//      peer is more than one call ahead, and kept_calls is larger than calls_a_comparison + 2. Younger entries are not
//      compared: a rank that finds a difference early stops, and the others would wait for it.
constexpr u32 calls_a_comparison = 8;

__device__ __forceinline__ bool is_last_block() { return blockIdx.x == gridDim.x - 1; }

__device__ __forceinline__ void tell_call(const Arguments& a, u32 epoch) {
  if (!is_last_block() || threadIdx.x >= max_ranks) return;
  Counters* const there = a.peer_counters[threadIdx.x];
  if (there != nullptr)
    store_relaxed_sys(&there->called[a.rank][epoch % kept_calls], u64(epoch + 1) << 32 | a.fingerprint);
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

// After begin_call and after the first loads of the input. The compiler waits for this value at once, since it is
// uniform over the block, so everything after it starts later.
__device__ __forceinline__ void read_epoch(const Arguments& a, Call& call) {
  const u64 state = load_relaxed_gpu(reinterpret_cast<const u64*>(&a.counters->epoch_state[blockIdx.x]));
  call.epoch = u32(state);
  call.aborted = u32(state >> 32);
}

// Once a call, by all threads, while the first packs travel.
__device__ __forceinline__ void advance_epoch(const Arguments& a, Call& call) {
  tell_call(a, call.epoch);
  call.was_busy = __syncthreads_or(call.was_busy);  // a barrier: every warp has read the epoch
  for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < max_blocks; i += blockDim.x * gridDim.x)
    store_relaxed_gpu(&a.counters->epoch_state[i].epoch, call.epoch + 1);
}

// The same where warp 0 alone has read the epoch.
__device__ __forceinline__ void advance_epoch_in_warp(const Arguments& a, Call& call) {
  tell_call(a, call.epoch);
  call.was_busy = __any_sync(0xffffffff, call.was_busy);
  for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < max_blocks; i += 32 * gridDim.x)
    store_relaxed_gpu(&a.counters->epoch_state[i].epoch, call.epoch + 1);
}

// By a call that was aborted before it sent or awaited anything.
__device__ __forceinline__ void end_aborted_call(const Arguments& a, const Call& call) {
  if (threadIdx.x != 0) return;
  store_relaxed_gpu(&a.counters->busy[blockIdx.x], 0);
  if (call.was_busy) report(a, overlapped, call.epoch, a.rank, 0, 1);
}

// By all threads of the block. The block stays busy until its last thread has received everything: a call that began
// earlier could go unreported and take this one's data.
__device__ __forceinline__ void end_call(const Arguments& a, const Call& call) {
  __syncthreads();
  if (call.epoch % calls_a_comparison == 0) compare_calls(a, call.epoch);
  end_aborted_call(a, call);
}

// ---- deadlines ------------------------------------------------------------------------------------------------------

// Checked once a spin. Reads the clock and the abort word every 1024th time only, so short waits do not pay for them.
class Deadline {
 public:
  enum State { waiting, expired, aborted };

  // `patience` in quarters of the call's timeout.
  __device__ __forceinline__ State check(const Arguments& a, const Call& call, u32 patience = 4) {
    if (++spins_ & 1023) return waiting;
    if (call.was_busy) report(a, overlapped, call.epoch, a.rank, 0, 1);
    if (load_relaxed_gpu(a.abort) != 0) {
      stop_sending(a);  // the wait that expired may have been another algorithm's
      return aborted;
    }
    const u64 now = global_time_ns();
    if (start_ == 0) start_ = now;
    return now - start_ < a.timeout_ns / 4 * patience ? waiting : expired;
  }

 private:
  u64 start_ = 0;
  u32 spins_ = 0;
};

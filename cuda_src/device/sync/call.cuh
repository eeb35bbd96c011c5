// The frame of every collective kernel: it counts calls, and marks the blocks of a call as busy.
//
// Epochs live in device memory, so a replayed graph goes on where the last call stopped. Each block reads a counter of
// its own. Once all its warps have read it, the block advances every counter congruent to its index modulo the grid, so
// all counters are equal between kernels. That needs no atomic, and grids of any size may follow each other.
//
// (22) Busy marks tell where (1) does not hold. It needs the calls of a rank to run in one order. The host sees to
//      that, but cannot where two graphs are replayed at the same time. So thread 0 of a block marks its index as busy,
//      first of all, and clears the mark once the block's last thread has received everything. Calls of two algorithms
//      share no counters and no scratch, and may overlap.
//      - A call in order finds no mark: by (1) the calls before it are over, and have cleared theirs.
//      - A block that marks its index while another one's mark stands finds that mark, whatever the grids of their
//        calls, since exchanges of one word come in one order. Its call reports `overlapped`, at its end at the latest.
//      - A mark certainly stands from the barrier in advance_epoch on, where thread 0 has the result of its exchange.
//        Before, the block's other threads may have read the epoch and sent packs with the exchange still on its way.
//      Nothing more is promised: such calls may take each other's data or wait until the deadline. Unreported are a
//      block that marks and clears its index before the exchange of one that has already begun, blocks of one index
//      that run one after another although their calls overlap, and blocks beyond the other call's grid.
#pragma once
#include "device/sync/kernel_order.cuh"
#include "device/sync/record.cuh"

// What a thread knows of the call. Two calls that follow each other have epochs of different parity.
struct Call {
  u32 epoch;
  u32 was_busy;
  u32 aborted;  // an earlier call gave up waiting; this one must send nothing, since peers may still be in the earlier
                // call and would take this one's data for its data
};

// The same, with addresses that were computed before the wait (16).
struct HeldCall : Call {
  const u64* state;  // this block's EpochState
  u32* busy;         // this block's mark
};

// By all threads of the block, first after wait_for_previous_kernel. Marks the block as busy (22), with a relaxed
// exchange of gpu scope by thread 0. Its latency is the longest, and its result is used in advance_epoch only.
DEVICE Call begin_call(const Arguments& a) {
  return {0, threadIdx.x == 0 ? exchange_relaxed_gpu(&a.counters->busy[blockIdx.x], 1) : 0, 0};
}

// By all threads of the block, first of all: wait_for_previous_kernel with values that were computed before (16), and
// then the same, with a relaxed exchange of gpu scope.
template <class... Values>
DEVICE HeldCall begin_call(const Arguments& a, Values&... values) {
  HeldCall call{};
  call.state = reinterpret_cast<const u64*>(&a.counters->epoch_state[blockIdx.x]);
  call.busy = &a.counters->busy[blockIdx.x];
  wait_for_previous_kernel(a, call.state, call.busy, values...);
  if (threadIdx.x == 0) call.was_busy = exchange_relaxed_gpu(call.busy, 1);
  return call;
}

// Internal: the state of a block as read.
DEVICE void take_state(Call& call, u64 state) {
  call.epoch = u32(state);
  call.aborted = u32(state >> 32);
}

// By all threads of the block, after begin_call and the first loads of the input, before anything is sent. A relaxed
// load of gpu scope, for which the compiler waits at once: what comes after it starts later. A call that is `aborted`
// sends nothing, and returns by end_aborted_call.
DEVICE void read_epoch(const Arguments& a, Call& call) {
  take_state(call, load_relaxed_gpu(reinterpret_cast<const u64*>(&a.counters->epoch_state[blockIdx.x])));
}
DEVICE void read_epoch(const Arguments&, HeldCall& call) { take_state(call, load_relaxed_gpu(call.state)); }

// By all threads of the block, once a call, after read_epoch, while the first packs travel. Relaxed, of gpu scope,
// behind a barrier of the block. Tells all ranks what this one calls (19). The epoch of an aborted call stays, so calls
// behind a failed one overwrite nothing that was told before: it is there for ranks that come late.
DEVICE void advance_epoch(const Arguments& a, Call& call) {
  tell_call(a, call.epoch);
  call.was_busy = __syncthreads_or(call.was_busy);  // a barrier: every warp has read the epoch
  for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < max_blocks; i += blockDim.x * gridDim.x)
    store_relaxed_gpu(&a.counters->epoch_state[i].epoch, call.epoch + 1 - call.aborted);
}

// Internal: compare_calls, out of line.
__device__ __noinline__ void compare_calls_apart(const Arguments& a, u32 now) { compare_calls(a, now); }

// By all threads of the block: the same, relaxed and of gpu scope. It compares what ranks call at once, and not at the
// end of the call, which would then end later.
DEVICE void advance_epoch(const Arguments& a, HeldCall& call) {
  advance_epoch(a, static_cast<Call&>(call));
  if (call.epoch % calls_a_comparison == 0 && is_last_block()) compare_calls_apart(a, call.epoch);
}

// Internal: begin_call, read_epoch and, unless the call is aborted, advance_epoch, by warp 0 alone for its block.
// Another block that gives up meanwhile changes `aborted`, so all threads take what the first one has read.
DEVICE Call begin_call_in_warp(const Arguments& a) {
  Call call = begin_call(a);
  read_epoch(a, call);
  call.aborted = __shfl_sync(0xffffffff, call.aborted, 0);
  if (!call.aborted) {
    tell_call(a, call.epoch);
    call.was_busy = __any_sync(0xffffffff, call.was_busy);
    for (u32 i = blockIdx.x + threadIdx.x * gridDim.x; i < max_blocks; i += 32 * gridDim.x)
      store_relaxed_gpu(&a.counters->epoch_state[i].epoch, call.epoch + 1);
  }
  return call;
}

// Internal: clears the mark of the block at `busy`.
DEVICE void clear_mark(const Arguments& a, const Call& call, u32* busy) {
  store_relaxed_gpu(busy, 0);
  if (call.was_busy) report(a, overlapped, call.epoch, a.rank, 0, 1);
}

// By all threads of the block, last of all in a call that was aborted before it sent or awaited anything. A relaxed
// store of gpu scope clears the busy mark.
DEVICE void end_aborted_call(const Arguments& a, const Call& call) {
  if (threadIdx.x == 0) clear_mark(a, call, &a.counters->busy[blockIdx.x]);
}
DEVICE void end_aborted_call(const Arguments& a, const HeldCall& call) {
  if (threadIdx.x == 0) clear_mark(a, call, call.busy);
}

// By all threads of the block, last of all, also after a wait that failed. Relaxed, of gpu and system scope, behind a
// barrier of the block: it releases nothing to peers. The block stays busy until its last thread has received
// everything (22): a call that begins before could otherwise go unreported, and take this one's data.
DEVICE void end_call(const Arguments& a, const Call& call) {
  __syncthreads();
  if (call.epoch % calls_a_comparison == 0) compare_calls(a, call.epoch);
  end_aborted_call(a, call);
}
DEVICE void end_call(const Arguments& a, const HeldCall& call) {
  __syncthreads();
  end_aborted_call(a, call);
}

// Flags between ranks: word [row][source] of every rank's pad. The source writes it, and only ever advances its step.
#pragma once
#include "device/sync/deadline.cuh"

// Rows of a pad: one for each block, or for each channel and shot (two_shot_tma.cu).
constexpr int pad_rows = max_blocks;

// Each flag: twice the step, plus the parity of the call's epoch; below them, in the lower half, the call's
// fingerprint.
struct SignalPad {
  u64 flag[pad_rows][max_ranks];
};

// By any thread: the pad of a rank, with which the scratch of an algorithm that signals begins.
DEVICE SignalPad* signal_pad(const Arguments& a, int rank) { return reinterpret_cast<SignalPad*>(a.scratch[rank]); }

// By any thread: the slots behind the pad, of a rank's scratch. They are read with plain loads after a wait (20).
DEVICE Pack* after_signal_pad(char* scratch) { return reinterpret_cast<Pack*>(scratch + sizeof(SignalPad)); }

DEVICE Pack* after_signal_pad(const Arguments& a, int rank) { return after_signal_pad(a.scratch[rank]); }

// (2) Signal: the barrier orders every thread's earlier writes, local and remote, before each release store, and
//     release is cumulative. Wait: the acquire load that sees the value, then the barrier, order those writes before
//     every thread's later reads. The barrier is the block's, or the warp's where a warp signals and waits for itself.
//     Steps are counted per row and only by calls that use the row, so a flag is never far behind. They are compared as
//     signed differences and may wrap.

// (25) A rank compares what its peers call with what it calls before it reads any data of theirs. Each flag has the
//      fingerprint of the sender's call in the 64 bits that carry the step, so this needs no other access.
//      - A flag that has reached a step of this call is of this call or the next one, since by (13) no peer is further
//        ahead. The parity tells which. A flag of the next call tells nothing about this one, but its sender has ended
//        this one. There it awaited flags of this rank, which carried this call, and found them alike.
//      - `first_step` is the last step of an earlier call. Its parity tells nothing, so it is not compared.
//      - Every rank awaits a flag of each other rank in each call, and sends its own first. So each rank is told.

// (13) Who hears from a peer's call hears after all that came before this call on the peer. By (1) the peer's earlier
//      calls are over then, and so are the kernels that wrote its input. One flag is enough, of any block and any step.
//      - By (2) all that precedes what follows the wait for the flag. So what the peer has read in earlier calls may be
//        overwritten, and what it has written may be read.
//      - Two stages that alternate by the epoch's parity therefore need no barrier after the reads. Call e + 2
//        overwrites what peers read in call e, and follows call e + 1, which has heard from every peer.
//      - Readiness in the data is no release, so what came before it precedes in time alone. That is enough for words
//        that are loaded from L2: (3) and (19).

// (20) Slots are read with plain loads, which may hit in the SM's L1 cache, while peers' stores reach only the L2 cache
//      of the slot's GPU. A slot holds other data in each use, and yet no load returns data of an earlier use.
//      - PTX promises it for every weak load that (2) orders behind the stores, whatever caches lie between.
//      - The acquire load of system scope keeps that promise: once it has loaded the flag it invalidates the L1 cache
//        of its SM (CCTL.IVALL in machine code). The threads that read the slot are of the same block, so of the same
//        SM, and by a barrier, or an mbarrier, they read after that. What L1 fetches then comes from L2, where the data
//        are.
//      - ld.global.nc has no such promise. The compiler emits it where it knows that nobody writes while the kernel
//        runs. So no pointer is __restrict__, and no kernel calls __ldg (tests/device/test_ptx.py).
//      - Copies, (5) and (6), bypass L1. So do relaxed loads of system scope, the only ones that read data with their
//        own readiness.

// Internal: the value of a flag of this call.
DEVICE u64 flag_of(const Arguments& a, const Call& call, u32 step) {
  return u64(2 * step + call.epoch % 2) << 32 | a.fingerprint;
}

// By all threads of a warp, after read_epoch and behind a barrier with those whose writes it publishes. The threads
// with `sends` set their flag in the row on `peer` to `step`: a release store of system scope (2), by one thread for
// each row and peer.
DEVICE void set_flag(const Arguments& a, const Call& call, bool sends, u32 row, u32 peer, u32 step) {
  store_release_sys_if(sends, &signal_pad(a, sends ? peer : 0)->flag[row][a.rank], flag_of(a, call, step));
}

// Internal: whether a flag has come to `step`.
DEVICE bool reaches(u64 flag, u32 step) { return int(u32(flag >> 32) - 2 * step) >= 0; }

// Internal: by a thread that has waited for `step` for some time, or has seen another call's flag of it. Returns when
// its wait began, as `start` of the next time, or 0 if it gives up.
DEVICE u64 wait_longer(const Arguments& a, const Call& call, u32 peer, u32 step, u64 seen, u64 start) {
  if (reaches(seen, step)) {
    report(a, disagreed, call.epoch, peer, a.fingerprint, u32(seen));
    return 0;
  }
  Deadline deadline(start);
  const Deadline::State state = deadline.look(a, call);
  if (state == Deadline::waiting) return deadline.start();
  if (state == Deadline::expired) report(a, timed_out, call.epoch, peer, step, u32(seen >> 33));
  return 0;
}

// Internal: the same, out of line.
__device__ __noinline__ u64 wait_longer_apart(const Arguments& a, Call call, u32 peer, u32 step, u64 seen, u64 start) {
  return wait_longer(a, call, peer, step, seen, start);
}

// By any thread, after this rank's own flag is sent: waits until `peer` has set its flag in a row to `step`. An acquire
// load of system scope: what the peer wrote before that is visible to this thread, and, behind a barrier, to the
// threads that meet it there (2). False when it did not in time, or, with `compares`, when it calls something else.
// With `Apart`, what a long wait does is out of line, and the code of a short one is compact. A kernel of wgmma must
// not have it: the assembler would have each product waited for.
template <bool Apart>
DEVICE bool wait_for_flag(const Arguments& a, const Call& call, u32 row, u32 peer, u32 step, bool compares = true) {
  const u64* flag = &signal_pad(a, a.rank)->flag[row][peer];
  const u64 own = flag_of(a, call, step);
  u64 start = 0;
  u32 spins = 0;
  for (u64 seen; (seen = load_acquire_sys(flag)) != own;) {
    if (reaches(seen, step)) {
      const bool of_this_call = (seen >> 32) % 2 == call.epoch % 2;
      if (!compares || !of_this_call || u32(seen) == a.fingerprint) return true;
    } else if (++spins % spins_a_look != 0) {
      continue;
    }
    start = Apart ? wait_longer_apart(a, call, peer, step, seen, start) : wait_longer(a, call, peer, step, seen, start);
    if (start == 0) return false;
  }
  return true;
}

// Signals between the blocks of one index on all ranks, in steps, by the row of that index. Each thread of the block
// has an equal copy, made after begin_call. With `OfWarp` they are signals of one warp, in a row of its own, and a
// barrier is the warp's.
template <bool OfWarp>
class RowSignals {
 public:
  // By all threads of the block: reads the count of earlier steps, relaxed and of gpu scope.
  DEVICE explicit RowSignals(const Arguments& a)
      : row_(blockIdx.x), base_(load_relaxed_gpu(&a.counters->steps[blockIdx.x])) {}

  // By all threads of a warp: `base` is the row's count before this call. Touches no memory.
  DEVICE RowSignals(u32 row, u32 base) : row_(row), base_(base) {}

  // By any thread: the number of this call's step 0. Numbers continue from call to call.
  DEVICE u32 first_step() const { return base_; }

  // By all threads of the block, after read_epoch: tells every peer that this block has finished `steps` steps of this
  // call. A barrier of the block, then release stores of system scope: peers that wait for the step see all that the
  // block wrote before, here and there (2).
  template <int N>
  DEVICE void send(const Arguments& a, const Call& call, u32 steps) const {
    const u32 peer = OfWarp ? threadIdx.x % 32 : threadIdx.x;
    OfWarp ? __syncwarp() : __syncthreads();
    set_flag(a, call, peer < N && peer != a.rank, row_, peer, base_ + steps);
  }

  // By all threads of the block: waits until this block of every peer has finished `steps` steps; at 0, all those of
  // earlier calls. Otherwise this block has sent a step in this call before. Acquire loads of system scope, then a
  // barrier of the block: all threads see what these blocks wrote before their `send` (2). After a step of this call,
  // peers' earlier calls are over (13). False, in all threads, when one did not in time, or calls something else; then
  // the block reads no slots, and goes on to `end`.
  template <int N>
  DEVICE bool wait(const Arguments& a, const Call& call, u32 steps) const {
    const u32 peer = OfWarp ? threadIdx.x % 32 : threadIdx.x;
    bool failed = false;
    if (peer < N && peer != a.rank)
      failed = !wait_for_flag<true>(a, call, row_, peer, base_ + steps, OfWarp || steps > 0);
    if constexpr (!OfWarp) return !__syncthreads_or(failed);
    __syncwarp();
    return !__any_sync(0xffffffff, failed);
  }

  // By all threads of the block, once a call, after its last wait: the next call continues from this step. Relaxed, of
  // gpu scope. `steps` are those that this block of every rank has sent in this call.
  DEVICE void end(const Arguments& a, u32 steps) const {
    if (threadIdx.x == 0) store_relaxed_gpu(&a.counters->steps[blockIdx.x], base_ + steps);
  }

 private:
  const u32 row_, base_;
};

// The signals of a block.
using Signals = RowSignals<false>;

// Internal: by one warp of block 0, in a kernel that writes to peers before it hears from them: tells them, in row 0,
// that this rank has entered the call. By (13) what it has read in earlier calls may then be overwritten.
template <int N>
DEVICE void enter(const Arguments& a, const Call& call) {
  const u32 lane = threadIdx.x % 32;
  set_flag(a, call, lane < N && lane != a.rank, 0, lane, call.epoch + 1);
}

// Internal: by a warp: waits until every peer has entered. False if one did not in time, or entered another call (25).
// It comes before all other waits, so that a time-out names the missing rank, and no rank that waits for it.
template <int N>
DEVICE bool wait_until_all_entered(const Arguments& a, const Call& call) {
  const int lane = threadIdx.x % 32;
  const bool failed = lane < N && lane != a.rank && !wait_for_flag<false>(a, call, 0, lane, call.epoch + 1);
  __syncwarp();
  return !__any_sync(0xffffffff, failed);
}

// Waits with a deadline.
#pragma once
#include "device/sync/call.cuh"

constexpr u32 spins_a_look = 1024;  // so that short waits do not pay for looks

// The deadline of one wait, for a loop that polls. Each thread that polls has its own.
class Deadline {
 public:
  enum State { waiting, expired, aborted };

  Deadline() = default;
  // By any thread: a wait that began at `start`, or begins with the first look if that is 0. Touches no memory.
  DEVICE explicit Deadline(u64 start) : start_(start) {}

  // By any thread, once a spin: `look` at every 1024th, and `waiting` else. Relaxed, of gpu scope. `patience` is in
  // quarters of the call's timeout.
  DEVICE State check(const Arguments& a, const Call& call, u32 patience = 4) {
    return ++spins_ % spins_a_look != 0 ? waiting : look(a, call, patience);
  }

  // By any thread: reads the abort word, what the ranks call, and the clock. Relaxed loads, of gpu and system scope.
  // `expired`: the caller reports `timed_out` and gives up. `aborted`: it gives up, as that is reported already.
  DEVICE State look(const Arguments& a, const Call& call, u32 patience = 4) {
    if (call.was_busy) report(a, overlapped, call.epoch, a.rank, 0, 1);
    if (load_relaxed_gpu(a.abort) != 0) {
      stop_sending(a);  // the wait that expired may have been another algorithm's
      return aborted;
    }
    if (found_difference(a, call.epoch)) return aborted;
    const u64 now = global_time_ns();
    if (start_ == 0) start_ = now;
    return now - start_ < a.timeout_ns / 4 * patience ? waiting : expired;
  }

  // By any thread: the time of the first look in ns, or 0.
  DEVICE u64 start() const { return start_; }

 private:
  u64 start_ = 0;  // the time of the first look
  u32 spins_ = 0;
};

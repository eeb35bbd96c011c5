// Waits with a deadline.
#pragma once
#include "device/sync/call.cuh"

// Checked once a spin. Reads the clock, the abort word and what the ranks call every 1024th time only, so short waits do
// not pay for them.
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
    if (found_difference(a, call.epoch)) return aborted;
    const u64 now = global_time_ns();
    if (start_ == 0) start_ = now;
    return now - start_ < a.timeout_ns / 4 * patience ? waiting : expired;
  }

 private:
  u64 start_ = 0;
  u32 spins_ = 0;
};

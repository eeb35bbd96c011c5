// Waits with a deadline.
#pragma once
#include "device/sync/call.cuh"

// Checked once a spin. Reads the clock and the abort word every 1024th time only, so short waits do not pay for them.
class Deadline {
 public:
  enum State { waiting, expired, aborted };

  // `patience` in quarters of the call's timeout.
  __device__ __forceinline__ State check(const Arguments& a, const Call& call, u32 patience = 4) {
    if (++spins_ & 1023) return waiting;
    const Unlike other = find_unlike(a, call.epoch);
    if (call.was_busy || other.fingerprint != 0)  // one call of a function: kernels of tiles have no registers for two
      report(a, call.was_busy ? overlapped : disagreed, call.epoch, call.was_busy ? a.rank : other.peer,
             call.was_busy ? 0 : a.fingerprint, call.was_busy ? 1 : other.fingerprint);
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

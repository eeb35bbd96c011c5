// Waits with a deadline.
#pragma once
#include "device/sync/call.cuh"

constexpr u32 spins_a_look = 1024;  // so that short waits do not pay for looks

class Deadline {
 public:
  enum State { waiting, expired, aborted };

  Deadline() = default;
  __device__ __forceinline__ explicit Deadline(u64 start) : start_(start) {}

  // Once a spin. `patience` in quarters of the call's timeout.
  __device__ __forceinline__ State check(const Arguments& a, const Call& call, u32 patience = 4) {
    return ++spins_ % spins_a_look != 0 ? waiting : look(a, call, patience);
  }

  // Reads the abort word, what the ranks call, and the clock.
  __device__ __forceinline__ State look(const Arguments& a, const Call& call, u32 patience = 4) {
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

  __device__ __forceinline__ u64 start() const { return start_; }

 private:
  u64 start_ = 0;  // the time of the first look
  u32 spins_ = 0;
};

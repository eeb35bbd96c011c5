// Ranks tell each other that they have entered a call, for kernels that write to peers before they hear from them.
//
// A rank says so in row 0 of its peers' pads, as the call's number plus 1. By (13) what it has read may be overwritten.
#pragma once
#include "device/sync/signal_pad.cuh"

// By one warp of block 0.
template <int N>
__device__ __forceinline__ void enter(const Arguments& a, const Call& call) {
  const u32 lane = threadIdx.x % 32;
  set_flag(a, call, lane < N && lane != a.rank, 0, lane, call.epoch + 1);
}

// By one warp: waits until every peer has entered this call. False if one did not in time, or entered another call
// (25). It comes before all other waits, so that a time-out names the missing rank, and no rank that waits for it.
template <int N>
__device__ __forceinline__ bool wait_until_all_entered(const Arguments& a, const Call& call) {
  const int lane = threadIdx.x % 32;
  const bool failed = lane < N && lane != a.rank && !wait_for_flag<false>(a, call, 0, lane, call.epoch + 1);
  __syncwarp();
  return !__any_sync(0xffffffff, failed);
}

// Two copies of the ranks' slots, which take turns.
#pragma once
#include "device/sync/call.cuh"

template <int N>
__device__ __forceinline__ u32 slots_of_call(const Arguments& a, const Call& call) {
  return (call.epoch & 1) * N * a.capacity;
}

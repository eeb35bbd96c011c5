// The sum of a number over a warp.
#pragma once
#include "device/arguments.cuh"

// Neighbours first, then pairs, and so on: the same in all lanes, as sums of slots in graphar/numerics/norms.py.
__device__ __forceinline__ float sum_of_warp(float v) {
  for (int step = 1; step < 32; step *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
  return v;
}

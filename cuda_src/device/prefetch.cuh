// Prefetches the next matmul's weight into L2 while a kernel waits for its peers.
#pragma once
#include "device/arguments.cuh"
#include "device/ptx/tma.cuh"

constexpr u32 prefetch_chunk = 16 << 10;  // bytes of one instruction, which may have up to 1 MB

// By all threads, after their pushes: prefetches this block's share. One lane of each warp issues chunks and waits for
// none. Neighbouring chunks are issued by different SMs.
__device__ __noinline__ void prefetch_apart(const Arguments& a) {
  if (threadIdx.x % 32) return;
  const u32 step = (blockDim.x + 31) / 32 * gridDim.x * prefetch_chunk;
  for (u32 at = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * prefetch_chunk; at < a.prefetch_nbytes; at += step)
    prefetch_to_l2(a.prefetch + at, min(prefetch_chunk, a.prefetch_nbytes - at));
}

__device__ __forceinline__ void prefetch_share(const Arguments& a) {
  if (a.prefetch_nbytes != 0) prefetch_apart(a);
}

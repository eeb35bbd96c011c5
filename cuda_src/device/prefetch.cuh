// What comes next is brought into L2 while a kernel waits for its peers: the weight that the following matmul reads.
#pragma once
#include "arguments.cuh"
#include "tma.cuh"

constexpr u32 prefetch_chunk = 16 << 10;  // bytes of one instruction, which has room for 1 MB

// This block's share, by all threads, once what they push is on its way. One lane of each warp issues some chunks, those
// of neighbours on different SMs, and waits for none.
__device__ __forceinline__ void prefetch_share(const Arguments& a) {
  if (a.prefetch_nbytes == 0 || threadIdx.x % 32) return;
  const u32 step = (blockDim.x + 31) / 32 * gridDim.x * prefetch_chunk;
  for (u32 at = (threadIdx.x / 32 * gridDim.x + blockIdx.x) * prefetch_chunk; at < a.prefetch_nbytes; at += step)
    prefetch_to_l2(a.prefetch + at, min(prefetch_chunk, a.prefetch_nbytes - at));
}

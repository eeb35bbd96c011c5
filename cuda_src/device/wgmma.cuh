// Matrix products by a warpgroup, 128 threads that begin at a multiple of 128 (sm_90a only): 64 rows at a time, 16-bit
// elements from shared memory, fp32 sums in registers.
//
// (9) A ring of places in shared memory, which one thread fills by bulk loads and consumer warps multiply from. Use u of a
//     place is phase u of its two mbarriers: `filled` (one arrival, and the bytes of the loads) and `emptied` (an arrival
//     of each consumer warp).
//     - A fill waits for `emptied` u - 1, where phase -1 of a new mbarrier counts as ended; a consumer waits for `filled` u
//       before it multiplies, and arrives at `emptied` u once a wait for those products has returned. So nothing is
//       overwritten that is still read.
//     - Parities suffice: `filled` u + 1 needs a fill after `emptied` u, thus after every consumer's wait for `filled` u
//       has returned; `emptied` u + 1 needs `filled` u + 1, thus a fill after the wait for `emptied` u.
//     - Of consumers that alternate (Alternating in tiles.cuh) each use has one, whose warps alone arrive. One begins to wait
//       for its uses once the other has waited for all before them, so waits come in the order of uses all the same.
//     - Loads write and products read through the async proxy both, so no fence stands between them. The wait for `filled`
//       orders the loads before the products; reads of products are over when the wait for them returns.
//     - In a cluster each block's fill writes to the same place of all blocks, so `emptied` counts the consumer warps of
//       all. Another block's bytes for use u may come before this block's own arrival, but not before `filled` u - 1 has
//       ended: they were sent after this block's consumers had arrived for use u - 1.
#pragma once
#include "wgmma_ptx.cuh"

// ---- operands in shared memory --------------------------------------------------------------------------------------

// What tells the tensor cores where an operand lies: boxes as in tensor_map.cuh. The bits are those of PTX's "matrix
// descriptor"; a part of the operand is named by adding `offset` bytes, which may be inside the swizzled 128.
__device__ __forceinline__ u64 operand(const void* shared, u32 leading_nbytes, u32 stride_nbytes) {
  constexpr u64 swizzle_128_bytes = u64(1) << 62;
  return swizzle_128_bytes | u64(stride_nbytes >> 4) << 32 | u64(leading_nbytes >> 4) << 16 |
         (shared_address(shared) & 0x3ffff) >> 4;
}
__device__ __forceinline__ u64 advance(u64 operand, u32 offset) { return operand + (offset >> 4); }

// Rows of 64 elements of K: 8 rows are 1024 bytes, the next 8 follow.
__device__ __forceinline__ u64 operand_by_rows(const void* shared) { return operand(shared, 16, 1024); }

// The transposed form: boxes of 64 of K, each a row of 64 columns; the next 64 columns are the next box.
__device__ __forceinline__ u64 operand_by_columns(const void* shared) { return operand(shared, 64 * 128, 1024); }

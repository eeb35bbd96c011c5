// Matrix descriptors: where an operand of wgmma lies in shared memory, in boxes as in tensor_map.cuh (sm_90a only).
#pragma once
#include "device/ptx/wgmma.cuh"

// PTX calls the bits "matrix descriptor". A part of the operand is named by adding `offset` bytes, which may lie inside
// the swizzled 128.
__device__ __forceinline__ u64 operand(const void* shared, u32 leading_nbytes, u32 stride_nbytes) {
  constexpr u64 swizzle_128_bytes = u64(1) << 62;
  return swizzle_128_bytes | u64(stride_nbytes >> 4) << 32 | u64(leading_nbytes >> 4) << 16 |
         (shared_address(shared) & 0x3ffff) >> 4;
}
__device__ __forceinline__ u64 advance(u64 operand, u32 offset) { return operand + (offset >> 4); }

// Rows of 64 elements of K: 8 rows are 1024 bytes, and the next 8 follow.
__device__ __forceinline__ u64 operand_by_rows(const void* shared) { return operand(shared, 16, 1024); }

// The transposed form: boxes of 64 of K, each a row of 64 columns. The next 64 columns are the next box.
__device__ __forceinline__ u64 operand_by_columns(const void* shared) { return operand(shared, 64 * 128, 1024); }

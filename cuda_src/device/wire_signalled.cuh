// Encoded tiles in slots that flags announce: written and read with ordinary accesses, which the signals order.
#pragma once
#include "wire_sum.cuh"

struct Store {
  template <int Count>
  __device__ __forceinline__ void operator()(Words<Count>* address, const u32* words) const {
    Words<Count> piece;
#pragma unroll
    for (int w = 0; w < Count; ++w) piece.word[w] = words[w];
    *address = piece;
  }
};

struct Load {
  template <int Count>
  __device__ __forceinline__ void operator()(const Words<Count>* address, u32* words) const {
    const Words<Count> piece = *address;
#pragma unroll
    for (int w = 0; w < Count; ++w) words[w] = piece.word[w];
  }
};

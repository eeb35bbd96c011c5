// Random bits from a counter: Philox-4x32 with seven rounds, the fewest that pass BigCrush (Salmon et al., 2011).
#pragma once
#include "device/ptx/ptx.cuh"

// The random bits depend on these and on the index in the tensor.
struct Noise {
  u64 seed;
  u32 call;
  u32 source;  // the rank, or noise_of_sum
};

constexpr u32 noise_of_sum = 0xff;

// 16 bits for each of the 8 elements of run `index` of the tensor, the first element in the lowest bits.
__device__ __forceinline__ void random_halves(const Noise& noise, u64 index, u32 (&word)[4]) {
  u32 key0 = u32(noise.seed), key1 = u32(noise.seed >> 32);
  u32 c0 = u32(index), c1 = u32(index >> 32), c2 = noise.call, c3 = noise.source;
  for (int round = 0; round < 7; ++round) {
    const u64 product0 = u64(0xd2511f53u) * c0, product1 = u64(0xcd9e8d57u) * c2;
    c0 = u32(product1 >> 32) ^ c1 ^ key0;
    c1 = u32(product1);
    c2 = u32(product0 >> 32) ^ c3 ^ key1;
    c3 = u32(product0);
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  word[0] = c0, word[1] = c1, word[2] = c2, word[3] = c3;
}

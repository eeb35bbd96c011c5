// The host's twin of cuda_src/device/ptx/codec.cuh, and of the intrinsics that codecs use.
#pragma once
#include "device/pack.cuh"

inline u32 __reduce_max_sync(u32 lanes, u32 v) {
  for (int mask = 1; mask < 32; mask *= 2) v = max(v, __shfl_xor_sync(lanes, v, mask));
  return v;
}

inline int __popc(u32 v) { return std::popcount(v); }
inline int __ffs(u32 v) { return v ? std::countr_zero(v) + 1 : 0; }
inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
  const u64 both = u64(b) << 32 | a;
  u32 v = 0;
  for (int i = 0; i < 4; ++i) v |= u32(both >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
  return v;
}
inline u32 choose_bits(u32 mask, u32 a, u32 b) { return (a & mask) | (b & ~mask); }
inline u32 spread_signs(u32 bytes) { return (bytes >> 7 & 0x01010101) * 0xff; }

inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __frcp_rn(float v) { return 1 / v; }
// Right for the additions of codecs: a number below 2^22 and one between 2^23 and 2^24.
inline float __fadd_rd(float a, float b) { return std::floor(a) + b; }

namespace twin {
inline float larger_of(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::bit_cast<float>(0x7fffffffu);
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}

// a x b + c, rounded once to bf16. The product of two bf16 numbers is exact in fp64. A number rounded to odd keeps more
// than two bits beyond the next format's, so that the last rounding gives the bits of a single one.
inline u32 bf16_fma(float a, float b, float c) {
  const double product = double(a) * b, total = product + c;
  if (!std::isfinite(total)) return bf16_from_float(float(total));
  const double taken = total - product, error = (product - (total - taken)) + (c - taken);
  const u64 bits = std::bit_cast<u64>(total), odd = bits & 1 ? bits : (error > 0) == (total > 0) ? bits + 1 : bits - 1;
  const double to_odd = error == 0 ? total : std::bit_cast<double>(odd);
  float v = float(to_odd);
  if (std::fabs(v) > std::fabs(to_odd)) v = std::nextafter(v, 0.0f);
  if (v != to_odd) v = std::bit_cast<float>(std::bit_cast<u32>(v) | 1);
  return bf16_from_float(v);
}
}  // namespace twin

template <class T>
u32 larger(T, u32 a, u32 b) {
  constexpr int E = elements_per_word<T>;
  float x[E], y[E];
  T::unpack(a, x);
  T::unpack(b, y);
  for (int e = 0; e < E; ++e) x[e] = twin::larger_of(x[e], y[e]);
  return T::round(x);
}

template <class T>
u32 smaller(T type, u32 a, u32 b) {
  constexpr u32 signs = 0x80008000u;
  return larger(type, a ^ signs, b ^ signs) ^ signs;
}

template <class T>
u32 larger_magnitude(T type, u32 a, u32 b) {
  constexpr u32 magnitude = elements_per_word<T> == 2 ? 0x7fff7fffu : 0x7fffffffu;
  return larger(type, a & magnitude, b & magnitude);
}

// A NaN is canonical. Any other result has the exclusive or of both signs.
inline u32 larger_magnitude(bf16 type, u32 a, u32 b) {
  const u32 larger_one = larger(type, a & 0x7fff7fff, b & 0x7fff7fff);
  u32 numbers = 0x80008000;
  if ((larger_one & 0x7fff) > 0x7f80) numbers &= 0xffff0000;
  if ((larger_one >> 16 & 0x7fff) > 0x7f80) numbers &= 0xffff;
  return larger_one | ((a ^ b) & numbers);
}

inline u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  float x[2], y[2], z[2];
  bf16::unpack(a, x);
  bf16::unpack(b, y);
  bf16::unpack(c, z);
  return twin::bf16_fma(x[0], y[0], z[0]) | twin::bf16_fma(x[1], y[1], z[1]) << 16;
}

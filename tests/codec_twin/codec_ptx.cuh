// The host's twin of cuda_src/device/codec_ptx.cuh.
#pragma once
#include "pack.cuh"

template <int Count>
struct alignas(4 * Count) Words {
  u32 word[Count];
};

// ---- the larger of two ----------------------------------------------------------------------------------------------

inline float larger_of(float a, float b) {
  if (std::isnan(a) || std::isnan(b)) return std::bit_cast<float>(0x7fffffffu);
  return a > b || (a == b && !std::signbit(a)) ? a : b;
}

template <class T>
u32 larger(T, u32 a, u32 b) {
  constexpr int E = elements_per_word<T>;
  float x[E], y[E];
  T::unpack(a, x);
  T::unpack(b, y);
  for (int e = 0; e < E; ++e) x[e] = larger_of(x[e], y[e]);
  return T::round(x);
}

template <class T>
u32 larger_magnitude(T type, u32 a, u32 b) {
  constexpr u32 magnitude = elements_per_word<T> == 2 ? 0x7fff7fffu : 0x7fffffffu;
  return larger(type, a & magnitude, b & magnitude);
}

// ---- conversions ----------------------------------------------------------------------------------------------------

inline u32 fp16_from_float_down(float v) {
  const u32 nearest = fp16_from_float(v);
  if (!(float_from_fp16(nearest) > v)) return nearest;
  return nearest & 0x8000 || nearest == 0 ? (nearest | 0x8000) + 1 : nearest - 1;
}
inline u32 fp16_from_float_up(float v) {
  return std::isnan(v) ? 0x7fff : fp16_from_float_down(-v) ^ 0x8000;
}

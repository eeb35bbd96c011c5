// fp32 to e4m3 and back. e4m3 has a sign, four bits of exponent and three of mantissa, no infinity; its largest is 448.
#pragma once
#include "device/ptx/codec.cuh"

// Rounds to nearest, ties to even. For magnitudes up to 464.
DEVICE u32 e4m3_from_float(float v) {
  const u32 bits = __float_as_uint(v), magnitude = bits & 0x7fffffff;
  const u32 normal = ((magnitude + 0x7ffff + (magnitude >> 20 & 1)) >> 20) - (120 << 3);
  const u32 subnormal = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 16384)) - 0x46800000u;  // units of 2^-9
  return (bits >> 24 & 0x80) | (magnitude < 0x3c800000u ? subnormal : normal);
}

#if !(__CUDA_ARCH__ >= 890)
DEVICE u32 e4m3x2_from_floats(float low, float high) { return e4m3_from_float(low) | e4m3_from_float(high) << 8; }

// Through fp16, whose exponent bias is larger by 8.
DEVICE void floats_from_e4m3x2(u32 v, float& low, float& high) {
  const u32 spread = (v << 8 & 0xff00) | (v << 16 & 0xff000000u);
  floats_from_fp16x2((spread & 0x80008000u) | (spread >> 1 & 0x3f803f80u), low, high);
  low = __fmul_rn(low, 256);
  high = __fmul_rn(high, 256);
}
#endif

// For any two floats: magnitudes beyond 448, infinities included, become 448. A NaN must have the sign plus.
DEVICE u32 saturated_e4m3x2(float low, float high) {
#if __CUDA_ARCH__ >= 890
  return e4m3x2_from_floats(low, high);
#else
  const auto saturated = [](float v) -> u32 {
    const u32 bits = __float_as_uint(v), magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) return 0x7f;
    return e4m3_from_float(__uint_as_float((bits & 0x80000000u) | min(magnitude, 0x43e00000u)));
  };
  return saturated(low) | saturated(high) << 8;
#endif
}

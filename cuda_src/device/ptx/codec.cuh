// PTX instructions that codecs use: the larger of two values, conversions.
#pragma once
#include "device/pack.cuh"

// The larger or smaller of two values, or the larger magnitude, in each half of a word or in it. NaN if one is.
#define LARGER(T, TYPE, MAGNITUDE)                                  \
  DEVICE u32 larger(T, u32 a, u32 b) {                              \
    u32 v;                                                          \
    asm("max.NaN." TYPE " %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b)); \
    return v;                                                       \
  }                                                                 \
  DEVICE u32 smaller(T, u32 a, u32 b) {                             \
    u32 v;                                                          \
    asm("min.NaN." TYPE " %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b)); \
    return v;                                                       \
  }                                                                 \
  DEVICE u32 larger_magnitude(T, u32 a, u32 b) {                    \
    u32 v;                                                          \
    asm(MAGNITUDE : "=r"(v) : "r"(a), "r"(b));                      \
    return v;                                                       \
  }
#define OF_MAGNITUDES(TYPE) \
  "{\n\t.reg .b32 a, b;\n\tabs." TYPE " a, %1;\n\tabs." TYPE " b, %2;\n\tmax.NaN." TYPE " %0, a, b;\n\t}"

// In bf16 the sign means nothing: from sm_86 on it is the exclusive or of both signs, and one instruction does it all.
#if __CUDA_ARCH__ >= 860
LARGER(bf16, "bf16x2", "max.NaN.xorsign.abs.bf16x2 %0, %1, %2;")
#else
LARGER(bf16, "bf16x2", OF_MAGNITUDES("bf16x2"))
#endif
LARGER(fp16, "f16x2", OF_MAGNITUDES("f16x2"))
LARGER(fp32, "f32", OF_MAGNITUDES("f32"))

// a x b + c of bf16 numbers in each half of a word, rounded once.
DEVICE u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 v;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}

// The bits of `a` where `mask` has ones, else the bits of `b`: one instruction, where an expression became two.
DEVICE u32 choose_bits(u32 mask, u32 a, u32 b) {
  u32 v;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(v) : "r"(mask), "r"(a), "r"(b));
  return v;
}

// All bits of each byte whose highest bit is set.
DEVICE u32 spread_signs(u32 bytes) {
  u32 v;
  asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(v) : "r"(bytes));
  return v;
}

#if __CUDA_ARCH__ >= 890
// Two e4m3 numbers in the low 16 bits, rounded to nearest, ties to even. Magnitudes beyond 448 become 448.
DEVICE u32 e4m3x2_from_floats(float low, float high) {
  u16 v;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(v) : "f"(high), "f"(low));
  return v;
}

DEVICE void floats_from_e4m3x2(u32 v, float& low, float& high) {
  u32 halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(u16(v)));
  floats_from_fp16x2(halves, low, high);
}
#endif

// The multimem instructions (sm_90 and newer). What they promise is in device/sync/multimem.cuh, (7).
#pragma once
#include "device/pack.cuh"

#define MULTIMEM_LOAD_SUM(T, TYPE)                                                            \
  DEVICE Pack multimem_load_sum(T, const Pack* multicast) {                                   \
    Pack p;                                                                                   \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add." TYPE " {%0, %1, %2, %3}, [%4];" \
                 : "=r"(p.word[0]), "=r"(p.word[1]), "=r"(p.word[2]), "=r"(p.word[3])         \
                 : "l"(multicast));                                                           \
    return p;                                                                                 \
  }
MULTIMEM_LOAD_SUM(bf16, "acc::f32.v4.bf16x2")
MULTIMEM_LOAD_SUM(fp16, "acc::f32.v4.f16x2")
MULTIMEM_LOAD_SUM(fp32, "v4.f32")

// For any element type: a store moves bits.
DEVICE void multimem_store(Pack* multicast, const Pack& p) {
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(multicast), "r"(p.word[0]),
               "r"(p.word[1]), "r"(p.word[2]), "r"(p.word[3]));
}

DEVICE void fence_aliases() { asm volatile("fence.proxy.alias;" ::: "memory"); }

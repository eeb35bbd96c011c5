// Instructions of a warpgroup, 128 threads from a multiple of 128 on (sm_90a only). Their order: (9) in pipeline.cuh.
#pragma once
#include "device/pack.cuh"
#include "device/ptx/tma.cuh"

// sums[64, N] += A[64, 16] * B[16, N], or = with `first`. Each operand is by rows or by columns (`operand` in
// pipeline.cuh). Of e4m3, A is [64, 32] and B [32, N], both by rows, and the sums have fewer bits than fp32. Row r of
// a warp's 16, columns 8 j + 2 c and 8 j + 2 c + 1, are sums[4 j + r / 8 * 2 + {0, 1}] of thread 4 (r % 8) + c.
template <int N, bool a_by_columns, bool b_by_columns>
struct Product;

#define SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define SUMS_16(i) SUMS_4(i), SUMS_4(i + 4), SUMS_4(i + 8), SUMS_4(i + 12)
#define SUMS_32(i) SUMS_16(i), SUMS_16(i + 16)
#define SUMS_64(i) SUMS_32(i), SUMS_32(i + 32)
#define NAMES_0_3 "%0, %1, %2, %3"
#define NAMES_0_7 NAMES_0_3 ", %4, %5, %6, %7"
#define NAMES_0_15 NAMES_0_7 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NAMES_OF_10(n) \
  ", %" #n "0, %" #n "1, %" #n "2, %" #n "3, %" #n "4, %" #n "5, %" #n "6, %" #n "7, %" #n "8, %" #n "9"
#define NAMES_0_31 NAMES_0_15 ", %16, %17, %18, %19" NAMES_OF_10(2) ", %30, %31"
#define NAMES_32_47 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NAMES_32_63 NAMES_32_47 ", %48, %49" NAMES_OF_10(5) ", %60, %61, %62, %63"
#define NAMES_64_79 ", %64, %65, %66, %67, %68, %69" NAMES_OF_10(7)
#define NAMES_64_95 NAMES_64_79 NAMES_OF_10(8) ", %90, %91, %92, %93, %94, %95"
#define NAMES_96_111 ", %96, %97, %98, %99" NAMES_OF_10(10) ", %110, %111"
#define NAMES_96_127 \
  NAMES_96_111 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define PRODUCT_OF(TYPE, K_AND_TYPES, LAYOUTS, N, NAMES, A, B, FIRST, ...)                            \
  static DEVICE void add(TYPE, float (&sums)[N / 2], u64 a, u64 b, bool first) {                      \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.eq.u32 p, " FIRST                                        \
                 ", 0;\n\twgmma.mma_async.sync.aligned.m64n" #N K_AND_TYPES " {" NAMES "}, " A ", " B \
                 ", p, 1, 1" LAYOUTS ";\n\t}"                                                         \
                 : __VA_ARGS__                                                                        \
                 : "l"(a), "l"(b), "n"(int(a_by_columns)), "n"(int(b_by_columns)), "r"(u32(first)));  \
  }
#define PRODUCT(N, NAMES, A, B, A_BY_COLUMNS, B_BY_COLUMNS, FIRST, ...)                                              \
  template <bool a_by_columns, bool b_by_columns>                                                                   \
  struct Product<N, a_by_columns, b_by_columns> {                                                                   \
    PRODUCT_OF(bf16, "k16.f32.bf16.bf16", ", " A_BY_COLUMNS ", " B_BY_COLUMNS, N, NAMES, A, B, FIRST, __VA_ARGS__)  \
    PRODUCT_OF(fp16, "k16.f32.f16.f16", ", " A_BY_COLUMNS ", " B_BY_COLUMNS, N, NAMES, A, B, FIRST, __VA_ARGS__)    \
    PRODUCT_OF(e4m3, "k32.f32.e4m3.e4m3", "", N, NAMES, A, B, FIRST, __VA_ARGS__)                                   \
  };

PRODUCT(8, NAMES_0_3, "%4", "%5", "%6", "%7", "%8", SUMS_4(0))
PRODUCT(16, NAMES_0_7, "%8", "%9", "%10", "%11", "%12", SUMS_4(0), SUMS_4(4))
PRODUCT(32, NAMES_0_15, "%16", "%17", "%18", "%19", "%20", SUMS_16(0))
PRODUCT(64, NAMES_0_31, "%32", "%33", "%34", "%35", "%36", SUMS_32(0))
PRODUCT(96, NAMES_0_31 NAMES_32_47, "%48", "%49", "%50", "%51", "%52", SUMS_32(0), SUMS_16(32))
PRODUCT(128, NAMES_0_31 NAMES_32_63, "%64", "%65", "%66", "%67", "%68", SUMS_64(0))
PRODUCT(160, NAMES_0_31 NAMES_32_63 NAMES_64_79, "%80", "%81", "%82", "%83", "%84", SUMS_64(0), SUMS_16(64))
PRODUCT(192, NAMES_0_31 NAMES_32_63 NAMES_64_95, "%96", "%97", "%98", "%99", "%100", SUMS_64(0), SUMS_32(64))
PRODUCT(224, NAMES_0_31 NAMES_32_63 NAMES_64_95 NAMES_96_111, "%112", "%113", "%114", "%115", "%116", SUMS_64(0),
        SUMS_32(64), SUMS_16(96))
PRODUCT(256, NAMES_0_31 NAMES_32_63 NAMES_64_95 NAMES_96_127, "%128", "%129", "%130", "%131", "%132", SUMS_64(0),
        SUMS_64(64))

// Before the first product, and after any other access to the sums.
DEVICE void fence_sums() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Ends a group of products.
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until all but the last group are complete.
DEVICE void wait_for_all_but_last_products() { asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory"); }

// The same, and tells the compiler that the sums of earlier groups may be accessed from here on.
template <int Count>
DEVICE void wait_for_all_but_last_products(float (&sums)[Count]) {
  wait_for_all_but_last_products();
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Waits until all products are complete, and tells the compiler that the sums may be accessed from here on.
template <int Count>
DEVICE void wait_for_products(float (&sums)[Count]) {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// The bits of a sum. With __float_as_uint the compiler would copy sums to other registers, and products would wait.
DEVICE u32 word_of_sum(float sum) {
  u32 word;
  asm("mov.b32 %0, %1;" : "=r"(word) : "f"(sum));
  return word;
}

// Sets the registers of each thread of this warpgroup: returns some to the block, or takes some.
template <int Registers>
DEVICE void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
DEVICE void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

// A barrier of one warpgroup; __syncthreads is barrier 0.
DEVICE void sync_warpgroup(u32 barrier) { asm volatile("barrier.sync.aligned %0, 128;" ::"r"(barrier) : "memory"); }

// Stores four matrices of 8 x 8 16-bit elements: of matrix i two of row lane / 4 each; row r to lane 8 i + r's address.
DEVICE void store_matrices(void* shared, const u32 (&words)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(shared)),
               "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}

// Stores two such matrices transposed: column r of matrix i goes to the address of lane 8 i + r.
DEVICE void store_transposed_matrices(void* shared, const u32 (&words)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(shared_address(shared)),
               "r"(words[0]), "r"(words[1])
               : "memory");
}

// The host's twin of cuda_src/device/ptx.cuh, as far as codecs go: one warp, whose 32 lanes run by turns.
#pragma once
#include <ucontext.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

#define __device__
#define __forceinline__ inline
#define __noinline__

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(16) Pack {
  u32 word[4];
};

template <class A, class B>
constexpr std::common_type_t<A, B> min(A a, B b) {
  return a < b ? a : b;
}
template <class A, class B>
constexpr std::common_type_t<A, B> max(A a, B b) {
  return a > b ? a : b;
}

// ---- a warp ---------------------------------------------------------------------------------------------------------

// Each lane runs until it meets the others in a shuffle; then the next one does.
struct Warp {
  static constexpr int stack_nbytes = 64 << 10;
  ucontext_t scheduler, context[32];
  std::vector<char> stacks = std::vector<char>(32 * stack_nbytes);
  std::function<void()> body;
  u32 given[2][32];
  int meetings[32];
  int running;
  bool ended[32];

  void run(std::function<void()> what) {
    body = what;
    for (running = 0; running < 32; ++running) {
      getcontext(&context[running]);
      context[running].uc_stack = {stacks.data() + running * stack_nbytes, 0, stack_nbytes};
      context[running].uc_link = &scheduler;
      ended[running] = false;
      meetings[running] = 0;
      makecontext(&context[running], &Warp::enter, 0);
    }
    for (bool all_ended = false; !all_ended;) {
      all_ended = true;
      for (running = 0; running < 32; ++running) {
        if (!ended[running]) swapcontext(&scheduler, &context[running]);
        all_ended &= ended[running];
      }
    }
  }

  // What every lane gave, once all have.
  const u32* meet(u32 v) {
    const int here = running;
    u32* const all = given[meetings[here]++ % 2];
    all[here] = v;
    swapcontext(&context[here], &scheduler);
    return all;
  }

  static void enter();
};

inline Warp warp;

inline void Warp::enter() {
  warp.body();
  warp.ended[warp.running] = true;
}

struct Index {
  operator u32() const { return warp.running; }
};
struct ThreadIndex {
  Index x;
};
inline constexpr ThreadIndex threadIdx;

inline u32 __shfl_xor_sync(u32, u32 v, int mask) {
  const u32* all = warp.meet(v);
  return all[warp.running ^ mask];
}
inline float __shfl_sync(u32, float v, int source, int width) {
  const u32* all = warp.meet(std::bit_cast<u32>(v));
  return std::bit_cast<float>(all[warp.running / width * width + source]);
}
inline int __any_sync(u32, int vote) {
  const u32* all = warp.meet(vote != 0);
  for (int i = 0; i < 32; ++i)
    if (all[i]) return 1;
  return 0;
}

// ---- arithmetic: a NaN is the canonical one as soon as its bits are looked at ---------------------------------------

inline u32 __float_as_uint(float v) { return std::isnan(v) ? 0x7fffffffu : std::bit_cast<u32>(v); }
inline float __uint_as_float(u32 v) { return std::bit_cast<float>(v); }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __frcp_rn(float v) { return 1 / v; }
// For what codecs add: a number below 2^22 to one between 2^23 and 2^24.
inline float __fadd_rd(float a, float b) { return std::floor(a) + b; }

inline u32 bf16_from_float(float v) {
  if (std::isnan(v)) return 0x7fff;
  const u32 bits = std::bit_cast<u32>(v);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 fp16_from_float(float v) {
  return std::isnan(v) ? 0x7fff : std::bit_cast<u16>(static_cast<_Float16>(v));
}
inline float float_from_fp16(u16 v) { return std::bit_cast<_Float16>(v); }

inline u32 bf16x2_from_floats(float low, float high) { return bf16_from_float(low) | bf16_from_float(high) << 16; }
inline u32 fp16x2_from_floats(float low, float high) { return fp16_from_float(low) | fp16_from_float(high) << 16; }
inline void floats_from_fp16x2(u32 v, float& low, float& high) {
  low = float_from_fp16(v);
  high = float_from_fp16(v >> 16);
}

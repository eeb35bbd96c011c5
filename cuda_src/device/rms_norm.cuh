// What follows an all-reduce in a transformer: sum + residual, and the root-mean-square norm of each row of that.
//
//   r = round(sum + residual)
//   normed = round((r / sqrt(mean(r * r) + eps)) * (weight + offset))
//
// A block has a row at a time, thread t the packs t, t + blockDim.x, ... of it. The squares are added in an order that no
// launch changes: each of `slots` takes those of the packs that come every `slots`, element by element; then neighbours
// are added in pairs, the pairs in pairs, and so on. Slots without a pack are zeros, which change nothing, so a block needs
// only as many threads as a row has packs, in a power of two. No operation is contracted: graphar/norms.py gives the same
// bits.
#pragma once
#include "epilogue.cuh"

constexpr int slots = 1024;

// What the warps of a block tell each other: their squares, for two rows that alternate.
struct SquaresOfWarps {
  float of[2][slots / 32];
};

template <class T>
struct RmsNorm {
  static constexpr int E = elements_per_pack<T>, W = elements_per_word<T>;
  const u32 columns, packs;  // of a row
  const u64 rows;
  const float eps, offset;
  const Tensor<T> residual, weight, summed, normed;

  __device__ explicit RmsNorm(const Arguments& a)
      : columns(a.epilogue.columns),
        packs(columns / E),
        rows(a.numel / columns),
        eps(a.epilogue.scalar[0]),
        offset(a.epilogue.scalar[1]),
        residual(a.epilogue.tensor[0], a.numel),
        weight(a.epilogue.tensor[1], columns),
        summed(a.epilogue.tensor[2], a.numel),
        normed(a.output, a.numel) {}

  // round(sum + residual), whose squares it adds to `squares`.
  __device__ __forceinline__ Pack add(const Pack& sum, const Pack& from, float& squares) const {
    Pack result;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float v[W], more[W];
      T::unpack(sum.word[w], v);
      T::unpack(from.word[w], more);
#pragma unroll
      for (int e = 0; e < W; ++e) v[e] = __fadd_rn(v[e], more[e]);
      result.word[w] = T::round(v);
      T::unpack(result.word[w], v);
#pragma unroll
      for (int e = 0; e < W; ++e) squares = __fadd_rn(squares, __fmul_rn(v[e], v[e]));
    }
    return result;
  }

  // One over the root of the row's mean square, of all threads' squares. By all threads; `turn` alternates.
  __device__ __forceinline__ float inverse_root(float squares, int turn) const {
    auto& of_warp = static_shared<SquaresOfWarps>().of;
    const u32 lane = threadIdx.x % 32, warps = blockDim.x / 32;
    squares = tree(squares);
    if (lane == 0) of_warp[turn][threadIdx.x / 32] = squares;
    __syncthreads();  // and the one of the next turn keeps this turn's places until all have read them
    const float total = tree(lane < warps ? of_warp[turn][lane] : 0.0f);
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(total, float(columns)), eps)));
  }

  __device__ __forceinline__ Pack scale(const Pack& row, const Pack& by, float inverse) const {
    Pack result;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      float v[W], factor[W];
      T::unpack(row.word[w], v);
      T::unpack(by.word[w], factor);
#pragma unroll
      for (int e = 0; e < W; ++e) v[e] = __fmul_rn(__fmul_rn(v[e], inverse), __fadd_rn(factor[e], offset));
      result.word[w] = T::round(v);
    }
    return result;
  }

  // A row whose sums `next(i)` gives, pack by pack; false where a sum will not come. By all threads, and every row by as
  // many of its calls: a thread whose sums do not come must not leave the others at the barrier.
  template <class Next>
  __device__ __forceinline__ void take(u64 row, bool& comes, int turn, Next next) const {
    const u64 begin = row * packs;
    float squares = 0;
    Pack mine{}, by{};
    if (threadIdx.x < packs) by = weight.load(threadIdx.x);
    for (u32 i = threadIdx.x; i < packs; i += blockDim.x) {
      const Pack from = residual.load(begin + i);
      Pack sum;
      if (!(comes = comes && next(i, sum))) continue;
      const Pack one = add(sum, from, squares);
      summed.store(begin + i, one);
      if (i == threadIdx.x) mine = one;
    }
    const float inverse = inverse_root(squares, turn);
    for (u32 i = threadIdx.x; comes && i < packs; i += blockDim.x) {
      if (i != threadIdx.x) mine = summed.load(begin + i), by = weight.load(i);  // by this thread's own stores
      normed.store(begin + i, scale(mine, by, inverse));
    }
  }

 private:
  static __device__ __forceinline__ float tree(float v) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
    return v;
  }
};

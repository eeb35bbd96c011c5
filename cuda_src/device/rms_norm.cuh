// What follows an all-reduce in a transformer: sum + residual, and the root-mean-square norm of each row of that.
//
//   r = round(sum + residual)
//   normed = round((r / sqrt(mean(r * r) + eps)) * (weight + offset))
//
// A team has a row at a time: a block, or where there are few rows the C blocks of a cluster, so that one SM need not
// move it all. Its thread t has the packs t, t + threads, ... of the row. The squares are added in an order that no launch
// changes: each of `slots` takes those of the packs that come every `slots`, element by element; then neighbours are added
// in pairs, the pairs in pairs, and so on. Slots without a pack are zeros, which change nothing, so a team needs only as
// many threads as a row has packs, in a power of two. No operation is contracted: graphar/norms.py gives the same bits.
#pragma once
#include "call.cuh"
#include "epilogue.cuh"

constexpr int slots = 1024;

// What the warps of a team tell each other, in dynamic shared memory, where it lies alike in all blocks: their squares, for
// two rows that alternate. NORM_SHARED_NBYTES in graphar/algorithms.py.
struct SquaresOfWarps {
  float of[2][slots / 32];
};

template <class T, int C>
struct RmsNorm {
  static constexpr int E = elements_per_pack<T>, W = elements_per_word<T>;
  const u32 columns, packs, rows;  // packs of a row
  const u32 team, teams;
  const u32 thread, threads;  // of the team
  const float eps, offset;
  const Tensor<T> residual, weight, summed, normed;
  bool comes;  // whether this thread's sums do; one whose do not still meets the others
  int turn = 0;

  __device__ RmsNorm(const Arguments& a, const Call& call)
      : columns(a.epilogue.columns),
        packs(columns / E),
        rows(a.numel / columns),
        team(blockIdx.x / C),
        teams(gridDim.x / C),
        thread(C == 1 ? threadIdx.x : block_in_cluster() * blockDim.x + threadIdx.x),
        threads(C * blockDim.x),
        eps(a.epilogue.scalar[0]),
        offset(a.epilogue.scalar[1]),
        residual(a.epilogue.tensor[0], a.numel),
        weight(a.epilogue.tensor[1], columns),
        summed(a.epilogue.tensor[2], a.numel),
        normed(a.output, a.numel),
        comes(!call.aborted) {
    if constexpr (C > 1) arrive_at_cluster();
  }

  // Before the first row, and by all threads.
  __device__ __forceinline__ void begin() const {
    if constexpr (C > 1) wait_for_cluster();  // all blocks run, and have their shared memory
  }

  // A row whose sums `next(i)` gives, pack by pack; false where a sum will not come. By all threads of the team.
  template <class Next>
  __device__ __forceinline__ void take(u32 row, Next next) {
    const u64 begin = u64(row) * packs;
    float squares = 0;
    Pack mine{}, by{};
    if (thread < packs) by = weight.load(thread);
    for (u32 i = thread; i < packs; i += threads) {
      const Pack from = residual.load(begin + i);
      Pack sum;
      if (!(comes = comes && next(i, sum))) continue;
      const Pack one = add(sum, from, squares);
      summed.store(begin + i, one);
      if (i == thread) mine = one;
    }
    const float inverse = inverse_root(squares);
    for (u32 i = thread; comes && i < packs; i += threads) {
      if (i != thread) mine = summed.load(begin + i), by = weight.load(i);  // by this thread's own stores
      normed.store(begin + i, scale(mine, by, inverse));
    }
  }

 private:
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

  // One over the root of the row's mean square, of all threads' squares. A place is written again two rows later, which all
  // threads have read by the barrier between; and after the last row's, nobody writes to another block any more.
  __device__ __forceinline__ float inverse_root(float squares) {
    auto& of_warp = reinterpret_cast<SquaresOfWarps*>(dynamic_shared())->of[turn];
    turn ^= 1;
    const u32 lane = threadIdx.x % 32;
    squares = tree(squares);
    if constexpr (C == 1) {
      if (lane == 0) of_warp[thread / 32] = squares;
      __syncthreads();
    } else {
      if (lane < C) store_in_cluster(&of_warp[thread / 32], lane, squares);
      arrive_at_cluster();
      wait_for_cluster();
    }
    const float total = tree(lane < threads / 32 ? of_warp[lane] : 0.0f);
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

  static __device__ __forceinline__ float tree(float v) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) v = __fadd_rn(v, __shfl_xor_sync(0xffffffff, v, step));
    return v;
  }
};

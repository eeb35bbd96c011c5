// residual_rmsnorm_backward: the gradients of residual and RMS norm, on one GPU.
//
//   gradient of normed, summed, gradient of summed: rows b, b + groups, ... -> shared memory, `stages` rows at a time
//     -> block b -> gradient of each row; the weight's gradient, in registers over all rows of the block -> groups[b]
//   residual_rmsnorm_backward_weight: groups[0], groups[1], ... -> the weight's gradient
//
// For a row r of `summed`, the gradient g of its norm, the weight w and s = 1 / sqrt(mean(r * r) + eps):
//   of_row = s * (g * w) - r * (mean((g * w) * r) * s * s * s) + gradient of summed; of_weight: the sum of g * (r * s)
// norm_gradients.py of the package gives the same bits. A row's sums are added as squares are in rms_norm.cuh, and
// exchanged at once. A block is a group of rows, on any number of SMs. A thread waits only for its own copies (6).
#include "device/pack.cuh"

constexpr int norm_gradient_threads = 1024;  // the most: `norm_slots` of rms_norm.cuh
constexpr int group_lanes = 64;              // that add the groups' sums of one column; fewer for fewer groups
constexpr int columns_added = 32;            // by one block: 128 bytes of a group, 16 by each thread

// Two numbers of each warp of a block, in two places that alternate.
using PairsOfWarps = float[2][2][norm_gradient_threads / 32];

// Adds two numbers of all threads, neighbours first. A place is overwritten two calls, so a barrier, later.
DEVICE void add_over_block(float& a, float& b, float (&of_warp)[2][norm_gradient_threads / 32]) {
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  a = sum_of_warp(a), b = sum_of_warp(b);
  if (lane == 0) of_warp[0][warp] = a, of_warp[1][warp] = b;
  __syncthreads();
  const bool has_warp = lane < blockDim.x / 32;
  a = sum_of_warp(has_warp ? of_warp[0][lane] : 0);
  b = sum_of_warp(has_warp ? of_warp[1][lane] : 0);
}

// A thread has up to P packs of a row.
template <class T, int P, int stages>
__global__ void __launch_bounds__(norm_gradient_threads) residual_rmsnorm_backward(
    const __grid_constant__ NormGradientArguments a) {
  constexpr int E = elements_per_pack<T>, W = elements_per_word<T>, tensors = 3;
  PairsOfWarps& pairs = *reinterpret_cast<PairsOfWarps*>(dynamic_shared());
  Pack* const staged = dynamic_shared() + sizeof(PairsOfWarps) / sizeof(Pack);  // [stages][tensors][P][blockDim.x]
  wait_for_previous_kernel();
  release_next_kernel();
  const u32 packs = a.columns / E;
  const Pack* const sources[tensors] = {static_cast<const Pack*>(a.of_normed), static_cast<const Pack*>(a.summed),
                                        static_cast<const Pack*>(a.of_summed)};
  const auto place = [&](int stage, int tensor, int p) {
    return staged + ((stage * tensors + tensor) * P + p) * blockDim.x + threadIdx.x;
  };
  // Every row ends one group of copies, which is empty past the last row.
  const auto fetch = [&](u64 row, int stage) {
    for (int p = 0; p < P; ++p) {
      const u32 i = p * blockDim.x + threadIdx.x;
      for (int tensor = 0; tensor < tensors; ++tensor)
        if (row < a.rows && i < packs && sources[tensor])
          copy_async(place(stage, tensor, p), sources[tensor] + row * packs + i);
    }
    commit_copies();
  };

  for (int ahead = 0; ahead < stages - 1; ++ahead) fetch(blockIdx.x + u64(ahead) * gridDim.x, ahead);
  Pack by[P];
  for (int p = 0; p < P; ++p)
    if (const u32 i = p * blockDim.x + threadIdx.x; i < packs) by[p] = static_cast<const Pack*>(a.weight)[i];
  float of_weight[P][E] = {};
  int stage = 0, turn = 0;
  for (u64 row = blockIdx.x; row < a.rows; row += gridDim.x) {
    fetch(row + u64(stages - 1) * gridDim.x, (stage + stages - 1) % stages);
    wait_for_copies<stages - 1>();
    float squares = 0, products = 0;
    for (int p = 0; p < P; ++p) {
      if (p * blockDim.x + threadIdx.x >= packs) continue;
      const Pack gradient = *place(stage, 0, p), r = *place(stage, 1, p);
      for (int w = 0; w < 4; ++w) {
        float g[W], v[W], factor[W];
        T::unpack(gradient.word[w], g), T::unpack(r.word[w], v), T::unpack(by[p].word[w], factor);
        for (int e = 0; e < W; ++e) {
          squares = __fadd_rn(squares, __fmul_rn(v[e], v[e]));
          products = __fadd_rn(products, __fmul_rn(__fmul_rn(g[e], __fadd_rn(factor[e], a.weight_offset)), v[e]));
        }
      }
    }
    add_over_block(squares, products, pairs[turn]);
    turn ^= 1;
    const float columns = a.columns, mean = __fdiv_rn(products, columns);
    const float s = __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(squares, columns), a.eps)));
    const float common = __fmul_rn(__fmul_rn(__fmul_rn(mean, s), s), s);
#pragma unroll
    for (int p = 0; p < P; ++p) {
      const u32 i = p * blockDim.x + threadIdx.x;
      if (i >= packs) continue;
      const Pack gradient = *place(stage, 0, p), r = *place(stage, 1, p);
      Pack more{}, result;
      if (a.of_summed) more = *place(stage, 2, p);
      for (int w = 0; w < 4; ++w) {
        float g[W], v[W], factor[W], added[W];
        T::unpack(gradient.word[w], g), T::unpack(r.word[w], v), T::unpack(by[p].word[w], factor);
        T::unpack(more.word[w], added);
        for (int e = 0; e < W; ++e) {
          float& sum = of_weight[p][w * W + e];
          sum = __fadd_rn(sum, __fmul_rn(g[e], __fmul_rn(v[e], s)));
          const float scaled = __fmul_rn(s, __fmul_rn(g[e], __fadd_rn(factor[e], a.weight_offset)));
          added[e] = __fadd_rn(__fsub_rn(scaled, __fmul_rn(v[e], common)), added[e]);
        }
        result.word[w] = T::round(added);
      }
      static_cast<Pack*>(a.of_rows)[row * packs + i] = result;
    }
    stage = (stage + 1) % stages;
  }
  if (!a.with_weight) return;
  Pack* const of_group = reinterpret_cast<Pack*>(a.groups + u64(blockIdx.x) * a.columns);
  for (int p = 0; p < P; ++p) {
    const u32 i = p * blockDim.x + threadIdx.x;
    for (int e = 0; e < E; e += 4) {
      Pack four;
      for (int w = 0; w < 4; ++w) four.word[w] = __float_as_uint(of_weight[p][e + w]);
      if (i < packs) of_group[(i * E + e) / 4] = four;
    }
  }
}

// Adds the groups' gradients of the weight: lane l of a column adds groups l, l + group_lanes, ..., then the lanes.
template <class T>
__global__ void __launch_bounds__(columns_added / 4 * group_lanes) residual_rmsnorm_backward_weight(
    const __grid_constant__ NormGradientArguments a) {
  auto& sums = *reinterpret_cast<float(*)[group_lanes][columns_added]>(dynamic_shared());
  wait_for_previous_kernel();
  release_next_kernel();
  const u32 column = threadIdx.x % (columns_added / 4) * 4, lane = threadIdx.x / (columns_added / 4);
  const u32 first = blockIdx.x * columns_added;
  float sum[4] = {};
  if (first + column < a.columns)
#pragma unroll 4
    for (u32 group = lane; group < a.row_groups; group += group_lanes) {
      const Pack four = *reinterpret_cast<const Pack*>(a.groups + group * a.columns + first + column);
      for (int i = 0; i < 4; ++i) sum[i] = __fadd_rn(sum[i], __uint_as_float(four.word[i]));
    }
  for (int i = 0; i < 4; ++i) sums[lane][column + i] = sum[i];
  __syncthreads();
  if (threadIdx.x >= columns_added || first + threadIdx.x >= a.columns) return;
  float total[2] = {};
#pragma unroll 8
  for (u32 l = 0; l < blockDim.x / (columns_added / 4); ++l) total[0] = __fadd_rn(total[0], sums[l][threadIdx.x]);
  static_cast<typename T::Storage*>(a.of_weight)[first + threadIdx.x] = T::round(total);
}

// softmax_backward: the gradient of a rank's logits, in one pass that memory bounds.
//
//   logits, state (m and s of each row), target, gradient of the results -> gradient of the logits
//
// A block has a slice of a row. The last rows come first: the forward pass may have left them in L2. The gradient may
// lie where the logits do: a pack is read before it is overwritten. `gradient` in numerics/softmax.py specifies it.
#include "device/softmax.cuh"

constexpr int depth = 2;  // packs that a thread loads before it computes

struct RowGradient {
  float reference, scale, all, at_target;

  DEVICE RowGradient(const LossArguments& a, u64 row, const Target& target) {
    const float m = a.state[2 * row], s = a.state[2 * row + 1];
    float g = a.upstream[a.is_per_row ? row : 0];
    if (a.is_mean) g = __fdiv_rn(g, a.state[2 * a.rows]);
    if (!a.is_loss) g = -g;
    if (!target.valid) g = __uint_as_float(0x7fffffff);
    reference = reference_of(m);
    scale = g;
    if (a.lse_square_scale != 0) {
      const double lse = __dadd_rn(m, log_of_sum(s));
      scale = __fmul_rn(g, float(__dadd_rn(1, __dmul_rn(2 * a.lse_square_scale, lse))));
    }
    scale = __fdiv_rn(scale, s);
    all = a.all_share != 0 ? __fmul_rn(g, a.all_share) : 0.0f;
    at_target = __fmul_rn(g, a.target_share);
  }
};

template <class T>
__global__ void __launch_bounds__(256, 8) softmax_backward(const __grid_constant__ LossArguments a) {
  using Storage = typename T::Storage;
  constexpr u32 E = elements_per_pack<T>, W = elements_per_word<T>;
  const u32 row = a.rows - 1 - blockIdx.x / a.slices;
  const u32 packs = pack_count<T>(a.columns), each = (packs + a.slices - 1) / a.slices;
  const u32 begin = blockIdx.x % a.slices * each, end = min(packs, begin + each);
  const Tensor<T> logits(static_cast<const Storage*>(a.logits) + u64(row) * a.columns, a.columns);
  const Tensor<T> gradient(static_cast<Storage*>(a.gradient) + u64(row) * a.columns, a.columns);
  const u32 whole = min(logits.whole, gradient.whole);
  wait_for_previous_kernel();
  release_next_kernel();
  const Target target(a, row);
  if (target.ignored) {
    for (u32 i = begin + threadIdx.x; i < end; i += blockDim.x) gradient.store(i, Pack{});
    return;
  }
  const RowGradient of_row(a, row, target);
  const u64 at = target.column - a.first;
  const bool here = target.valid && at < a.columns;

  const u32 target_pack = here ? at / E : ~0u, whole_pack = a.real_columns / E;  // from this one on there is padding

  const auto gradient_of = [&](const Pack& x, u32 i) {
    float v[4 * W];
    for (int w = 0; w < 4; ++w) T::unpack(x.word[w], v + w * W);
    for (int e = 0; e < E; ++e) {
      const float d = __fsub_rn(__fmul_rn(v[e], a.inverse_temperature), of_row.reference);
      v[e] = __fsub_rn(__fmul_rn(Exponential(clamped(d)), of_row.scale), of_row.all);
    }
    if (i == target_pack)
      for (int e = 0; e < E; ++e)
        if (at % E == e) v[e] = __fsub_rn(v[e], of_row.at_target);
    if (i >= whole_pack)
      for (int e = 0; e < E; ++e)
        if (i * E + e >= a.real_columns) v[e] = 0;
    Pack result;
    for (int w = 0; w < 4; ++w) {
      for (int e = 0; e < W; ++e) v[w * W + e] = __fmul_rn(v[w * W + e], a.inverse_temperature);
      result.word[w] = T::round(v + w * W);
    }
    return result;
  };

  u32 i = begin + threadIdx.x;
#pragma unroll 1
  for (; i + (depth - 1) * blockDim.x < min(end, whole); i += depth * blockDim.x) {
    Pack x[depth];
    for (int k = 0; k < depth; ++k) x[k] = reinterpret_cast<const Pack*>(logits.base)[i + k * blockDim.x];
    for (int k = 0; k < depth; ++k)
      gradient.store_whole(i + k * blockDim.x, gradient_of(x[k], i + k * blockDim.x));
  }
#pragma unroll 1
  for (; i < end; i += blockDim.x) {
    const Pack x = i < whole ? reinterpret_cast<const Pack*>(logits.base)[i] : logits.load(i);
    const Pack result = gradient_of(x, i);
    if (i < whole)
      gradient.store_whole(i, result);
    else
      gradient.store(i, result);
  }
}

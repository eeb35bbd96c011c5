// sum_of_parts: a rank's part of a sum, once copy engines have brought the parts of its peers.
//
//   peer_input[0 .. N-1], the ranks' parts, all on this GPU -> sum in rank order, x scalar[0] -> output
//
// The rounded sum is multiplied and rounded again, as torch divides by a number of ranks, unless the factor is 1. It
// waits for no rank. A thread loads several packs of each part first: few blocks then have enough bytes on their way.
#include "device/pack.cuh"

template <class T, int N>
DEVICE Pack sum_and_scale(const Pack (&part)[N], float factor) {
  Pack sum = sum_in_rank_order<T, N>(part);
  if (factor == 1) return sum;
  for (int w = 0; w < 4; ++w) {
    float v[elements_per_word<T>];
    T::unpack(sum.word[w], v);
    for (int e = 0; e < elements_per_word<T>; ++e) v[e] *= factor;
    sum.word[w] = T::round(v);
  }
  return sum;
}

template <class T, int N>
__global__ void __launch_bounds__(512, 2) sum_of_parts(const __grid_constant__ Arguments a) {
  constexpr int depth = N < 8 ? 8 / N : 1;
  wait_for_previous_kernel();
  const Tensor<T> output(a.output, a.numel);
  const u64 packs = pack_count<T>(a.numel), stride = u64(gridDim.x) * blockDim.x;
  u64 whole = output.whole, i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  const float factor = a.epilogue.scalar[0];
  const Pack* from[N];
  for (int r = 0; r < N; ++r) {
    const Tensor<T> part(a.peer_input[r], a.numel);
    from[r] = reinterpret_cast<const Pack*>(part.base);
    whole = min(whole, part.whole);
  }
  for (; i + (depth - 1) * stride < whole; i += depth * stride) {
    Pack part[depth][N];
    for (int d = 0; d < depth; ++d)
      for (int r = 0; r < N; ++r) part[d][r] = from[r][i + d * stride];
    for (int d = 0; d < depth; ++d) output.store_whole(i + d * stride, sum_and_scale<T, N>(part[d], factor));
  }
#pragma unroll 1
  for (; i < packs; i += stride) {  // the last packs, or all of tensors that are not aligned
    Pack part[N];
    for (int r = 0; r < N; ++r) part[r] = Tensor<T>(from[r], a.numel).load(i);
    output.store(i, sum_and_scale<T, N>(part, factor));
  }
}

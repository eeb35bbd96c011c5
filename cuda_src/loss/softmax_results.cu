// softmax_results: losses or log-probabilities of rows, once the ranks' partials are gathered.
//
//   gathered [ranks, rows, width] -> thread of a row: the ranks' nodes as a tree -> the row's results
//   softmax_results_total: losses of rows -> the rows as a tree -> their sum or mean, and how many rows have a loss
//
// They send nothing and wait for no rank. The sum is one block's: of 65,536 rows it takes a hundredth of the pass.
#include "device/softmax.cuh"

template <Also also>
__global__ void __launch_bounds__(128, 4) softmax_results(const __grid_constant__ LossArguments a) {
  wait_for_previous_kernel();
  release_next_kernel();
  const u64 row = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= a.rows) return;
  const Target target(a, row);
  SoftmaxNode node[softmax_leaves];
  for (int rank = 0; rank < softmax_leaves; ++rank)
    if (rank < a.ranks) node[rank] = load_partial<also>(a, row, rank);
  const u64 owner = target.valid ? target.column / a.columns : 0;
  const float x = a.gathered[(owner * a.rows + row) * a.width + 2];
  store_results<also>(a, row, target, merge_all<also>(node, a.ranks), x);
}

// The sum of up to 128 numbers, neighbours first. Zeros from `size`, a power of two, on are not added: -0 stays -0.
DEVICE float sum_of_four_each(const float (&v)[4], u64 size) {
  float a = v[0];
  if (size > 1) a = __fadd_rn(a, v[1]);
  if (size > 2) a = __fadd_rn(a, __fadd_rn(v[2], v[3]));
  for (int step = 1; step < 32; step *= 2) {
    const float other = __shfl_xor_sync(0xffffffff, a, step);
    if (size > 4 * step) a = __fadd_rn(a, other);
  }
  return a;
}

template <int threads>
__global__ void __launch_bounds__(threads, 1) softmax_results_total(const __grid_constant__ LossArguments a) {
  constexpr u64 rows_of_warp = 128;  // ROWS_OF_WARP in runtime/bind/loss.py; 4 for each thread
  u32& counted = static_shared<u32>();
  const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) counted = 0;
  __syncthreads();
  wait_for_previous_kernel();
  release_next_kernel();
  u32 count = 0;
  const float* from = a.results;
  float* to = a.results + a.rows;  // sums of 128 rows each, then of 128 of these, ...
  for (u64 left = a.rows;; left = (left + rows_of_warp - 1) / rows_of_warp) {
    u64 size = 1;
    while (size < left) size *= 2;
#pragma unroll 2
    for (u64 tile = warp; tile * rows_of_warp < left; tile += threads / 32) {
      float v[4] = {};
      for (int i = 0; i < 4; ++i) {
        const u64 row = tile * rows_of_warp + lane * 4 + i;
        if (row >= left) continue;
        v[i] = from[row];
        if (from == a.results) count += !Target(a, row).ignored;
      }
      const float sum = sum_of_four_each(v, size);
      if (lane == 0) to[tile] = sum;
    }
    if (from == a.results && count) add_relaxed_cta(&counted, count);
    __syncthreads();
    from = to, to += (left + rows_of_warp - 1) / rows_of_warp;
    if (left <= rows_of_warp) break;
  }
  if (threadIdx.x != 0) return;
  const float rows = counted;
  a.state[2 * a.rows] = rows;
  a.total[0] = a.is_mean ? __fdiv_rn(from[0], rows) : from[0];
}

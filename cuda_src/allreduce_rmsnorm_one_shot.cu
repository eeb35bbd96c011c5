// allreduce_rmsnorm_one_shot: one_shot_push whose every rank norms every row.
//
//   rank r: input -> scratch[p].slot[parity][r]   on every rank p
//           scratch[r].slot[parity][0 .. N-1] -> sum, + residual -> summed -> norm -> output
//
// Block b has the rows b, b + gridDim.x, ... (rms_norm.cuh). Wins for a few rows, as in decoding.
#include "device/rms_norm.cuh"
#include "device/sentinel.cuh"

template <class T, int N>
__global__ void __launch_bounds__(1024, 1) allreduce_rmsnorm_one_shot(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  const RmsNorm<T> norm(a);
  const Tensor<T> input(a.input, a.numel);
  const u32 packs = norm.packs;

  Pack mine;
  if (threadIdx.x < packs) mine = input.load(u64(blockIdx.x) * packs + threadIdx.x);
  read_epoch(a, call);
  const u32 slot = (call.epoch & 1) * N * a.capacity;
  for (u32 row = blockIdx.x; row < norm.rows && !call.aborted; row += gridDim.x)
    for (u32 i = threadIdx.x; i < packs; i += blockDim.x) {
      if (row != blockIdx.x || i != threadIdx.x) mine = input.load(u64(row) * packs + i);
      push_to_all<N>(a, slot + a.rank * a.capacity + row * packs + i, mine);
    }
  advance_epoch(a, call);
  if (__syncthreads_or(call.aborted)) return end_call(a, call);

  bool comes = true;
  int turn = 0;
  for (u32 row = blockIdx.x; row < norm.rows; row += gridDim.x, turn ^= 1)
    norm.take(row, comes, turn, [&](u32 i, Pack& sum) {
      Pack part[N];
      if (!receive(a, call, 0, slot + row * packs + i, part)) return false;
      sum = sum_in_rank_order<T, N>(part);
      return true;
    });
  end_call(a, call);
}

// residual_rmsnorm: residual and RMS norm of a sum that another kernel has written, such as a fused matmul.
//
//   input, + residual -> summed -> norm -> output
//
// Block b has the rows b, b + blocks, .... It waits for no rank.
#include "device/rms_norm.cuh"

template <class T, class Sum = T>
__global__ void __launch_bounds__(1024, 2) residual_rmsnorm(const __grid_constant__ NormArguments a) {
  wait_for_previous_kernel();
  release_next_kernel();
  const WholePacks<Sum> input(a.input);
  RmsNorm<T, 1, like_input, Sum> norm(a, false, a.numel);
  norm.start();
  for (u32 row = norm.team; row < norm.rows; row += norm.teams)
    norm.take(row, [&](u32 i, Pack(&sum)[1]) {
      sum[0] = input.load(u64(row) * norm.sums * norm.packs + i);
      return true;
    });
}

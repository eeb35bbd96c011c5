// allreduce_rmsnorm_two_shot: two_shot_push by rows, each of which every rank norms once its sum is there.
//
//   rank r: rows of p of the input -> scratch[p].scatter[parity][r]   on every rank p
//           scratch[r].scatter[parity][0 .. N-1] -> sums of r's rows  -> scratch[p].gather[parity][r] on every peer p
//           sums, its own or from scratch[r].gather[parity][p], + residual -> summed -> norm -> output
//
// The link carries what an all-reduce alone puts on it: normed rows and sums would be twice that. Block b has the rows
// b, b + gridDim.x, ...; among N neighbours each has another owner, and so do the rows of a block, one after another,
// since gridDim.x is a multiple of N, or no block has two rows. A block sums its own rows first, for the others wait for
// them. Wins from some 32 rows on; its scratch is 4 x nbytes.
#include "device/rms_norm.cuh"
#include "device/sentinel.cuh"

template <class T, int N>
__global__ void __launch_bounds__(1024, 1) allreduce_rmsnorm_two_shot(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  const RmsNorm<T> norm(a);
  const Tensor<T> input(a.input, a.numel);
  const u32 packs = norm.packs;
  const auto hop_of = [&](u32 row) { return (row + row / gridDim.x + N - a.rank) % N; };  // to the owner

  read_epoch(a, call);
  const u32 scatter = (call.epoch & 1) * N * a.capacity;
  const u32 gather = scatter + 2 * N * a.capacity;
  for (u32 row = blockIdx.x; row < norm.rows && !call.aborted; row += gridDim.x)
    for (u32 i = threadIdx.x; i < packs; i += blockDim.x)
      push(a, hop_of(row), scatter + a.rank * a.capacity + row / N * packs + i, input.load(u64(row) * packs + i));
  advance_epoch(a, call);
  if (__syncthreads_or(call.aborted)) return end_call(a, call);

  bool comes = true;
  int turn = 0;
  for (u32 row = blockIdx.x; row < norm.rows; row += gridDim.x)
    if (hop_of(row) == 0) {
      norm.take(row, comes, turn, [&](u32 i, Pack& sum) {
        const u32 at = row / N * packs + i;
        Pack part[N];
        if (!receive(a, call, 0, scatter + at, part)) return false;
        sum = sum_in_rank_order<T, N>(part);
#pragma unroll
        for (int peer = 1; peer < N; ++peer) push(a, peer, gather + a.rank * a.capacity + at, sum);
        return true;
      });
      turn ^= 1;
    }
  for (u32 row = blockIdx.x; row < norm.rows; row += gridDim.x)
    if (const u32 hop = hop_of(row); hop != 0) {
      norm.take(row, comes, turn, [&](u32 i, Pack& sum) {
        const u32 owner = (a.rank + hop) % N;
        Pack received[1];
        if (!receive(a, call, owner, gather + owner * a.capacity + row / N * packs + i, received)) return false;
        sum = received[0];
        return true;
      });
      turn ^= 1;
    }
  end_call(a, call);
}

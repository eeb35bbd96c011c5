// one_shot_unstaged: every rank stages its input in its own scratch and loads the others' into registers.
//
//   rank r: input -> scratch[r].stage[parity]; signal every peer
//           scratch[0 .. N-1].stage[parity], read over the links -> sum -> output
//
// The classic one-stage all-reduce: one block waits only for the same block of its peers. Two stages alternate, so no
// second barrier is needed: by (1) a peer that signals call e + 1 has read everything of call e. It is what one_shot,
// which keeps more loads in flight, is measured against.
#include "device/pack.cuh"
#include "device/signal_pad.cuh"

template <class T, int N>
__global__ void __launch_bounds__(512) one_shot_unstaged(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  const Signals signals(a);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u64 packs = pack_count<T>(a.numel);
  const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 stride = u64(gridDim.x) * blockDim.x;
  const auto stage = [&](int rank) { return after_signal_pad(a, rank) + (call.epoch & 1) * a.capacity; };

  for (u64 i = first; i < packs; i += stride) stage(a.rank)[i] = input.load(i);
  signals.send<N>(a, 1);
  advance_epoch(a, call);
  if (signals.wait<N>(a, call, 1)) {
    for (u64 i = first; i < packs; i += stride) {
      Pack part[N];
#pragma unroll
      for (int r = 0; r < N; ++r) part[r] = stage(r)[i];
      output.store(i, sum_in_rank_order<T, N>(part));
    }
  }
  signals.end(a, 1);
  end_call(a, call);
}

// one_shot: every rank stages its input in its own scratch and pulls the others' through shared memory.
//
//   rank r: input -> scratch[r].stage[parity]; signal every peer
//           scratch[0 .. N-1].stage[parity], copied over the links -> shared memory, Depth packs of every rank ahead
//           shared memory -> sum -> output
//
// Two stages alternate, (13) in signal_pad.cuh. A thread waits only for its own copies (6), which take no registers.
#include "device/pack.cuh"
#include "device/sync/signal_pad.cuh"

constexpr int max_threads = 256;  // ONE_SHOT_THREADS in graphar/plan/scratch.py

template <class T, int N, int Depth>
__global__ void __launch_bounds__(max_threads, 2) one_shot(const __grid_constant__ Arguments a) {
  Pack* const arrived = dynamic_shared();  // [Depth][N][blockDim.x]
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Signals signals(a);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u64 packs = pack_count<T>(a.numel);
  const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x, stride = u64(gridDim.x) * blockDim.x;
  const auto stage = [&](int rank) { return after_signal_pad(a, rank) + (call.epoch & 1) * a.capacity; };
  const auto place = [&](int step, int rank) { return arrived + (step * N + rank) * blockDim.x + threadIdx.x; };
  // Every step ends a group of copies, empty past the end of the tensor: the newest Depth - 1 are of later steps.
  const auto pull = [&](u64 i, int step) {
    for (int r = 0; r < N; ++r)
      if (i < packs) copy_async(place(step, r), stage(r) + i);
    commit_copies();
  };

  for (u64 i = first; i < packs; i += stride) stage(a.rank)[i] = input.load(i);
  signals.send<N>(a, call, 1);
  advance_epoch(a, call);
  if (signals.wait<N>(a, call, 1)) {
    for (int ahead = 0; ahead < Depth - 1; ++ahead) pull(first + ahead * stride, ahead);
    int step = 0;
    for (u64 i = first; i < packs; i += stride) {
      pull(i + (Depth - 1) * stride, (step + Depth - 1) % Depth);
      wait_for_copies<Depth - 1>();
      Pack part[N];
      for (int r = 0; r < N; ++r) part[r] = *place(step, r);
      output.store(i, sum_in_rank_order<T, N>(part));
      step = (step + 1) % Depth;
    }
  }
  signals.end(a, 1);
  end_call(a, call);
}

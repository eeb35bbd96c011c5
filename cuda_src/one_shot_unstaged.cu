// one_shot_unstaged: every rank stages its input in its own scratch and loads the others' into registers.
//
//   rank r: input -> scratch[r].stage[parity]; signal every peer
//           scratch[0 .. N-1].stage[parity], read over the links -> sum -> output
//
// The classic one-stage all-reduce: one block waits only for the same block of its peers. Two stages alternate, so no
// second barrier is needed: by (1) a peer that signals call e + 1 has read everything of call e. It is what one_shot,
// which keeps more loads in flight, is measured against.
//
// Direct, where the inputs are symmetric tensors: the peers read them in place.
//
//   rank r: signal every peer;  inputs of ranks 0 .. N-1, read over the links -> sum -> output;  signal every peer
//
// A peer's first signal says that its kernel has waited for those before it, so by (2) what wrote its input is visible
// here. No block ends before every peer's second signal, which says that the peer's block has read its share of this
// rank's input: what follows in the stream may overwrite it. The output must lie apart from the input.
#include "device/pack.cuh"
#include "device/signal_pad.cuh"

template <class T, int N, bool Direct = false>
__global__ void __launch_bounds__(512) one_shot_unstaged(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_call(a, call);
  const Signals signals(a);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u64 packs = pack_count<T>(a.numel);
  const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 stride = u64(gridDim.x) * blockDim.x;
  const auto stage = [&](int rank) { return after_signal_pad(a, rank) + (call.epoch & 1) * a.capacity; };

  if constexpr (!Direct)
    for (u64 i = first; i < packs; i += stride) stage(a.rank)[i] = input.load(i);
  signals.send<N>(a, 1);
  advance_epoch(a, call);
  if (signals.wait<N>(a, call, 1)) {
    for (u64 i = first; i < packs; i += stride) {
      Pack part[N];
#pragma unroll
      for (int r = 0; r < N; ++r) part[r] = Direct ? input.at(a.peer_input[r]).load(i) : stage(r)[i];
      output.store(i, sum_in_rank_order<T, N>(part));
    }
    if constexpr (Direct) {
      signals.send<N>(a, 2);
      signals.wait<N>(a, call, 2);
    }
  }
  signals.end(a, Direct ? 2 : 1);
  end_call(a, call);
}

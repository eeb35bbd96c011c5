// one_shot_unstaged: every rank stages its input in its own scratch and loads the others' into registers.
//
//   rank r: input -> scratch[r].stage[parity]; signal every peer
//           scratch[0 .. N-1].stage[parity], read over the links -> sum -> output
//   direct: signal every peer
//           inputs of ranks 0 .. N-1, symmetric tensors, read over the links -> sum -> output; signal every peer
//
// The baseline of one_shot, which keeps more loads in flight. Two stages alternate, (13) in signal_pad.cuh.
#include "device/pack.cuh"
#include "device/sync/signal_pad.cuh"

// (16) With Direct, by (13) a peer's input is visible here after its first signal. No block ends before every peer's
//     second signal, which says that the peer's block has read its share of this rank's input, so the next kernel in
//     the stream may overwrite it. The output must not overlap the input.
template <class T, int N, bool Direct = false>
__global__ void __launch_bounds__(512, 2) one_shot_unstaged(const __grid_constant__ Arguments a) {
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

  if constexpr (!Direct)
    for (u64 i = first; i < packs; i += stride) stage(a.rank)[i] = input.load(i);
  signals.send<N>(a, call, 1);
  advance_epoch(a, call);
  if (signals.wait<N>(a, call, 1)) {
    for (u64 i = first; i < packs; i += stride) {
      Pack part[N];
      for (int r = 0; r < N; ++r) part[r] = Direct ? input.at(a.peer_input[r]).load(i) : stage(r)[i];
      output.store(i, sum_in_rank_order<T, N>(part));
    }
    if constexpr (Direct) {
      signals.send<N>(a, call, 2);
      signals.wait<N>(a, call, 2);
    }
  }
  signals.end(a, Direct ? 2 : 1);
  end_call(a, call);
}

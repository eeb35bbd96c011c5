// one_shot_push: every rank pushes its whole input to every rank and sums what it receives.
//
//   rank r: input -> scratch[p].slot[parity][r]   on every rank p         (N - 1) x nbytes sent over the links
//           scratch[r].slot[parity][0 .. N-1] -> sum, epilogue -> output
//
// One hop and no barrier: readiness travels in the data, (3) and (4) in sentinel.cuh. Wins at the smallest sizes. With
// two ranks it wins far beyond them, since it sends no more than a two-shot. A thread then has several packs, and sends
// pack i + 1 before it waits for pack i. To send all first took 5 % longer at 2 MB.
#include "device/epilogue.cuh"
#include "device/sync/sentinel.cuh"

template <class T, int N, class Expression = Identity, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(512, 2) one_shot_push(const __grid_constant__ Arguments a) {
  const Tensor<T> input(a.input, a.numel);
  const Tensor<Out, PackOf<T, Out>> output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel), stride = gridDim.x * blockDim.x;
  u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  bool whole = are_whole(input, output, first, packs, stride);
  Outgoing<N, 1> outgoing(a.input, first, whole ? packs : 0, stride);
  for (int hop = 0; hop < N; ++hop) outgoing.to[(hop + N - 1) % N] = slot(a, hop, a.rank * a.capacity + first);

  HeldCall call = begin_call(a, first, whole, outgoing);
  release_next_kernel();
  outgoing.load();
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  N == 2 ? outgoing.push_next(slots) : outgoing.push_all(slots);
  if (!whole) push_elements<T, N>(a, 0, slots + a.rank * a.capacity, first, packs, stride);
  advance_epoch(a, call);
  const auto use = [&](u32 i, const Pack(&part)[N]) {
    const Epilogue<T, Expression> epilogue(a, i);
    const auto sum = sum_in_order<T, N, Order, Out>(part, epilogue);
    whole ? output.store_whole(i, sum) : output.store(i, sum);
  };
  receive_each<N>(a, call, 0, slots, first, packs, stride, use, [&] {
    if (N == 2) outgoing.push_next(slots);
  });
  end_call(a, call);
}

// one_shot_push: every rank pushes its whole input to every rank and sums what it receives.
//
//   rank r: input -> scratch[p].slot[parity][r]   on every rank p         (N - 1) x nbytes sent over the links
//           scratch[r].slot[parity][0 .. N-1] -> sum, epilogue -> output
//
// One hop and no barrier: readiness travels in the data, (3) and (4) in sentinel.cuh. Wins at the smallest sizes. With
// two ranks it wins far beyond them, since it sends no more than a two-shot. Every rank applies the epilogue.
#include "device/epilogue.cuh"
#include "device/prefetch.cuh"
#include "device/sync/sentinel.cuh"

template <class T, int N, class Expression = Identity, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(512, 2) one_shot_push(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  const Tensor<T> input(a.input, a.numel);
  const Tensor<Out, PackOf<T, Out>> output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 stride = gridDim.x * blockDim.x;

  Call call = begin_call(a);
  Pack mine;
  if (first < packs) mine = input.load(first);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  for (u32 i = first; i < packs;) {
    push_to_all<N>(a, slots + a.rank * a.capacity + i, mine);
    i += stride;
    if (i < packs) mine = input.load(i);
  }
  advance_epoch(a, call);
  prefetch_share(a);
  for (u32 i = first; i < packs; i += stride) {
    const Epilogue<T, Expression> epilogue(a, i);
    Pack part[N];
    if (!receive(a, call, 0, slots + i, part)) break;
    output.store(i, sum_in_order<T, N, Order, Out>(part, epilogue));
  }
  end_call(a, call);
}

// reducescatter_push: every rank pushes each part of its input to the part's owner, who sums what it receives.
//
//   rank r: part p of input -> scratch[p].slot[parity][r]   on every rank p         (N - 1) / N x nbytes sent
//           scratch[r].slot[parity][0 .. N-1] -> sum of part r, epilogue -> output
//
// The first half of two_shot_push: one hop and no barrier, readiness travels in the data (sentinel.cuh). Parts may
// differ in size and begin anywhere. Tensors larger than the slots take several launches, each with a slice of every
// part. An empty part counts as one pack, for the reason in (3): it is sent as zeros, summed, and not stored.
#include "device/epilogue.cuh"
#include "device/sync/sentinel.cuh"

template <class T, int N, class Expression = Identity, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(512, 2) reducescatter_push(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 stride = gridDim.x * blockDim.x;
  const auto owner = [&](int hop) { return (a.rank + hop + 1) % N; };  // this rank's next peer first, itself last

  u32 packs[N];  // of the part of each owner
  u32 most = 0;
#pragma unroll
  for (int hop = 0; hop < N; ++hop) {
    packs[hop] = max(u32(pack_count<T>(a.count[owner(hop)])), 1u);
    most = max(most, packs[hop]);
  }
  Pack mine[N];  // one for every owner
  const auto load = [&](u32 j) {
#pragma unroll
    for (int hop = 0; hop < N; ++hop)
      if (j < packs[hop]) mine[hop] = part_of<T>(a.input, a, owner(hop)).load(j);
  };

  load(first);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  for (u32 j = first; j < most; j += stride, load(j)) {
#pragma unroll
    for (int hop = 0; hop < N; ++hop)
      if (j < packs[hop]) push(a, (hop + 1) % N, slots + a.rank * a.capacity + j, mine[hop]);
  }
  advance_epoch(a, call);
  const Tensor<Out, PackOf<T, Out>> output(a.output, a.count[a.rank]);
  receive_each<N>(a, call, 0, slots, first, packs[N - 1], stride, [&](u32 j, const Pack(&part)[N]) {
    const Epilogue<T, Expression> epilogue(a, j, a.count[a.rank], a.epilogue.skipped);
    output.store(j, sum_in_order<T, N, Order, Out>(part, epilogue));
  });
  end_call(a, call);
}

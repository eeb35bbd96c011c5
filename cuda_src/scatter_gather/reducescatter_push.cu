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

// Pushes this thread's packs from `first` on, to offsets from `at`. Some parts are not whole or aligned.
template <class T, int N>
__device__ __noinline__ void push_elements_of_parts(const Arguments& a, u32 at, u32 first, u32 stride) {
#pragma unroll 1
  for (int hop = 1; hop <= N; ++hop) {
    const Tensor<T> part = part_of<T>(a.input, a, (a.rank + hop) % N);
    const u32 packs = max(u32(pack_count<T>(part.numel)), 1u);
#pragma unroll 1
    for (u32 j = first; j < packs; j += stride) push(a, hop % N, at + j, part.load(j));
  }
}

template <class T, int N, class Expression = Identity, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(512, 2) reducescatter_push(const __grid_constant__ Arguments a) {
  u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 stride = gridDim.x * blockDim.x;
  const Tensor<Out, PackOf<T, Out>> output(a.output, a.count[a.rank]);
  bool whole = are_whole(output, output, first, pack_count<T>(a.count[a.rank]), stride);
  const Pack* from[N];  // this thread's first pack of each part: of this rank's next peer first, of its own last
  u32 packs[N], most = 0;
  for (int i = 0; i < N; ++i) {
    const Tensor<T> part = part_of<T>(a.input, a, (a.rank + i + 1) % N);
    from[i] = reinterpret_cast<const Pack*>(part.base) + first;
    packs[i] = max(u32(pack_count<T>(part.numel)), 1u);
    most = max(most, packs[i]);
    whole = whole && are_whole(part, part, first, packs[i], stride);
  }

  HeldCall call = begin_call(a, first, most, whole, from);
  release_next_kernel();
  Pack mine[N];  // one for every owner
  for (int i = 0; i < N; ++i)
    if (first < packs[i]) {
      const Tensor<T> part = part_of<T>(a.input, a, (a.rank + i + 1) % N);
      mine[i] = whole ? *from[i] : Tensor<T>::load_elements(from[i], part.elements_of(first));
    }
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity, to = slots + a.rank * a.capacity;
  const auto push_mine = [&](u32 j) {
    for (int i = 0; i < N; ++i)
      if (j < packs[i]) push(a, (i + 1) % N, to + j, mine[i]);
  };
  push_mine(first);
  for (u32 j = first + stride; whole && j < most; j += stride) {
    for (int i = 0; i < N; ++i)
      if (j < packs[i]) mine[i] = from[i][j - first];
    push_mine(j);
  }
  if (!whole && first + stride < most) push_elements_of_parts<T, N>(a, to, first + stride, stride);
  advance_epoch(a, call);
  receive_each<N>(a, call, 0, slots, first, packs[N - 1], stride, [&](u32 j, const Pack(&part)[N]) {
    const Epilogue<T, Expression> epilogue(a, j, a.count[a.rank], a.epilogue.skipped);
    const auto sum = sum_in_order<T, N, Order, Out>(part, epilogue);
    whole ? output.store_whole(j, sum) : output.store(j, sum);
  });
  end_call(a, call);
}

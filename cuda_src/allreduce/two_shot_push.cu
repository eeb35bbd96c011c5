// two_shot_push: reduce-scatter by pushes, then all-gather by pushes, both without a barrier.
//
//   rank r: shard p of input -> scratch[p].scatter[parity][r]   on every rank p     (N - 1) / N x nbytes sent
//           scratch[r].scatter[parity][0 .. N-1] -> sum of shard r, epilogue -> output
//           sum of shard r   -> scratch[p].gather[parity][r]    on every peer p     (N - 1) / N x nbytes sent, of Out
//           scratch[r].gather[parity][p] -> output              from every peer p
//
// Readiness travels in the data, (3) and (4) in sentinel.cuh. A block's warps form N groups, one for each owner, this
// rank last. A group pushes its owner's shard and receives the owner's sum; the last group sums this rank's shard
// meanwhile. Wins at middle sizes. Its scratch is 4 x nbytes.
#include "device/epilogue.cuh"
#include "device/sync/sentinel.cuh"

template <class T, int N, class Expression = Identity, class Order = RankOrder, class Out = T>
__global__ void __launch_bounds__(512, 2) two_shot_push(const __grid_constant__ Arguments a) {
  using Sum = PackOf<T, Out>;
  const Tensor<T> input(a.input, a.numel);
  const Tensor<Out, Sum> output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel), shard = equal_share<u32, line>(packs, N);
  const u32 width = blockDim.x / N, stride = gridDim.x * width;
  u32 hop = (threadIdx.x / width + 1) % N;
  const u32 owner = (a.rank + hop) % N;
  u32 begin = min(owner * shard, packs), end = min(begin + shard, packs);
  u32 first = begin + blockIdx.x * width + threadIdx.x % width;
  bool whole = are_whole(input, output, first, end, stride);
  Outgoing<1> outgoing(a.input, first, whole ? end : 0, stride);
  outgoing.to[0] = slot(a, hop, a.rank * a.capacity + first - begin);  // packs lie in a slot as in their shard

  HeldCall call = begin_call(a, hop, begin, end, first, whole, outgoing);
  release_next_kernel();
  outgoing.load();
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity, scatter = slots - begin;
  outgoing.push_all(slots);
  if (!whole) push_elements<T, 1>(a, hop, scatter + a.rank * a.capacity, first, end, stride);
  advance_epoch(a, call);
  constexpr u32 sums = in_a_pack<Sum>;
  const u32 gather = sums * (scatter + 2 * N * a.capacity) + (sums - 1) * begin;  // the same, counted in sums
  const auto store = [&](u32 i, const Sum& sum) { whole ? output.store_whole(i, sum) : output.store(i, sum); };
  if (hop == 0) {
    receive_each<N, N <= 4>(a, call, 0, scatter, first, end, stride, [&](u32 i, const Pack(&part)[N]) {
      const Epilogue<T, Expression> epilogue(a, i);
      const Sum sum = sum_in_order<T, N, Order, Out>(part, epilogue);
      for (int peer = 1; peer < N; ++peer) push(a, peer, gather + sums * a.rank * a.capacity + i, sum);
      store(i, sum);
    });
  } else {
    receive_each<1, true, Sum>(a, call, owner, gather + sums * owner * a.capacity, first, end, stride,
                               [&](u32 i, const Sum(&sum)[1]) { store(i, sum[0]); });
  }
  end_call(a, call);
}

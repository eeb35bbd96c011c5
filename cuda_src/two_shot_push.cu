// two_shot_push: reduce-scatter by pushes, then all-gather by pushes, both without a barrier.
//
//   rank r: shard p of input -> scratch[p].scatter[parity][r]   on every rank p     (N - 1) / N x nbytes sent
//           scratch[r].scatter[parity][0 .. N-1] -> sum of shard r
//           sum of shard r   -> scratch[p].gather[parity][r]    on every rank p     (N - 1) / N x nbytes sent
//           scratch[r].gather[parity][0 .. N-1]  -> output
//
// Readiness travels in the data in both phases (sentinel.cuh). A thread handles the same packs of every shard, so that
// nothing waits for a block. Wins from about 512 KB to 16 MB; its scratch is 4 x nbytes.
#include "device/sentinel.cuh"

template <class T, int N>
__global__ void __launch_bounds__(1024) two_shot_push(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel);
  const u32 shard = (packs + N - 1) / N;  // of one owner; the last owners may have fewer, or none
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 stride = gridDim.x * blockDim.x;

  Pack mine[N];  // one for every owner, this rank's next peer first
  const auto pack_for = [&](int hop, u32 j) { return (a.rank + hop + 1) % N * shard + j; };
  const auto load = [&](u32 j) {
#pragma unroll
    for (int hop = 0; hop < N; ++hop)
      if (j < shard && pack_for(hop, j) < packs) mine[hop] = input.load(pack_for(hop, j));
  };

  load(first);
  Call call = begin_call(a);
  const u32 scatter = (call.epoch & 1) * N * a.capacity;
  const u32 gather = scatter + 2 * N * a.capacity;
  for (u32 j = first; j < shard; j += stride, load(j)) {
#pragma unroll
    for (int hop = 0; hop < N; ++hop)
      if (pack_for(hop, j) < packs) push(a, (a.rank + hop + 1) % N, scatter + a.rank * a.capacity + j, mine[hop]);
  }
  advance_epoch(a, call);
  bool ok = true;
  for (u32 j = first; ok && j < shard && a.rank * shard + j < packs; j += stride) {
    Pack part[N];
    ok = receive(a, call, scatter + j, part);
    if (ok) push_to_all<N>(a, gather + a.rank * a.capacity + j, sum_in_rank_order<T, N>(part));
  }
  for (u32 j = first; ok && j < shard; j += stride) {
    Pack part[N];
    const u32 owners = (packs - j + shard - 1) / shard;  // that have a pack j
    ok = receive(a, call, gather + j, part, owners);
    if (!ok) break;
#pragma unroll
    for (int owner = 0; owner < N; ++owner)
      if (owner < owners) output.store(owner * shard + j, part[owner]);
  }
  end_call(a, call);
}

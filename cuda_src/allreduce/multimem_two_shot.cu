// multimem_two_shot: the NVSwitch adds every shard once, and copies the sum to all ranks.
//
//   rank r: input -> scratch[r].stage; signal every peer
//           multicast address of shard r of the stage -- ld_reduce: the switch reads scratch[0 .. N-1] and adds -> sum
//           sum -- st, to the same multicast address -> shard r of scratch[0 .. N-1].stage; signal every peer
//           scratch[r].stage, now the sums of all shards -> output
//
// Not exact (multimem.cuh), but every rank has the same bits. A block waits only for the same block of its peers.
#include "device/sync/multimem.cuh"

constexpr int in_flight = 4;  // sums a thread loads before it stores the first

// (17) One stage is enough, also for the sums. A pack that all ranks have staged is read by one thread of its owner
//     alone, which then stores over it. The next call stages over sums that only this rank reads, in this call, which
//     is over then (1). All accesses of peers to them precede their second signal, which every block here has seen. By
//     (7) this holds for aliases too.
template <class T, int N, class Multimem>
__global__ void __launch_bounds__(512, 2) multimem_two_shot(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Signals signals(a);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u64 packs = pack_count<T>(a.numel);
  const u64 shard = (packs + N - 1) / N;  // of one owner; the last owners may have fewer, or none
  const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x, stride = u64(gridDim.x) * blockDim.x;
  Pack* const stage = after_signal_pad(a, a.rank);

  for (u64 j = first; j < shard; j += stride) {
    Pack mine[N];
    for (int owner = 0; owner < N; ++owner)
      if (owner * shard + j < packs) mine[owner] = input.load(owner * shard + j);
    for (int owner = 0; owner < N; ++owner)
      if (owner * shard + j < packs) stage[owner * shard + j] = mine[owner];
  }
  Multimem::fence_before_signal();
  signals.send<N>(a, call, 1);
  advance_epoch(a, call);
  bool ok = signals.wait<N>(a, call, 1);
  if (ok) {
    const u64 begin = a.rank * shard, end = min(begin + shard, packs);
    for (u64 i = begin + first; i < end; i += in_flight * stride) {
      Pack sum[in_flight];
      for (int k = 0; k < in_flight; ++k)
        if (i + k * stride < end) sum[k] = Multimem::template ld_reduce<T, N>(a, i + k * stride);
      for (int k = 0; k < in_flight; ++k)
        if (i + k * stride < end) Multimem::template st<N>(a, i + k * stride, sum[k]);
    }
    Multimem::fence_before_signal();
    signals.send<N>(a, call, 2);
    ok = signals.wait<N>(a, call, 2);
  }
  for (u64 j = first; ok && j < shard; j += stride) {
    Pack sum[N];
    for (int owner = 0; owner < N; ++owner)
      if (owner * shard + j < packs) sum[owner] = stage[owner * shard + j];
    for (int owner = 0; owner < N; ++owner)
      if (owner * shard + j < packs) output.store(owner * shard + j, sum[owner]);
  }
  signals.end(a, 2);
  end_call(a, call);
}

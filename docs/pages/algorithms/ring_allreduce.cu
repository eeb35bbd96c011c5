// ring_allreduce: reduce-scatter and all-gather around a ring, in which every rank stores to its successor alone.
//
//   rank r, with shard s of N, and slots 0 .. 2N-3 of this call's half of the scratch:
//     shard r of input                            -> slot 0 on r + 1
//     slot h + shard r-1-h of input, rounded to T -> slot h + 1 on r + 1    for h = 0 .. N-2; the last is a sum
//     slot h                                      -> slot h + 1 on r + 1    for h = N-1 .. 2N-4
//     slots N-2 .. 2N-3 (the first one with its addend) -> output
//
// In slot h arrives shard r-1-h, after h + 1 stores. Readiness travels in the data, (3) and (4) in sentinel.cuh. (3)
// needs every rank to hear from every other in each call. Here it does so through others: a rank ends a call with a
// sum, which has passed through all ranks, or which it made of a partial sum of all others. So all have begun the call,
// and the successor has armed the other half in the one before. One shard is enough, and no tensor is empty.
#include "device/sync/sentinel.cuh"

static_assert(interface_version == 1, "written for version 1 of graphar's headers");

template <class T, int N>
__global__ void ring_allreduce(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel);
  const u32 shard = equal_share<u64, line>(packs, N);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const auto begin_of = [&](u32 s) { return min(s * shard, packs); };
  const auto count_of = [&](u32 s) { return min(shard, packs - begin_of(s)); };

  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  constexpr u32 slots_a_call = 2 * N - 2;
  const u32 slots = (call.epoch & 1) * slots_a_call * a.capacity;
  for (u32 i = first; i < count_of(a.rank); i += stride) push(a, 1, slots + i, input.load(begin_of(a.rank) + i));
  advance_epoch(a, call);

  // Slot by slot, so that a thread has many packs on the way. A thread has the same places in all slots and shards.
  const u32 predecessor = (a.rank + N - 1) % N;
#pragma unroll 1
  for (u32 h = 0; h < slots_a_call; ++h) {
    const u32 s = (a.rank + 2 * N - 1 - h) % N, begin = begin_of(s), here = slots + h * a.capacity;
    receive_each<1>(a, call, predecessor, here, first, count_of(s), stride, [&](u32 i, const Pack(&received)[1]) {
      Pack p = received[0];
      if (h < N - 1) {
        const Pack part[2] = {p, input.load(begin + i)};
        p = sum_in_rank_order<T>(part);
      }
      if (h >= N - 2) output.store(begin + i, p);
      if (h + 1 < slots_a_call) push(a, 1, here + a.capacity + i, p);
    });
  }
  end_call(a, call);
}

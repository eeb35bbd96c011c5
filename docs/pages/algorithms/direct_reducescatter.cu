// direct_reducescatter: every rank pushes each part of its input to the part's owner, who adds what it receives.
//
//   rank r: part p of input -> scratch[p], slot r of this call's half, on every rank p; its own part last
//           scratch[r], all slots of that half -> sum of part r in rank order -> output
//
// One hop and no barrier: readiness travels in the data, (3) and (4) in sentinel.cuh. Parts may differ in size. For (3)
// every rank must hear from every other in each call, so an empty part is sent as one pack, which is not stored.
#include "device/parts.cuh"
#include "device/sync/sentinel.cuh"

static_assert(interface_version == 1, "written for version 1 of graphar's headers");

template <class T, int N>
__global__ void direct_reducescatter(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  const auto packs_of = [&](u32 rank) { return max(u32(pack_count<T>(a.count[rank])), 1u); };
  const Tensor<T> output(a.output, a.count[a.rank]);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;

  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity, mine = slots + a.rank * a.capacity;
#pragma unroll 1
  for (int hop = 1; hop <= N; ++hop) {
    const u32 owner = (a.rank + hop) % N;
    const Tensor<T> part = part_of<T>(a.input, a, owner);
    for (u32 i = first; i < packs_of(owner); i += stride) push(a, hop % N, mine + i, part.load(i));
  }
  advance_epoch(a, call);

  receive_each<N>(a, call, 0, slots, first, packs_of(a.rank), stride, [&](u32 i, const Pack(&received)[N]) {
    output.store(i, sum_in_rank_order<T>(received));
  });
  end_call(a, call);
}

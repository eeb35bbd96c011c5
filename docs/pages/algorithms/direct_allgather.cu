// direct_allgather: every rank pushes its part of bf16, fp16 or fp32 to every peer at once.
//
//   rank r: part r -> scratch[p], slot r of this call's half, on every peer p
//                  -> output, part r
//           scratch[r], slot p of that half -> output, part p, from every peer p
//
// One hop and no barrier: readiness travels in the data, (3) and (4) in sentinel.cuh. A word of all ones means 'not
// yet', so such a word of a part, a NaN, becomes another NaN on all ranks, also on the one that has it. For (3) every
// rank must hear from every other in each call, so an empty part is sent as one pack.
#include "device/parts.cuh"
#include "device/sync/sentinel.cuh"

static_assert(interface_version == 1, "written for version 1 of graphar's headers");

template <class T, int N>
__global__ void direct_allgather(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  const auto packs_of = [&](u32 rank) { return max(u32(pack_count<T>(a.count[rank])), 1u); };
  const auto input = input_of<T>(a), mine = output_of<T>(a, a.rank);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;

  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  for (u32 i = first; i < packs_of(a.rank); i += stride) {
    Pack p = input.load(i);
#pragma unroll
    for (int w = 0; w < 4; ++w)
      if (p.word[w] == not_yet) p.word[w] = 0x7fff7fffu;  // as `push` does
#pragma unroll
    for (int hop = 1; hop < N; ++hop) push(a, hop, slots + a.rank * a.capacity + i, p);
    mine.store(i, p);
  }
  advance_epoch(a, call);

  u32 most = 0;  // packs of the largest part
#pragma unroll
  for (int r = 0; r < N; ++r) most = max(most, packs_of(r));
  for (u32 k = first; k < (N - 1) * most; k += stride) {  // a pack of one peer for each thread: they poll side by side
    const u32 peer = (a.rank + 1 + k / most) % N, i = k % most;
    if (i >= packs_of(peer)) continue;
    Pack part[1];
    if (!receive(a, call, peer, slots + peer * a.capacity + i, part)) break;
    output_of<T>(a, peer).store(i, part[0]);
  }
  end_call(a, call);
}

// alltoall_flagged: every rank pushes each peer its part of the input at once, each 4 bytes beside a flag.
//
//   rank r: input, part for p -> scratch[p].slot[parity][r]   on every peer p     2 x nbytes of these parts sent
//           input, part for r -> output, part of r
//           scratch[r].slot[parity][p] -> output, part of p, from every peer p
//
// As allgather_flagged, with another part for each peer. Parts may lie in runs: dimensions are permuted on the way.
#include "device/parts.cuh"
#include "device/sync/flagged.cuh"

template <class T, int N>
__global__ void __launch_bounds__(512, 2) alltoall_flagged(const __grid_constant__ ExchangeArguments a) {
  u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 stride = gridDim.x * blockDim.x;
  const auto peer = [&](int i) { return (a.rank + 1 + i) % N; };  // the ranks 1, 2, ... after this one
  const auto packs_of = [&](const Runs& part) { return max(u32(pack_count<T>(part.nbytes)), 1u); };
  u32 sent[N - 1], most = 0;
  for (int i = 0; i < N - 1; ++i) most = max(most, sent[i] = packs_of(a.sends[peer(i)]));

  HeldCall call = begin_call(a, first, most);
  release_next_kernel();
  Pack mine[N - 1] = {};
  const auto load = [&](u32 j) {
    for (int i = 0; i < N - 1; ++i)
      if (j < sent[i]) mine[i] = input_for<T>(a, peer(i)).load(j);
  };
  load(first);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  for (u32 j = first; j < most;) {
    for (int i = 0; i < N - 1; ++i)
      if (j < sent[i]) push_flagged(a, place(a, i + 1, slots + a.rank * a.capacity, j), mine[i]);
    j += stride;
    load(j);
  }
  const auto kept = input_for<T>(a, a.rank), to = output_of<T>(a, a.rank);
  for (u32 j = first; j < kept.packs(); j += stride) to.store(j, kept.load(j));
  advance_epoch(a, call);

  u32 packs[N - 1];
  most = 0;
  for (int i = 0; i < N - 1; ++i) most = max(most, packs[i] = packs_of(a.receives[peer(i)]));
  for (u32 j = first; j < most; j += stride) {
    Pack part[N - 1] = {};
    if (!receive_flagged<N>(a, call, slots, j, packs, part)) break;
    for (int i = 0; i < N - 1; ++i)
      if (j < packs[i]) output_of<T>(a, peer(i)).store(j, part[i]);
  }
  end_call(a, call);
}

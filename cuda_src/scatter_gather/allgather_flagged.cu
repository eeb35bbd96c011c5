// allgather_flagged: every rank pushes its input to every peer at once, each 4 bytes beside a flag.
//
//   rank r: input -> scratch[p].slot[parity][r]   on every peer p     2 x (N - 1) x nbytes sent
//                 -> output, part r
//           scratch[r].slot[parity][p] -> output, part p, from every peer p
//
// One hop and no barrier: the flag beside any bits says that they have arrived (flagged.cuh). Parts may differ in size
// and begin at any byte. An empty part counts as one pack, for the reason in (3). Wins at small sizes.
#include "device/parts.cuh"
#include "device/sync/flagged.cuh"

// Args is Arguments or TupleArguments.
template <class T, int N, class Args = Arguments>
__global__ void __launch_bounds__(512, 2) allgather_flagged(const __grid_constant__ Args a) {
  u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const u32 stride = gridDim.x * blockDim.x;
  const auto packs_of = [&](int rank) { return max(u32(pack_count<T>(a.count[rank])), 1u); };
  auto input = input_of<T>(a), output = output_of<T>(a, a.rank);
  u32 own = packs_of(a.rank);

  HeldCall call = begin_call(a, first, own, input, output);
  release_next_kernel();
  Pack mine = {};
  if (first < own) mine = input.load(first);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  for (u32 j = first; j < own;) {
    for (int hop = 1; hop < N; ++hop) push_flagged(a, place(a, hop, slots + a.rank * a.capacity, j), mine);
    output.store(j, mine);
    j += stride;
    if (j < own) mine = input.load(j);
  }
  advance_epoch(a, call);

  u32 packs[N - 1], most = 0;  // of the parts of the ranks 1, 2, ... after this one
  for (int i = 0; i < N - 1; ++i) most = max(most, packs[i] = packs_of((a.rank + 1 + i) % N));
  for (u32 j = first; j < most; j += stride) {
    Pack part[N - 1] = {};
    if (!receive_flagged<N>(a, call, slots, j, packs, part)) break;
#pragma unroll
    for (int i = 0; i < N - 1; ++i)
      if (j < packs[i]) output_of<T>(a, (a.rank + 1 + i) % N).store(j, part[i]);
  }
  end_call(a, call);
}

// gathered: an all-gather of bytes, right in all circumstances. test_circumstances.py makes it wrong in one at a time.
//
//   rank r: part r -> scratch[p], slot r of this call's half, on every peer p; then the number of the call
//                  -> output, part r
//           scratch[r], slot p of that half -> output, part p, from every peer p
#include "device/parts.cuh"
#include "device/sync/deadline.cuh"

// In slot 0 of the scratch.
struct Numbers {
  u64 of[2][2][max_ranks];  // by half, block and rank
};

template <class T, int N>
__global__ void gathered(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 half = call.epoch & 1, number = call.epoch + 1;
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const auto input = input_of<T>(a), mine = output_of<T>(a, a.rank);
  const auto packs_of = [&](u32 rank) { return u32(pack_count<T>(a.count[rank])); };
  const auto slot = [&](u32 to, u32 from) {
    return reinterpret_cast<Pack*>(a.scratch[to]) + (1 + half * N + from) * a.capacity;
  };
  const auto told = [&](u32 to, u32 from) {
    return &reinterpret_cast<Numbers*>(a.scratch[to])->of[half][blockIdx.x][from];
  };

  for (u32 i = first; i < packs_of(a.rank); i += stride) {
    const Pack p = input.load(i);
    mine.store(i, p);
    for (int hop = 1; hop < N; ++hop) store_relaxed_sys(slot((a.rank + hop) % N, a.rank) + i, p);
  }
  __syncthreads();
  const bool has_peer = threadIdx.x < N && threadIdx.x != a.rank;
  if (has_peer) store_release_sys(told(threadIdx.x, a.rank), u64(number));
  advance_epoch(a, call);
  bool failed = false;
  Deadline deadline;
  while (has_peer && !failed && u32(load_acquire_sys(told(a.rank, threadIdx.x))) != number)
    failed = deadline.check(a, call) != Deadline::waiting;
  if (!__syncthreads_or(failed))
    for (u32 peer = 0; peer < N; ++peer)
      for (u32 i = first; peer != a.rank && i < packs_of(peer); i += stride)
        output_of<T>(a, peer).store(i, load_relaxed_sys(slot(a.rank, peer) + i));
  end_call(a, call);
}

// relaxed_start: an all-reduce that reads its peers' staged inputs behind a barrier of all ranks, with an ordering
// mistake. vLLM issue 57059 reports the same one for ROCm; this kernel is written anew.
//
//   rank r: input -> scratch[r], stage of this call's half; barrier with every peer
//           the stages of all ranks -> sum -> output
//
// The flags of the barrier are relaxed stores, and relaxed loads look for them. They say that a peer has come to the
// barrier, but order nothing that it did before: its stage may still hold the values of an earlier call, and what it
// reads there in this call may be overwritten by a later one.
//
// Mended: a release store, and an acquire load.
#include "device/pack.cuh"
#include "device/sync/deadline.cuh"

constexpr int largest_grid = 4;

// Slot 0 of the scratch. A flag is the call's epoch plus 1. Two alternate, so that a peer which is one call ahead does
// not overwrite what is still awaited.
struct Flags {
  u64 come[2][largest_grid][max_ranks];
};

template <int N>
__device__ __forceinline__ bool wait_for_all(const Arguments& a, const Call& call) {
  const auto flag = [&](int on, int from) {
    return &reinterpret_cast<Flags*>(a.scratch[on])->come[call.epoch & 1][blockIdx.x][from];
  };
  const int peer = threadIdx.x;
  bool failed = false;
  __syncthreads();
  if (peer < N && peer != a.rank) {
    store_relaxed_sys(flag(peer, a.rank), u64(call.epoch) + 1);
    Deadline deadline;
    while (!failed && load_relaxed_sys(flag(a.rank, peer)) != u64(call.epoch) + 1)
      failed = deadline.check(a, call) != Deadline::waiting;
  }
  return !__syncthreads_or(failed);
}

template <class T, int N>
__global__ void relaxed_start(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const auto stage = [&](int rank) {
    return reinterpret_cast<Pack*>(a.scratch[rank]) + (1 + (call.epoch & 1)) * a.capacity;
  };

  for (u32 i = first; i < packs; i += stride) stage(a.rank)[i] = input.load(i);
  advance_epoch(a, call);
  if (wait_for_all<N>(a, call))
    for (u32 i = first; i < packs; i += stride) {
      Pack part[N];
      for (int r = 0; r < N; ++r) part[r] = stage(r)[i];
      output.store(i, sum_in_rank_order<T, N>(part));
    }
  end_call(a, call);
}

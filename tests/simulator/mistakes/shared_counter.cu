// shared_counter: an all-reduce of two protocols, with one word for the counters of both. tokenspeed pull request 351
// mended a mistake of this kind, a count of finished blocks that two protocols shared; this kernel is written anew.
//
//   small tensors, pushed: input -> scratch[p], slot r of this call's half, on every rank p; signal every peer
//                          scratch[r], all slots of that half -> sum -> output
//   large tensors, pulled: input -> scratch[r], stage of this call's half; signal every peer
//                          the stages of all ranks -> sum -> output
//
// Each protocol counts its own calls, and a rank announces the count to its peers in one word for each block. After
// five small calls that word is 5. A large call, which is the first, waits until it is at least 1, goes on at once, and
// reads what the peers have not staged yet: it has taken a call of the one protocol for one of the other.
//
// Mended: each protocol has rows of the signal pad of its own, as it has a count of its own.
#include "device/pack.cuh"
#include "device/sync/signal_pad.cuh"

constexpr u64 most_pushed = 64;  // elements of the largest tensor that is pushed

template <class T, int N>
__global__ void shared_counter(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const bool pushes = a.numel <= most_pushed;
  const u32 half = call.epoch & 1;
  const u32 count = blockIdx.x + (pushes ? 0 : max_blocks / 2), row = blockIdx.x;
  const u32 step = load_relaxed_gpu(&a.counters->steps[count]) + 1;
  const auto slot = [&](int to, int from) { return after_signal_pad(a, to) + (half * N + from) * a.capacity; };
  const auto stage = [&](int rank) { return after_signal_pad(a, rank) + (2 * N + half) * a.capacity; };

  for (u32 i = first; i < packs; i += stride)
    if (pushes)
      for (int r = 0; r < N; ++r) slot(r, a.rank)[i] = input.load(i);
    else
      stage(a.rank)[i] = input.load(i);
  __syncthreads();
  const bool is_for_peer = threadIdx.x < N && threadIdx.x != a.rank;
  set_flag(a, call, is_for_peer, row, threadIdx.x, step);
  advance_epoch(a, call);
  const bool failed = is_for_peer && !wait_for_flag<true>(a, call, row, threadIdx.x, step);
  if (!__syncthreads_or(failed))
    for (u32 i = first; i < packs; i += stride) {
      Pack part[N];
      for (int r = 0; r < N; ++r) part[r] = pushes ? slot(a.rank, r)[i] : stage(r)[i];
      output.store(i, sum_in_rank_order<T, N>(part));
    }
  if (threadIdx.x == 0) store_relaxed_gpu(&a.counters->steps[count], step);
  end_call(a, call);
}

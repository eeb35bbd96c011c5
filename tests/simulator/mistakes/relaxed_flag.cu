// relaxed_flag: an all-reduce that pushes its payload and then a flag, with an ordering mistake. tokenspeed pull
// request 351 mended the same one in another all-reduce; this kernel is written anew.
//
//   rank r: input -> scratch[p], slot r of this call's half, on every rank p; then a flag to every rank p
//           scratch[r], all slots of that half -> sum -> output
//
// Payload and flag are relaxed stores. The barrier between them orders the threads of the block, but nothing is
// released in the scope of the system. So the flag may arrive before the payload, or between two parts of it.
//
// Mended: the flag is a release.
#include "device/pack.cuh"
#include "device/sync/signal_pad.cuh"

template <class T, int N>
__global__ void relaxed_flag(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Signals signals(a);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
  const auto slot = [&](int to, int from) {
    return after_signal_pad(a, to) + ((call.epoch & 1) * N + from) * a.capacity;
  };

  for (u32 i = first; i < packs; i += stride)
    for (int r = 0; r < N; ++r) store_relaxed_sys(slot(r, a.rank) + i, input.load(i));
  __syncthreads();
  if (threadIdx.x < N && threadIdx.x != a.rank) {
    u64* const flag = &signal_pad(a, threadIdx.x)->flag[blockIdx.x][a.rank];
    store_relaxed_sys(flag, flag_of(a, call, signals.first_step() + 1));
  }
  advance_epoch(a, call);
  if (signals.wait<N>(a, call, 1))
    for (u32 i = first; i < packs; i += stride) {
      Pack part[N];
      for (int r = 0; r < N; ++r) part[r] = load_relaxed_sys(slot(a.rank, r) + i);
      output.store(i, sum_in_rank_order<T, N>(part));
    }
  signals.end(a, 1);
  end_call(a, call);
}

// partial_packet: an all-reduce that pushes packets, with an ordering mistake. flashinfer pull request 4092 mended the
// same one in a queue of packets; this kernel is written anew.
//
//   rank r: packets of the input -> scratch[p], slot r of this call's half, on every rank p
//           scratch[r], all slots of that half -> sum -> output
//
// A block writes a packet with all of its threads, and a few of them publish it. After a whole packet the threads meet
// at a barrier first. The last packet, which is seldom whole, has no barrier: its flag is a release, but releases only
// what the publishing thread itself has written. A receiver may see the flag before the other threads' packs.
//
// Mended: the barrier is unconditional.
#include "device/pack.cuh"
#include "device/sync/signal_pad.cuh"

template <class T, int N>
__global__ void partial_packet(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Signals signals(a);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel), stride = gridDim.x * blockDim.x;
  const u32 packets = (packs + stride - 1) / stride;  // of a block
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x;
  const auto slot = [&](int to, int from) {
    return after_signal_pad(a, to) + ((call.epoch & 1) * N + from) * a.capacity;
  };

  for (u32 k = 0; k < packets; ++k) {
    const u32 i = first + k * stride;
    if (i < packs)
      for (int r = 0; r < N; ++r) slot(r, a.rank)[i] = input.load(i);
    if (k + 1 < packets) __syncthreads();
    const bool publishes = threadIdx.x < N && threadIdx.x != a.rank;
    set_flag(a, call, publishes, blockIdx.x, threadIdx.x, signals.first_step() + k + 1);
  }
  advance_epoch(a, call);
  for (u32 k = 0; k < packets; ++k) {
    if (!signals.wait<N>(a, call, k + 1)) break;
    const u32 i = first + k * stride;
    if (i >= packs) continue;
    Pack part[N];
    for (int r = 0; r < N; ++r) part[r] = slot(a.rank, r)[i];
    output.store(i, sum_in_rank_order<T, N>(part));
  }
  signals.end(a, packets);
  end_call(a, call);
}

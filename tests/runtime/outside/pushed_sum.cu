// pushed_sum: every rank pushes its whole input to every rank and sums what it receives; an algorithm from outside.
//
//   rank r: input -> scratch[p].slot[parity][r]   on every rank p
//           scratch[r].slot[parity][0 .. N-1] -> sum -> output
#include "device/sync/sentinel.cuh"
#include "slots_of_call.cuh"

template <class T, int N>
__global__ void pushed_sum(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel);
  const u32 first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;

  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = slots_of_call<N>(a, call);
  for (u32 i = first; i < packs; i += stride) push_to_all<N>(a, slots + a.rank * a.capacity + i, input.load(i));
  advance_epoch(a, call);
  for (u32 i = first; i < packs; i += stride) {
    Pack part[N];
    if (!receive(a, call, 0, slots + i, part)) break;
    output.store(i, sum_in_order<T, N, RankOrder, T>(part));
  }
  end_call(a, call);
}

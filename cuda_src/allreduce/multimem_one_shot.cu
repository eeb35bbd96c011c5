// multimem_one_shot: every rank stages its input in its own scratch, and the NVSwitch adds the stages of all.
//
//   rank r: input -> scratch[r].stage[parity]; signal every peer
//           multicast address of stage[parity] -- ld_reduce: the switch reads scratch[0 .. N-1] and adds -> output
//
// Not exact: each rank loads its own sum (multimem.cuh). Two stages alternate, (13) in signal_pad.cuh; aliases: (7).
#include "device/sync/multimem.cuh"

template <class T, int N, class Multimem>
__global__ void __launch_bounds__(512, 2) multimem_one_shot(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const Signals signals(a);
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u64 packs = pack_count<T>(a.numel);
  const u64 first = u64(blockIdx.x) * blockDim.x + threadIdx.x, stride = u64(gridDim.x) * blockDim.x;
  const u64 stage = (call.epoch & 1) * u64(a.capacity);

  for (u64 i = first; i < packs; i += stride) after_signal_pad(a, a.rank)[stage + i] = input.load(i);
  Multimem::fence_before_signal();
  signals.send<N>(a, call, 1);
  advance_epoch(a, call);
  if (signals.wait<N>(a, call, 1))
    for (u64 i = first; i < packs; i += stride) output.store(i, Multimem::template ld_reduce<T, N>(a, stage + i));
  signals.end(a, 1);
  end_call(a, call);
}

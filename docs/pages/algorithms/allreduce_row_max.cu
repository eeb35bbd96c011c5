// allreduce_row_max: an all-reduce of rows, whose last pack gets the largest magnitude of the row's sums.
//
//   a row: `columns` elements, then a pack whose input is ignored
//   rank r: elements of input -> scratch[p], slot r of this call's half, on every rank p
//           scratch[r], all slots of that half -> sum in rank order -> output
//           largest magnitude of a row's sums  -> all elements of the row's last pack of output
//
// A warp has a row: it pushes it, receives it, and finds its maximum in registers. One hop and no barrier: readiness
// travels in the data, (3) and (4) in sentinel.cuh. The last pack of a row neither travels nor is waited for, but a
// tensor begins with elements, so every rank hears from every other. The last row may be cut short anywhere.
#include "device/sync/sentinel.cuh"

static_assert(interface_version == 1, "written for version 1 of graphar's headers");

constexpr u32 columns = 1024;  // as COLUMNS in allreduce_row_max.py; a multiple of 8

// The largest magnitude of a pack's elements, and `m`, as bits. Sums have one NaN, the canonical one: the largest.
template <class T>
__device__ __forceinline__ u32 largest(u32 m, const Pack& p) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if constexpr (elements_per_word<T> == 1)
      m = max(m, p.word[w] & 0x7fffffffu);
    else
      m = max(m, max(p.word[w] & 0x7fffu, p.word[w] >> 16 & 0x7fffu));
  }
  return m;
}

template <class T, int N>
__global__ void allreduce_row_max(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  release_next_kernel();
  constexpr u32 data = columns / elements_per_pack<T>, pitch = data + 1;  // packs of a row, without and with its last
  static_assert(columns % elements_per_pack<T> == 0, "a row has whole packs");
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const u32 packs = pack_count<T>(a.numel), lane = threadIdx.x % 32;
  const u32 first = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * pitch, stride = gridDim.x * blockDim.x / 32 * pitch;

  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 slots = (call.epoch & 1) * N * a.capacity;
  for (u32 row = first; row < packs; row += stride)
    for (u32 i = row + lane; i < min(row + data, packs); i += 32)
      push_to_all<N>(a, slots + a.rank * a.capacity + i, input.load(i));
  advance_epoch(a, call);

  for (u32 row = first; row < packs; row += stride) {
    u32 m = 0;
    receive_each<N>(a, call, 0, slots, row + lane, min(row + data, packs), 32, [&](u32 i, const Pack(&part)[N]) {
      const Pack sum = sum_in_rank_order<T>(part);
      output.store(i, sum);
      m = largest<T>(m, sum);
    });
#pragma unroll
    for (int step = 1; step < 32; step *= 2) m = max(m, __shfl_xor_sync(0xffffffff, m, step));
    if (elements_per_word<T> == 2) m |= m << 16;
    if (lane == 0 && row + data < packs) output.store(row + data, Pack{{m, m, m, m}});
  }
  end_call(a, call);
}

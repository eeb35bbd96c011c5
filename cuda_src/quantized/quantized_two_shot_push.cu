// quantized_two_shot_push: two_shot_push with a codec on the wire, tile by tile (wire.cuh).
//
//   rank r: shard p of input -> codes -> scratch[p].scatter[parity][r]   on every rank p
//           scratch[r].scatter[parity][0 .. N-1] -> values -> sum of shard r -> codes -> values -> output
//           codes of the sum         -> scratch[p].gather[parity][r]    on every peer p
//           scratch[r].gather[parity][p] -> values -> output            from every peer p
//
// Two roundings. Every rank decodes the same bytes; the owner its own. A block's warps form N groups as in
// two_shot_push. Readiness travels in codes (wire_sentinel.cuh): an absmax scheme. Wins if its scratch, 4 times the
// wire, suffices.
#include "device/wire/wire_sentinel.cuh"

template <class T, int N, class C>
__global__ void __launch_bounds__(512, 1) quantized_two_shot_push(const __grid_constant__ Arguments a) {
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel), errors(a.errors, a.numel);
  const u32 tiles = tile_count(a.numel);
  u32 shard = (tiles + N - 1) / N;
  const u32 warp = threadIdx.x / 32, width = blockDim.x / 32 / N;
  u32 hop = (warp / width + 1) % N;
  const u32 owner = (a.rank + hop) % N;
  u32 begin = min(owner * shard, tiles), end = min(begin + shard, tiles);
  u32 first = begin + blockIdx.x * width + warp % width;
  const u32 stride = gridDim.x * width;

  HeldCall call = begin_call(a, shard, hop, begin, end, first);
  if (blockDim.x <= 256) release_next_kernel();  // such a block takes half an SM at most: (18) in kernel_order.cuh
  Tile<T> mine;
  if (first < end) mine = load_values<C>(input, errors, first);
  read_epoch(a, call);
  if (call.aborted) return end_aborted_call(a, call);
  const u32 scatter = (call.epoch & 1) * N * a.capacity;
  const u32 gather = scatter + 2 * N * a.capacity;
  const auto wire = [&](int hop, u32 slots) {
    return Wire<C>{reinterpret_cast<char*>(slot(a, hop, slots + a.rank * a.capacity)), shard};
  };
  for (u32 t = first; t < end;) {
    const Coded<C> coded = encode<C>(mine, t, {a.seed, call.epoch, a.rank});
    push(wire(hop, scatter), t - begin, coded);
    if constexpr (C::feedback) store_error(errors, t, mine, coded);
    t += stride;
    if (t < end) mine = load_values<C>(input, errors, t);
  }
  advance_epoch(a, call);
  for (u32 t = first; t < end; t += stride) {
    Received<C> sum[1];
    if (hop == 0) {
      float total[tile_rows][run_numel];
      if (!sum_of_parts<C, N>(Arrivals<C>{a, call, scatter, shard, t - begin}, total)) break;
      const Coded<C> coded = encode<C>(tile_of(total), t, {a.seed, call.epoch, noise_of_sum});
#pragma unroll
      for (int peer = 1; peer < N; ++peer) push(wire(peer, gather), t - begin, coded);
      sum[0] = as_received(coded);
    } else {
      if (!Arrivals<C>{a, call, gather, shard, t - begin, 5}(owner, sum)) break;
    }
    store_values(output, t, sum[0]);
  }
  end_call(a, call);
}

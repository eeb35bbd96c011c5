// quantized_two_shot_pipelined: two_shot_pipelined with a codec on the wire, tile by tile (wire.cuh).
//
//   step k of block b on rank r:
//     1. input chunk k, piece p -> codes   ---> scratch[p].scatter[k % depth][b][r]        on every rank p
//     2. wait until every peer has finished step k - 1
//     3. scatter[(k-1) % depth][b] -> values -> sum -> codes -> output, piece r of chunk k - 1
//        codes of the sum                  ---> scratch[p].gather[(k-1) % depth][b][r]     on every peer p
//     4. signal every peer: step k is finished
//     5. gather[(k-2) % depth][b][p] -> values -> output, piece p of chunk k - 2
//
// Steps, waits and slots are those of two_shot_pipelined.cu, and so is the argument that none is overwritten too early;
// a piece is a.chunk tiles at most, and what a rank sends itself is ordered by its own barriers. Flags announce a
// chunk, so any codec will do, whatever words it has. The scratch has a fixed size.
#include "device/signal_pad.cuh"
#include "device/tile_chunks.cuh"
#include "device/wire_signalled.cuh"

constexpr u32 depth = 3;

template <class T, int N, class C>
struct QuantizedTwoShotPipelined {
  const Arguments& a;
  const Tensor<T> input, output;
  const u32 call;
  const TileChunks<N> chunks;
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;

  __device__ QuantizedTwoShotPipelined(const Arguments& arguments, u32 epoch)
      : a(arguments),
        input(a.input, a.numel),
        output(a.output, a.numel),
        call(epoch),
        chunks(a) {}

  // Phase 0 is the reduce-scatter, 1 the all-gather.
  __device__ Wire<C> slot(int phase, int on, u32 k, int from) const {
    const u64 index = ((u64(blockIdx.x) * 2 + phase) * depth + k % depth) * N + from;
    return {reinterpret_cast<char*>(after_signal_pad(a, on) + index * a.capacity), chunks.length};
  }

  // Each warp takes the next tile for the next peer, so that all links are busy; this rank itself, if it is one, last.
  __device__ void scatter(u32 k) const {
    for (u32 i = warp; i < N * chunks.length; i += warps) {
      const int owner = (a.rank + 1 + i % N) % N;
      const u32 j = i / N;
      if (j >= chunks.count(k, owner)) continue;
      const u32 tile = chunks.begin(k, owner) + j;
      send_tile(slot(0, owner, k, a.rank), j, input, tile, tile, {a.seed, call, a.rank});
    }
  }

  __device__ void reduce(u32 k) const {
    for (u32 j = warp; j < chunks.count(k, a.rank); j += warps) {
      float total[rows][run];
      sum_of_slots<C, N>([&](int r) { return slot(0, a.rank, k, r); }, j, total);
      const u32 tile = chunks.begin(k, a.rank) + j;
      const Coded<C> coded = encode<C>(tile_of(total), tile, {a.seed, call, noise_of_sum});
#pragma unroll
      for (int hop = 1; hop < N; ++hop) visit_coded(slot(1, (a.rank + hop) % N, k, a.rank), j, coded, Store{});
      store_values(output, tile, as_received(coded));
    }
  }

  __device__ void gather(u32 k) const {
    for (u32 i = warp; i < (N - 1) * chunks.length; i += warps) {
      const int owner = (a.rank + 1 + i % (N - 1)) % N;
      const u32 j = i / (N - 1);
      if (j >= chunks.count(k, owner)) continue;
      Received<C> sum;
      visit_received(slot(1, a.rank, k, owner), j, sum, Load{});
      store_values(output, chunks.begin(k, owner) + j, sum);
    }
  }
};

template <class T, int N, class C>
__global__ void __launch_bounds__(512, 1) quantized_two_shot_pipelined(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_call(a, call);
  const Signals signals(a);
  advance_epoch(a, call);
  const QuantizedTwoShotPipelined<T, N, C> body(a, call.epoch);
  const u32 chunks = body.chunks.number;

  for (u32 k = 0; k < chunks + 2; ++k) {
    if (k < chunks) body.scatter(k);
    if (!signals.wait<N>(a, call, k)) break;
    if (k >= 1 && k <= chunks) body.reduce(k - 1);
    signals.send<N>(a, k + 1);
    if (k >= 2) body.gather(k - 2);
  }
  signals.end(a, chunks + 2);
  end_call(a, call);
}

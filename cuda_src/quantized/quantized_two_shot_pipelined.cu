// quantized_two_shot_pipelined: two_shot_pipelined with a codec on the wire, tile by tile (wire.cuh).
//
//   rank r: input, shard p         -> codes ---> slots of the reduce-scatter on every rank p
//           slots of all ranks     -> values -> sum of shard r -> codes -> values -> output
//           codes of the sum       ---> slots of the all-gather on every peer
//           slots of every peer p  -> values -> output, shard p
//
// A rank also sends to itself, ordered by its barriers. Flags announce a chunk, so any codec will do. Wins if
// quantized_two_shot_push would need more scratch than it has.
#include "device/sync/two_shot_pipeline.cuh"
#include "device/wire/tile_chunks.cuh"

template <class T, int N, class C>
struct QuantizedTwoShotPipelined {
  static constexpr bool gathers = true;
  const Arguments& a;
  const Call& call;
  const Tensor<T> input{a.input, a.numel}, output{a.output, a.numel}, errors{a.errors, a.numel};
  Chunks<u32, 1, N> chunks{a, tile_count(a.numel)};
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;

  __device__ Wire<C> slot(Shot shot, int hop, u32 k, int from) const {
    return {reinterpret_cast<char*>(pipeline_slot<N>(a, shot, hop, k, from)), chunks.length};
  }

  __device__ void scatter(u32 k) const {
    for_each_tile<N, N>(chunks, a, k, [&](int hop, int owner, u32 j) {
      const u32 tile = chunks.begin(k, owner) + j;
      send_tile(slot(scattered, hop, k, a.rank), j, input, errors, tile, tile, {a.seed, call.epoch, a.rank});
    });
  }

  __device__ void reduce(u32 k) const {
    for (u32 j = warp; j < chunks.count(k, a.rank); j += warps) {
      float total[tile_rows][run_numel];
      sum_of_slots<C, N>([&](int r) { return slot(scattered, 0, k, r); }, j, total);
      const u32 tile = chunks.begin(k, a.rank) + j;
      const Coded<C> coded = encode<C>(tile_of(total), tile, {a.seed, call.epoch, noise_of_sum});
#pragma unroll
      for (int hop = 1; hop < N; ++hop) visit_coded(slot(reduced, hop, k, a.rank), j, coded, Store{});
      store_values(output, tile, as_received(coded));
    }
  }

  __device__ void gather(u32 k) const {
    for_each_tile<N, N - 1>(chunks, a, k, [&](int, int owner, u32 j) {
      Received<C> sum;
      visit_received(slot(reduced, 0, k, owner), j, sum, Load{});
      store_values(output, chunks.begin(k, owner) + j, sum);
    });
  }
};

template <class T, int N, class C>
__global__ void __launch_bounds__(512, 1) quantized_two_shot_pipelined(const __grid_constant__ Arguments a) {
  run_two_shot_pipeline<N, QuantizedTwoShotPipelined<T, N, C>>(a);
}

// two_shot_lossless: two_shot_pipelined with bf16 tiles packed without loss into three quarters of the bytes.
//
//   rank r: input, shard p         -> codes ---> slots of the reduce-scatter on every peer p
//           slots of every peer, own shard   -> values -> sum of shard r -> output
//           sum of shard r         -> codes ---> slots of the all-gather on every peer
//           slots of every peer p  -> values -> output, shard p
//
// Exponents far apart take more bytes, and time (lossless.cuh). Wins at large sizes, where links hide the arithmetic.
#include "device/sync/two_shot_pipeline.cuh"
#include "device/wire/lossless.cuh"

template <class T, int N>
struct TwoShotLossless {
  static constexpr bool gathers = true;
  const Arguments& a;
  const Tensor<T> input, output;
  Chunks<u32, 1, N> chunks;
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;

  __device__ TwoShotLossless(const Arguments& arguments, const Call&)
      : a(arguments), input(a.input, a.numel), output(a.output, a.numel), chunks(a, tile_count(a.numel)) {}

  __device__ LosslessTile place(Shot shot, int hop, u32 k, int from, u32 j) const {
    return lossless_tile(j, chunks.length, [&](u32 at) { return pipeline_slot<N>(a, shot, hop, k, from, at); });
  }

  __device__ void scatter(u32 k) const {
    for_each_tile<N, N - 1>(chunks, a, k, [&](int hop, int owner, u32 j) {
      const Tile<T> mine = load_tile(input, chunks.begin(k, owner) + j);
      send_tile<1>([&](int) { return place(scattered, hop, k, a.rank, j); }, mine, encode_lossless(mine));
    });
  }

  __device__ void reduce(u32 k) const {
    for (u32 j = warp; j < chunks.count(k, a.rank); j += warps) {
      const u32 tile = chunks.begin(k, a.rank) + j;
      const Tile<T> mine = load_tile(input, tile);
      const Tile<T> sum = sum_of_tiles<N>(a.rank, mine, [&](int r) { return place(scattered, 0, k, r, j); });
      const auto to = [&](int i) { return place(reduced, i + 1, k, a.rank, j); };
      send_tile<N - 1>(to, sum, encode_lossless(sum));
      store_tile(output, tile, sum);
    }
  }

  __device__ void gather(u32 k) const {
    for_each_tile<N, N - 1>(chunks, a, k, [&](int, int owner, u32 j) {
      const LosslessTile from = place(reduced, 0, k, owner, j);
      store_tile(output, chunks.begin(k, owner) + j, decode_tile(from, receive_tile(from)));
    });
  }
};

template <class T, int N>
__global__ void __launch_bounds__(512, 1) two_shot_lossless(const __grid_constant__ Arguments a) {
  run_two_shot_pipeline<N, TwoShotLossless<T, N>>(a);
}

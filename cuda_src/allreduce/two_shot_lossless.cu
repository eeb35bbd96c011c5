// two_shot_lossless: two_shot_pipelined with bf16 tiles packed without loss into three quarters of the bytes.
//
//   rank r: input, shard p         -> codes ---> slots of the reduce-scatter on every peer p
//           slots of every peer, own shard   -> values -> sum of shard r -> output
//           sum of shard r         -> codes ---> slots of the all-gather on every peer
//           slots of every peer p  -> values -> output, shard p
//
// The steps, and why no slot is overwritten early, are in two_shot_pipeline.cuh, (11). The packing is in lossless.cuh.
// Gives the bits of every exact algorithm. Its time depends on the data: exponents that are far apart take more bytes.
// Wins at large sizes, where the arithmetic hides behind the links.
#include "device/sync/two_shot_pipeline.cuh"
#include "device/wire/lossless.cuh"
#include "device/wire/tile_chunks.cuh"

template <class T, int N>
struct TwoShotLossless {
  static constexpr bool gathers = true;
  const Arguments& a;
  const Tensor<T> input, output;
  const Chunks<u32, 1, N> chunks;
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
  LosslessSender sender;

  __device__ TwoShotLossless(const Arguments& arguments, const Call&)
      : a(arguments), input(a.input, a.numel), output(a.output, a.numel), chunks(a, tile_count(a.numel)) {}

  __device__ LosslessSlot slot(Phase phase, int on, u32 k, int from) const {
    return {reinterpret_cast<char*>(pipeline_slot<N>(a, phase, on, k, from)), chunks.length};
  }

  __device__ void scatter(u32 k) {
    for_each_tile<N, N - 1>(chunks, a, k, [&](int owner, u32 j) {
      const Tile<T> mine = load_tile(input, chunks.begin(k, owner) + j);
      sender.send<1>([&](int) { return slot(scattered, owner, k, a.rank); }, j, mine);
    });
  }

  __device__ void reduce(u32 k) {
    for (u32 j = warp; j < chunks.count(k, a.rank); j += warps) {
      const u32 tile = chunks.begin(k, a.rank) + j;
      const Tile<T> sum = sum_of(load_tile(input, tile), k, j);
      sender.send<N - 1>([&](int i) { return slot(reduced, (a.rank + 1 + i) % N, k, a.rank); }, j, sum);
      store_tile(output, tile, sum);
    }
  }

  // In rank order, in fp32, rounded once.
  __device__ Tile<T> sum_of(const Tile<T>& mine, u32 k, u32 j) const {
    constexpr int batch = 3;  // peers whose tiles a warp has in flight
    float total[rows][run];
#pragma unroll
    for (int first = 0; first < N; first += batch) {
      LosslessCodes part[batch];
#pragma unroll
      for (int r = first; r < first + batch && r < N; ++r)
        if (r != a.rank) part[r - first] = receive(slot(scattered, a.rank, k, r), j);
#pragma unroll
      for (int r = first; r < first + batch && r < N; ++r)
        add(total, r == a.rank ? mine : decode(slot(scattered, a.rank, k, r), j, part[r - first]), r == 0);
    }
    Tile<T> sum;
#pragma unroll
    for (int j = 0; j < rows; ++j)
#pragma unroll
      for (int w = 0; w < 4; ++w) sum.word[j][w] = T::round(total[j] + 2 * w);
    return sum;
  }

  static __device__ __forceinline__ void add(float (&total)[rows][run], const Tile<T>& t, bool is_first) {
#pragma unroll
    for (int j = 0; j < rows; ++j) {
      float v[run];
      t.unpack(j, v);
#pragma unroll
      for (int e = 0; e < run; ++e) total[j][e] = is_first ? v[e] : __fadd_rn(total[j][e], v[e]);
    }
  }

  __device__ void gather(u32 k) const {
    for_each_tile<N, N - 1>(chunks, a, k, [&](int owner, u32 j) {
      const LosslessSlot from = slot(reduced, a.rank, k, owner);
      store_tile(output, chunks.begin(k, owner) + j, decode(from, j, receive(from, j)));
    });
  }
};

template <class T, int N>
__global__ void __launch_bounds__(512, 1) two_shot_lossless(const __grid_constant__ Arguments a) {
  wait_for_previous_kernel(a);
  run_two_shot_pipeline<N, TwoShotLossless<T, N>>(a);
}

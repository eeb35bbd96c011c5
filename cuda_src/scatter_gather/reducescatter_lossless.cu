// reducescatter_lossless: every rank sends each part of its input, compressed, to the part's owner, who sums them.
//
//   rank r: part p of the input  -> codes ---> slots on every peer p
//           slots of every peer  -> values, and part r of the input -> sum of part r -> output
//
// The first half of two_shot_lossless, for large parts of any sizes. Steps and slots: (12) in push_pipeline.cuh.
#include "device/wire/lossless.cuh"

template <class T, int N>
struct ReducescatterLossless : LosslessChunks<N> {
  using Base = LosslessChunks<N>;
  using Base::a, Base::Base, Base::place;

  __device__ void send(u32 k) const {
    for_each_tile<N, N - 1>(*this, a, k, [&](int hop, int owner, u32 j) {
      const Tile<T> mine = load_tile(part_of<T>(a.input, a, owner), this->begin(k) + j);
      send_tile<1>([&](int) { return place(hop, k, a.rank, j); }, mine, encode_lossless(mine));
    });
  }

  __device__ void receive(u32 k) const {
    const Tensor<T> input = part_of<T>(a.input, a, a.rank), output(a.output, a.count[a.rank]);
    for (u32 j = threadIdx.x / 32; j < this->count(k, a.rank); j += blockDim.x / 32) {
      const u32 tile = this->begin(k) + j;
      const Tile<T> mine = load_tile(input, tile);
      store_tile(output, tile, sum_of_tiles<N>(a.rank, mine, [&](int r) { return place(0, k, r, j); }));
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(512, 1) reducescatter_lossless(const __grid_constant__ Arguments a) {
  run_push_pipeline<N, ReducescatterLossless<T, N>>(a);
}

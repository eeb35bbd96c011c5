// allgather_lossless: every rank sends its input, compressed, to every peer.
//
//   rank r: input                    -> codes ---> slots on every peer p
//           input                    -> output, part r
//           slots of every peer p    -> values -> output, part p
//
// The second half of two_shot_lossless, for parts that may differ in size, be empty, and begin anywhere. The steps, and
// why no slot is overwritten early, are in push_pipeline.cuh, (12). The compression is in lossless.cuh. Any bits arrive
// as they were, in a time that depends on them. For large parts.
#include "device/wire/lossless_parts.cuh"

template <class T, int N>
struct AllgatherLossless : LosslessParts<N> {
  using Base = LosslessParts<N>;
  using Base::a, Base::chunks, Base::place, Base::Base;

  __device__ void send(u32 k) const {
    const Tensor<T> input(a.input, a.count[a.rank]), output = part_of<T>(a.output, a, a.rank);
    const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;
    for (u32 j = warp; j < chunks.count(k, a.rank); j += warps) {
      const u32 tile = chunks.begin(k) + j;
      const Tile<T> mine = load_tile(input, tile);
      send_tile<N - 1>([&](int i) { return place(i + 1, k, a.rank, j); }, mine, encode_lossless(mine));
      store_tile(output, tile, mine);
    }
  }

  __device__ void receive(u32 k) const {
    for_each_tile<N, N - 1>(chunks, a, k, [&](int, int owner, u32 j) {
      const LosslessTile from = place(0, k, owner, j);
      store_tile(part_of<T>(a.output, a, owner), chunks.begin(k) + j, decode_tile(from, receive_tile(from)));
    });
  }
};

template <class T, int N>
__global__ void __launch_bounds__(512, 1) allgather_lossless(const __grid_constant__ Arguments a) {
  run_push_pipeline<N, AllgatherLossless<T, N>>(a);
}

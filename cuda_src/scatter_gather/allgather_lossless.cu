// allgather_lossless: every rank sends its input, compressed, to every peer.
//
//   rank r: input                    -> codes ---> slots on every peer p
//           input                    -> output, part r
//           slots of every peer p    -> values -> output, part p
//
// The second half of two_shot_lossless, for large parts of any sizes. Steps and slots: (12) in push_pipeline.cuh.
#include "device/wire/lossless.cuh"

template <class T, int N>
struct AllgatherLossless : PartChunks<N> {
  using PartChunks<N>::a, PartChunks<N>::PartChunks;

  __device__ LosslessTile place(int hop, u32 k, int from, u32 j) const {
    return lossless_tile(j, this->length, [&](u32 at) { return this->slot(hop, k, from, at); });
  }

  __device__ void send(u32 k) const {
    const Tensor<T> input(a.input, a.count[a.rank]), output = part_of<T>(a.output, a, a.rank);
    for (u32 j = threadIdx.x / 32; j < this->count(k, a.rank); j += blockDim.x / 32) {
      const u32 tile = this->begin(k) + j;
      const Tile<T> mine = load_tile(input, tile);
      send_tile<N - 1>([&](int i) { return place(i + 1, k, a.rank, j); }, mine, encode_lossless(mine));
      store_tile(output, tile, mine);
    }
  }

  __device__ void receive(u32 k) const {
    for_each_tile<N, N - 1>(*this, a, k, [&](int, int owner, u32 j) {
      const LosslessTile from = place(0, k, owner, j);
      store_tile(part_of<T>(a.output, a, owner), this->begin(k) + j, decode_tile(from, receive_tile(from)));
    });
  }
};

template <class T, int N>
__global__ void __launch_bounds__(512, 1) allgather_lossless(const __grid_constant__ Arguments a) {
  run_push_pipeline<N, AllgatherLossless<T, N>>(a);
}

// quantized_reducescatter: every rank sends each part of its input, coded, to the part's owner, who sums them.
//
//   rank r: part p of the input  -> codes ---> slots on every rank p
//           slots of all ranks   -> values -> sum of part r -> output
//
// Each part is a message of its own, whose tiles (wire.cuh) begin at its first element: parts may differ in size, be
// empty, and begin anywhere. The sum is rounded to the dtype alone. A rank also sends to itself, ordered by barriers.
#include "device/wire/tile_chunks.cuh"

template <class T, int N, class C>
struct QuantizedReducescatter : PartChunks<N> {
  using PartChunks<N>::a;
  const Call& call;
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;

  __device__ QuantizedReducescatter(const Arguments& a, const Call& this_call)
      : PartChunks<N>(a, this_call), call(this_call) {}

  // Tiles of the earlier parts. Random bits depend on a tile's number, which continues from one part to the next.
  __device__ u64 tiles_before(int owner) const {
    u64 tiles = 0;
#pragma unroll
    for (int r = 0; r < N - 1; ++r) tiles += r < owner ? tile_count(a.count[r]) : 0;
    return tiles;
  }

  __device__ Wire<C> slot(int hop, u32 k, int from) const {
    return {reinterpret_cast<char*>(PartChunks<N>::slot(hop, k, from)), this->length};
  }

  __device__ void send(u32 k) const {
    for_each_tile<N, N>(*this, a, k, [&](int hop, int owner, u32 j) {
      const Tensor<T> part = part_of<T>(a.input, a, owner), errors = part_of<T>(a.errors, a, owner);
      const u32 tile = this->begin(k) + j;
      send_tile(slot(hop, k, a.rank), j, part, errors, tile, tiles_before(owner) + tile, {a.seed, call.epoch, a.rank});
    });
  }

  __device__ void receive(u32 k) const {
    const Tensor<T> output(a.output, a.count[a.rank]);
    for (u32 j = warp; j < this->count(k, a.rank); j += warps) {
      float total[tile_rows][run_numel];
      sum_of_slots<C, N>([&](int r) { return slot(0, k, r); }, j, total);
      store_tile(output, this->begin(k) + j, {}, [&](Tile<T>& t, int row) { t.round(row, total[row]); });
    }
  }
};

template <class T, int N, class C>
__global__ void __launch_bounds__(512, 1) quantized_reducescatter(const __grid_constant__ Arguments a) {
  run_push_pipeline<N, QuantizedReducescatter<T, N, C>>(a);
}

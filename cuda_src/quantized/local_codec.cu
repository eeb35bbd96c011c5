// local_codec_encode and local_codec_sum: a codec on one GPU, where torch.distributed moves what is encoded.
//
//   local_codec_encode   tensor -> codes -> wire, and with feedback rounding errors -> tensor
//   local_codec_sum      messages, in the order of ranks -> values -> sum, rounded to T -> tensor
//                        if it encodes: the sum -> codes -> wire, and -> values -> tensor
//
// A warp has a tile at a time. They wait for no rank, so any number of blocks will do.
#include "device/wire/wire.cuh"

// CodecArguments in graphar/runtime/bind/local_codec.py mirrors it.
struct CodecArguments {
  void* tensor;          // at any alignment
  char* wire;            // to write; aligned to 16 bytes, as each message
  const char* messages;  // to add, each `pitch` bytes after the one before
  u64 pitch;
  u64 numel;       // of the tensor
  u64 first_tile;  // the number of its first tile for random bits
  u64 seed;
  u32 count;  // of messages
  u32 call;
  u32 source;
};
static_assert(sizeof(CodecArguments) == 72);

template <class F>
DEVICE void for_each_tile_of(u32 tiles, const F& f) {
  const u32 warps = blockDim.x / 32;
  for (u32 tile = blockIdx.x * warps + threadIdx.x / 32; tile < tiles; tile += gridDim.x * warps) f(tile);
}

template <class T, class C>
__global__ void __launch_bounds__(256) local_codec_encode(const __grid_constant__ CodecArguments a) {
  wait_for_previous_kernel();
  const Tensor<T> tensor(a.tensor, a.numel);
  const Wire<C> wire{a.wire, tile_count(a.numel)};
  for_each_tile_of(wire.tiles, [&](u32 tile) {
    const Tile<T> mine = load_tile(tensor, tile);
    const Coded<C> coded = encode<C>(mine, a.first_tile + tile, {a.seed, a.call, a.source});
    visit_coded(wire, tile, coded, Store{});
    if constexpr (C::feedback) store_error(tensor, tile, mine, coded);
  });
}

template <class T, class C, bool Encodes>
__global__ void __launch_bounds__(256) local_codec_sum(const __grid_constant__ CodecArguments a) {
  wait_for_previous_kernel();
  const Tensor<T> tensor(a.tensor, a.numel);
  const u32 tiles = tile_count(a.numel);
  for_each_tile_of(tiles, [&](u32 tile) {
    float total[tile_rows][run_numel];
    const auto take = [&](u32 message, bool adds) {
      Received<C> part;
      visit_received(Wire<C>{const_cast<char*>(a.messages) + message * a.pitch, tiles}, tile, part, Load{});
#pragma unroll
      for (int j = 0; j < tile_rows; ++j) part.decode(j, total[j], adds);
    };
    take(0, false);
#pragma unroll 1
    for (u32 message = 1; message < a.count; ++message) take(message, true);
    if constexpr (Encodes) {
      const Coded<C> coded = encode<C>(tile_of(total), a.first_tile + tile, {a.seed, a.call, noise_of_sum});
      visit_coded(Wire<C>{a.wire, tiles}, tile, coded, Store{});
      store_values(tensor, tile, as_received(coded));
    } else {
      store_tile(tensor, tile, {}, [&](Tile<T>& t, int row) { t.round(row, total[row]); });
    }
  });
}

// Codecs alone, for one warp: what a rank sends for a whole tensor, and what a wire decodes to.
#include "device/wire/wire.cuh"

template <class C, class T>
void encode_tensor(Arguments a) {
  const Tensor<T> input(a.input, a.numel);
  const Wire<C> wire{static_cast<char*>(a.output), tile_count(a.numel)};
  const Noise noise{a.seed, a.counters->epoch_state[0].epoch, a.rank};
  wait_for_previous_kernel();
  for (u32 tile = 0; tile < wire.tiles; ++tile) {
    const Coded<C> coded = encode<C>(load_tile(input, tile), tile, noise);
    visit_coded(wire, tile, coded, [](auto* to, const u32* words) { std::memcpy(to, words, sizeof *to); });
  }
}

// The rounding error of a codec.
template <class C, class T>
void error_of_tensor(Arguments a) {
  const Tensor<T> input(a.input, a.numel), output(a.output, a.numel);
  const Noise noise{a.seed, a.counters->epoch_state[0].epoch, a.rank};
  wait_for_previous_kernel();
  for (u32 tile = 0; tile < tile_count(a.numel); ++tile) {
    const Tile<T> mine = load_tile(input, tile);
    store_error(output, tile, mine, encode<C>(mine, tile, noise));
  }
}

template <class C, class T>
void decode_tensor(Arguments a) {
  const Tensor<T> output(a.output, a.numel);
  const Wire<C> wire{static_cast<char*>(const_cast<void*>(a.input)), tile_count(a.numel)};
  wait_for_previous_kernel();
  for (u32 tile = 0; tile < wire.tiles; ++tile) {
    Received<C> received;
    visit_received(wire, tile, received, [](const auto* from, u32* words) { std::memcpy(words, from, sizeof *from); });
    store_values(output, tile, received);
  }
}

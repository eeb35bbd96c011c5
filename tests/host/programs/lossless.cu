// Lossless compression alone, for one warp: what a rank sends for a whole tensor, to several slots, and what a slot
// decodes to.
#include "device/wire/lossless.cuh"

LosslessTile tile_of_slot(const void* slot, u32 tiles, u32 tile) {
  return lossless_tile(tile, tiles, [&](u32 at) { return static_cast<Pack*>(const_cast<void*>(slot)) + at; });
}

template <int Slots>
void send_tensor(Arguments a) {
  const Tensor<bf16> input(a.input, a.numel);
  const u32 tiles = tile_count(a.numel), slot_nbytes = tiles * (tile_numel * 2 + header_words * 4);
  char* const slots = static_cast<char*>(a.output);
  wait_for_previous_kernel();
  if (lane() == 0) std::memset(slots, 0, Slots * slot_nbytes);
  __syncwarp();
  for (u32 tile = 0; tile < tiles; ++tile) {
    const Tile<bf16> mine = load_tile(input, tile);
    send_tile<Slots>([&](int i) { return tile_of_slot(slots + i * slot_nbytes, tiles, tile); }, mine,
                     encode_lossless(mine));
  }
}

void receive_tensor(Arguments a) {
  const Tensor<bf16> output(a.output, a.numel);
  const u32 tiles = tile_count(a.numel);
  wait_for_previous_kernel();
  for (u32 tile = 0; tile < tiles; ++tile) {
    const LosslessTile from = tile_of_slot(a.input, tiles, tile);
    store_tile(output, tile, decode_tile(from, receive_tile(from)));
  }
}

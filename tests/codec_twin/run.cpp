// Codecs on the host: encodes and decodes whole tensors, tile by tile, and does what an all-reduce does between.
// ENTRIES is a list of ENTRY(codec, element type).
#include "wire.cuh"

template <class C>
void store(const Wire<C>& wire, u32 tile, Coded<C> coded) {
  visit_coded(wire, tile, coded, [](auto* to, const u32* words) { std::memcpy(to, words, sizeof *to); });
}

template <class C>
Received<C> load(const Wire<C>& wire, u32 tile) {
  Received<C> received;
  visit_received(wire, tile, received, [](const auto* from, u32* words) { std::memcpy(words, from, sizeof *from); });
  return received;
}

struct Call {
  u64 numel;
  const void* const* inputs;
  u64 ranks;
  char* const* wires;  // of every rank, then of the sum
  void* output;
  u64 seed, call;
};

template <class C, class T>
void allreduce(const Call& c) {
  const u32 tiles = tile_count(c.numel);
  const Tensor<T> output(c.output, c.numel);
  for (u32 tile = 0; tile < tiles; ++tile) {
    warp.run([&] {
      Tile<fp32> total;
      for (u32 r = 0; r < c.ranks; ++r) {
        const Wire<C> wire{c.wires[r], tiles};
        store(wire, tile, encode<C>(load_tile(Tensor<T>(c.inputs[r], c.numel), tile), tile, {c.seed, u32(c.call), r}));
        __any_sync(all_lanes, 0);
        const Received<C> received = load(wire, tile);
        for (int j = 0; j < rows; ++j) {
          float v[run];
          std::memcpy(v, total.word[j], sizeof v);
          r ? received.template decode<true>(j, v) : received.template decode<false>(j, v);
          std::memcpy(total.word[j], v, sizeof v);
        }
      }
      const Wire<C> wire{c.wires[c.ranks], tiles};
      store(wire, tile, encode<C>(total, tile, {c.seed, u32(c.call), noise_of_sum}));
      __any_sync(all_lanes, 0);
      const Received<C> received = load(wire, tile);
      for (int j = 0; j < rows; ++j) {
        float v[run];
        received.template decode<false>(j, v);
        store_row(output, tile, j, v);
      }
    });
  }
}

template <class Function>
struct ArgumentOf;
template <class C>
struct ArgumentOf<void(C)> {
  using Type = C;
};

#define ENTRY(C, T) &allreduce<ArgumentOf<void C>::Type, T>,
static void (*const entries[])(const Call&) = {
#include "entries.inc"
};

extern "C" void run_codec(int entry, const Call* c) { entries[entry](*c); }

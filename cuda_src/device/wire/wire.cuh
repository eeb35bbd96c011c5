// Tiles of a tensor as a warp codes them, and the layout of their codes and scales on the wire.
//
//   tile, 1024 elements:     row j, lane l  ->  elements 256 j + 8 l .. + 7  (one pack of 16-bit elements, two of fp32)
//   bucket, 32 .. 1024:      4 .. 32 lanes of one row; from 512 on, all lanes of 2 or 4 rows
//   wire:                    codes of tile 0, 1, ... | scales of tile 0, 1, ...
//   codes of a tile:         words 0 .. 3 of all lanes | words 4 .. 7 of all lanes | ...  (codec_reference.py)
//
// Accesses fill whole lines of 128 bytes. All 32 lanes of a warp take part: after three shuffles each of four lanes has
// the largest value of one of their four rows, and computes the scale of that row's bucket for the others.
#pragma once
#include "device/wire/codec.cuh"

constexpr int tile_rows = 4;
constexpr int row_numel = 32 * run_numel;
constexpr int tile_numel = tile_rows * row_numel;

DEVICE u32 tile_count(u64 numel) { return (numel + tile_numel - 1) / tile_numel; }

// Of a lane.
template <class T>
struct Tile {
  static constexpr int packs = run_numel / elements_per_pack<T>;
  static constexpr int words = 4 * packs;
  u32 word[tile_rows][words];

  DEVICE void unpack(int j, float (&v)[run_numel]) const {
    for (int w = 0; w < words; ++w) T::unpack(word[j][w], v + w * elements_per_word<T>);
  }
  DEVICE void round(int j, const float (&v)[run_numel]) {
    for (int w = 0; w < words; ++w) word[j][w] = T::round(v + w * elements_per_word<T>);
  }
};

DEVICE Tile<fp32> tile_of(const float (&v)[tile_rows][run_numel]) {
  Tile<fp32> t;
  for (int j = 0; j < tile_rows; ++j) t.round(j, v[j]);
  return t;
}

// The index in the tensor of pack p of a lane's packs of a tile.
template <class T>
DEVICE u64 pack_of(u64 tile, int p) {
  constexpr int packs = Tile<T>::packs;
  return ((tile * tile_rows + p / packs) * 32 + lane()) * packs + p % packs;
}

// Loads a pack that is not whole, or not aligned. Past the end it reads as the tensor's last element.
template <class T>
__device__ __noinline__ Pack load_filled(const typename T::Storage* x, u64 numel, u64 first) {
  constexpr int E = elements_per_word<T>;
  Pack p = {};
  for (int e = 0; e < 4 * E; ++e) p.word[e / E] |= u32(x[min(first + e, numel - 1)]) << 16 * (e % E);
  return p;
}

// Whether all packs of a tile may move as 16 bytes: one branch of the whole warp, so that all loads are in flight.
template <class T>
DEVICE bool is_whole(const Tensor<T>& x, u64 tile) {
  return (tile + 1) * (tile_numel / elements_per_pack<T>) <= x.whole;
}

// (24) A tile may be overwritten in place, by sums, by a gathered part or by rounding errors. A lane stores only what
//      it has loaded itself, but lanes past the end have also loaded the last element, which another lane stores.
//      Shuffles and votes in between order no accesses. So the loads of a tile that is not whole end with __syncwarp.
//      Whole tiles need no barrier. The warp that stores a tile has loaded it, or a barrier of the block lies between.
template <class T>
DEVICE Tile<T> load_tile(const Tensor<T>& x, u64 tile) {
  const bool whole = is_whole(x, tile);
  Pack pack[tile_rows * Tile<T>::packs];
  if (whole) {
    for (int p = 0; p < tile_rows * Tile<T>::packs; ++p)
      pack[p] = reinterpret_cast<const Pack*>(x.base)[pack_of<T>(tile, p)];
  } else {
    for (int p = 0; p < tile_rows * Tile<T>::packs; ++p)
      pack[p] = load_filled<T>(x.base, x.numel, pack_of<T>(tile, p) * elements_per_pack<T>);
    __syncwarp();  // (24)
  }
  Tile<T> t;
  for (int p = 0; p < tile_rows * Tile<T>::packs; ++p)
    for (int w = 0; w < 4; ++w) t.word[p / Tile<T>::packs][p % Tile<T>::packs * 4 + w] = pack[p].word[w];
  return t;
}

// Loads a tile of what a codec rounds: of x or, with feedback, of x + the errors of earlier calls, rounded to T.
template <class C, class T>
DEVICE Tile<T> load_values(const Tensor<T>& x, const Tensor<T>& errors, u64 tile) {
  Tile<T> t = load_tile(x, tile);
  if constexpr (C::feedback) {
    const Tile<T> left = load_tile(errors, tile);
    for (int j = 0; j < tile_rows; ++j) {
      float v[run_numel], error[run_numel];
      t.unpack(j, v);
      left.unpack(j, error);
      for (int e = 0; e < run_numel; ++e) v[e] = __fadd_rn(v[e], error[e]);
      t.round(j, v);
    }
  }
  return t;
}

// Stores the elements of a tile that lie in the tensor. `set_row(t, j)` sets row j before it is stored.
template <class T, class SetRow>
DEVICE void store_tile(const Tensor<T>& y, u64 tile, Tile<T> t, const SetRow& set_row) {
  const bool whole = is_whole(y, tile);
#pragma unroll
  for (int p = 0; p < tile_rows * Tile<T>::packs; ++p) {
    const int j = p / Tile<T>::packs, first = p % Tile<T>::packs * 4;
    if (first == 0) set_row(t, j);
    const Pack pack = {{t.word[j][first], t.word[j][first + 1], t.word[j][first + 2], t.word[j][first + 3]}};
    const u64 i = pack_of<T>(tile, p);
    if (whole)
      reinterpret_cast<Pack*>(y.base)[i] = pack;
    else if (i * elements_per_pack<T> < y.numel)
      y.store(i, pack);
  }
}
template <class T>
DEVICE void store_tile(const Tensor<T>& y, u64 tile, const Tile<T>& t) {
  store_tile(y, tile, t, [](Tile<T>&, int) {});
}

template <class C>
struct WireLayout {
  static constexpr int rows_of_bucket = C::bucket > row_numel ? C::bucket / row_numel : 1;
  static constexpr int lanes_of_bucket = C::bucket > row_numel ? 32 : C::bucket / run_numel;
  static constexpr int entries = tile_numel / C::bucket;  // an entry is a scale, and the zero point if there is one
  static constexpr int entry_nbytes = sizeof(typename C::Scale::Storage) * (C::scheme == minmax ? 2 : 1);
  static constexpr int scales_nbytes = entries * entry_nbytes < 4 ? 4 : entries * entry_nbytes;
  static constexpr int codes_nbytes = tile_numel / 8 * C::bits;
  static constexpr int lane_entries = tile_rows / rows_of_bucket;  // of a lane's own elements; they are neighbours
  static constexpr int lane_words = lane_entries * entry_nbytes < 4 ? 1 : lane_entries * entry_nbytes / 4;

  // The first entry of the lane's own elements, and the entry whose scale the lane computes, and perhaps sends.
  static DEVICE int first_entry() { return lane() / lanes_of_bucket * lane_entries; }
  static DEVICE int entry() { return first_entry() + lane() % 4 / rows_of_bucket; }
  static DEVICE bool sends_entry() { return lane() % lanes_of_bucket < 4 && lane() % rows_of_bucket == 0; }
};

// The largest value of the bucket whose scale this lane computes. `flip` changes the signs of the values before.
template <class C, Largest what, class T>
DEVICE float largest_of_bucket(const Tile<T>& t, u32 flip) {
  u32 value[tile_rows];
  for (int j = 0; j < tile_rows; ++j) {
    value[j] = t.word[j][0] ^ flip;
    for (int w = 1; w < Tile<T>::words; ++w) value[j] = larger_of<T, what>(value[j], t.word[j][w] ^ flip);
  }
  u32 v = largest_of_four_lanes<T, what>(value);
  for (int mask = 4; mask < WireLayout<C>::lanes_of_bucket; mask *= 2) v = largest_of_lanes<T, what>(v, v, mask);
  for (int mask = 1; mask < WireLayout<C>::rows_of_bucket; mask *= 2) v = largest_of_lanes<T, what>(v, v, mask);
  return largest_of_word<T, what>(v);
}

template <class C, class T>
DEVICE typename C::Range range_of_bucket(const Tile<T>& t) {
  if constexpr (C::scheme == absmax) return C::range(largest_of_bucket<C, magnitudes>(t, 0), 0);
  constexpr u32 signs = elements_per_word<T> == 2 ? 0x80008000u : 0x80000000u;
  const float smallest = __fsub_rn(0, largest_of_bucket<C, values>(t, signs));  // a zero is positive
  return C::range(largest_of_bucket<C, values>(t, 0), smallest);
}

// What a lane sends: its codes, and the scale and zero point that it computed.
template <class C>
struct Coded {
  u32 code[C::bits];
  u32 scale, zero;
};

template <class C, class T>
DEVICE Coded<C> encode(Tile<T> t, u64 tile, const Noise& noise) {
  const typename C::Range mine = range_of_bucket<C>(t);
  float inverse[tile_rows], low[tile_rows];
  for (int j = 0; j < tile_rows; ++j) {
    inverse[j] = __shfl_sync(all_lanes, mine.inverse, j, 4);
    low[j] = C::scheme == minmax ? __shfl_sync(all_lanes, mine.low, j, 4) : 0;
  }
  if (__any_sync(all_lanes, mine.inverse == 0)) {  // NaN and infinities must not reach the words of other rows
    for (int j = 0; j < tile_rows; ++j)
      for (int w = 0; w < Tile<T>::words; ++w)
        if (inverse[j] == 0) t.word[j][w] = 0;
  }
  Coded<C> coded{{}, mine.scale, mine.zero};
#pragma unroll
  for (int j = 0; j < tile_rows; ++j) {
    float v[run_numel];
    t.unpack(j, v);
    if (C::scheme == minmax) {
      for (int e = 0; e < run_numel; ++e) v[e] = __fsub_rn(v[e], low[j]);
    }
    u32 random[4];
    if (C::rounding == stochastic) random_halves(noise, (tile * tile_rows + j) * 32 + lane(), random);
    C::Code::template encode<C::scheme, C::rounding>(v, inverse[j], random, j, coded.code);
  }
  return coded;
}

// What a lane receives: its codes, and the scales and zero points of its four rows.
template <class C>
struct Received {
  u32 code[C::bits];
  u32 entry[WireLayout<C>::lane_words];

  DEVICE float number_at(int index) const {
    constexpr int in_word = 4 / sizeof(typename C::Scale::Storage);
    const u32 word = entry[index / in_word];
    return number(typename C::Scale{}, in_word == 1 ? word : index % 2 ? word >> 16 : word & 0xffff);
  }

  DEVICE void decode(int j, float (&v)[run_numel], bool add = false) const {
    constexpr int numbers = C::scheme == minmax ? 2 : 1;
    const int index = j / WireLayout<C>::rows_of_bucket * numbers;
    C::decode(code, j, number_at(index), C::scheme == minmax ? number_at(index + 1) : 0, v, add);
  }
};

// Sets row j of a tile, for a codec that has_bf16_products.
template <class C>
DEVICE void set_row_of_products(Tile<bf16>& t, int j, const Received<C>& received) {
  constexpr u32 minus_zeros = 0x80008000;  // leave a product as it is
  const int index = j / WireLayout<C>::rows_of_bucket;
  u32 scale = __byte_perm(received.entry[index / 2], 0, index % 2 ? 0x3232 : 0x1010);
  if (C::Code::divisor != bf16_ones) scale = fma_bf16x2(scale, C::Code::divisor, minus_zeros);
  for (int w = 0; w < 4; ++w)
    t.word[j][w] = fma_bf16x2(C::Code::decode_pair(received.code, j, w), scale, minus_zeros);
}

template <class C, class T>
DEVICE void store_values(const Tensor<T>& y, u64 tile, const Received<C>& received) {
  store_tile(y, tile, {}, [&](Tile<T>& t, int j) {
    if constexpr (has_bf16_products<C, T>) {
      set_row_of_products(t, j, received);
    } else {
      float v[run_numel];
      received.decode(j, v);
      t.round(j, v);
    }
  });
}

// What a lane's own codes decode to. The lanes exchange their scales.
template <class C>
DEVICE Received<C> as_received(const Coded<C>& coded) {
  using L = WireLayout<C>;
  constexpr int numbers = C::scheme == minmax ? 2 : 1, in_word = 4 / sizeof(typename C::Scale::Storage);
  Received<C> received;
  for (int w = 0; w < C::bits; ++w) received.code[w] = coded.code[w];
  for (int i = 0; i < numbers * L::lane_entries; ++i) {
    const u32 mine = i % numbers ? coded.zero : coded.scale;
    const u32 number = __shfl_sync(all_lanes, mine, i / numbers * L::rows_of_bucket, 4);
    received.entry[i / in_word] = i % in_word ? received.entry[i / in_word] | number << 16 : number;
  }
  return received;
}

// Error feedback: stores value - decoded, rounded to T, of a tile's values; 0 in a bucket that became NaN.
template <class C, class T>
DEVICE void store_error(const Tensor<T>& to, u64 tile, const Tile<T>& t, const Coded<C>& coded) {
  const Received<C> received = as_received(coded);
  store_tile(to, tile, t, [&](Tile<T>& left, int j) {
    float v[run_numel], decoded[run_numel];
    left.unpack(j, v);
    received.decode(j, decoded);
    for (int e = 0; e < run_numel; ++e) v[e] = decoded[e] == decoded[e] ? __fsub_rn(v[e], decoded[e]) : 0;
    left.round(j, v);
  });
}

// A message of `tiles` tiles, which begins at `base`.
template <class C>
struct Wire {
  char* base;
  u32 tiles;

  DEVICE char* codes(u32 tile) const { return base + u64(tile) * WireLayout<C>::codes_nbytes; }
  DEVICE char* scales(u32 tile) const {
    return base + u64(tiles) * WireLayout<C>::codes_nbytes + u64(tile) * WireLayout<C>::scales_nbytes;
  }
};

// Calls `visit(address, words)` for every piece that this lane receives of a tile.
template <class C, class Visit>
DEVICE void visit_received(const Wire<C>& wire, u32 tile, Received<C>& received, Visit visit) {
  using L = WireLayout<C>;
  visit_pieces(wire.codes(tile), 128, lane(), received.code, visit);
  visit_pieces(wire.scales(tile) + L::first_entry() * L::entry_nbytes, 4, 0, received.entry, visit);
}

// The same for every piece that this lane sends of a tile: its codes, and from some lanes scales.
template <class C, class Visit>
DEVICE void visit_coded(const Wire<C>& wire, u32 tile, const Coded<C>& coded, Visit visit) {
  using L = WireLayout<C>;
  visit_pieces(wire.codes(tile), 128, lane(), coded.code, visit);
  char* const at = wire.scales(tile) + L::entry() * L::entry_nbytes;
  if constexpr (L::entry_nbytes == 8) {
    const u32 both[2] = {coded.scale, coded.zero};
    if (L::sends_entry()) visit(reinterpret_cast<Words<2>*>(at), both);
  } else if constexpr (L::entry_nbytes == 4) {
    const u32 word = coded.scale | (C::scheme == minmax ? coded.zero << 16 : 0);
    if (L::sends_entry()) visit(reinterpret_cast<Words<1>*>(at), &word);
  } else {
    u32 next = 0;  // two lanes' scales make a word
    if constexpr (L::entries > 1) next = __shfl_xor_sync(all_lanes, coded.scale, L::rows_of_bucket);
    const u32 word = coded.scale | next << 16;
    if (L::sends_entry() && L::entry() % 2 == 0) visit(reinterpret_cast<Words<1>*>(at), &word);
  }
}

// Adds the values of ranks from `First` on to `total`, in rank order, in fp32. `fetch` gets a batch of codes, or fails.
template <class C, int N, int First = 0, class Fetch>
DEVICE bool sum_of_parts(const Fetch& fetch, float (&total)[tile_rows][run_numel]) {
  // A warp has the codes of as many ranks in flight as registers allow, in batches of equal size.
  constexpr int fitting = 40 / (C::bits + WireLayout<C>::lane_words), most = fitting < 4 ? fitting : 4;
  constexpr int batches = (N + most - 1) / most, size = (N + batches - 1) / batches;
  constexpr int count = N - First < size ? N - First : size;
  Received<C> part[count];
  if (!fetch(First, part)) return false;
#pragma unroll
  for (int r = 0; r < count; ++r)
    for (int j = 0; j < tile_rows; ++j) part[r].decode(j, total[j], First + r > 0);
  if constexpr (First + count < N)
    return sum_of_parts<C, N, First + count>(fetch, total);
  else
    return true;
}

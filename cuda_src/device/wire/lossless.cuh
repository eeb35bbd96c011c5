// Lossless compression of bf16 tiles (wire.cuh) to 12 bits an element, and its layout on the wire.
//
// Most exponents of a row, 256 elements, are within 14 of the row's largest. A lane's 8 elements of a row are 3 words:
//
//   word 0, 1    a byte an element: its sign and mantissa
//   word 2       4 bits an element: the row's largest exponent minus its own, up to 14; 15: exponent 0, as in zeros
//
// All other elements are odd: their exponents are in the tile's header of 32 bytes, with the rows' largest exponents,
// the number of odd elements and the index of each. A tile with more odd elements than fit there is sent uncompressed.
//
//   slot: 2048 bytes for each tile (codes fill 1536) | 32 bytes for each tile: headers
#pragma once
#include "device/wire/tile_chunks.cuh"

constexpr u32 header_words = 8;
constexpr u32 most_odd = header_words - 2;
constexpr u32 as_it_is = 0xffffffffu;  // instead of the number of odd elements: the tile is uncompressed

struct LosslessTile {
  char* codes;
  u32* header;
};

// The places of tile `tile` in a slot of `tiles`, whose pack `i` is at `pack(i)`.
template <class At>
DEVICE LosslessTile lossless_tile(u32 tile, u32 tiles, At pack) {
  constexpr u32 of_codes = tile_numel * 2 / sizeof(Pack), of_header = header_words * sizeof(u32) / sizeof(Pack);
  return {reinterpret_cast<char*>(pack(tile * of_codes)),
          reinterpret_cast<u32*>(pack(tiles * of_codes + tile * of_header))};
}

// A lane's words of a coded tile.
struct LosslessCodes {
  u32 word[tile_rows * 3];
  u32 largest;  // a byte for each row
  u32 odd;      // a bit for each of the lane's elements; in a received tile, the number of odd elements
};

// A byte of each of four elements, which are two in `low` and two in `high`: exponents, and signs and mantissas.
DEVICE u32 exponents_of(u32 low, u32 high) { return __byte_perm(low << 1, high << 1, 0x7531); }
DEVICE u32 rests_of(u32 low, u32 high) {
  return choose_bits(0x80808080, __byte_perm(low, high, 0x7531), __byte_perm(low, high, 0x6420));
}

// Sets the highest bit of each byte that is at least `Least`, from 1 to 128, and no other bit.
template <u32 Least>
DEVICE u32 bytes_from(u32 bytes) {
  return (((bytes & 0x7f7f7f7f) + (0x80 - Least) * 0x01010101) | bytes) & 0x80808080;
}

// The largest exponent of a row over all lanes, in each byte, from the largest magnitude, whose highest bits it is.
DEVICE u32 largest_exponent(const u32 (&word)[4]) {
  const u32 pair = larger_magnitude(bf16{}, larger_magnitude(bf16{}, word[0], word[1]),
                                    larger_magnitude(bf16{}, word[2], word[3]));
  return __byte_perm(__reduce_max_sync(all_lanes, max(pair << 1, pair << 17)), 0, 0x3333);
}

DEVICE LosslessCodes encode_lossless(const Tile<bf16>& t) {
  LosslessCodes c = {};
  for (int j = 0; j < tile_rows; ++j) {
    const u32 largest = largest_exponent(t.word[j]);
    c.largest |= largest & 0xff << 8 * j;
    u32 exponent[2], offset[2], far[2];
    for (int h = 0; h < 2; ++h) {
      exponent[h] = exponents_of(t.word[j][2 * h], t.word[j][2 * h + 1]);
      offset[h] = largest - exponent[h];
      far[h] = bytes_from<15>(offset[h]);
      c.word[3 * j + h] = rests_of(t.word[j][2 * h], t.word[j][2 * h + 1]);
    }
    if (far[0] | far[1]) {
      for (int h = 0; h < 2; ++h) {
        const u32 odd = far[h] & bytes_from<1>(exponent[h]);
        c.odd |= (odd >> 7) * 0x10204080 >> 28 << (run_numel * j + 4 * h);  // the four bits, side by side
        offset[h] = choose_bits(spread_signs(far[h]), 0x0f0f0f0f, offset[h]);
      }
    }
    c.word[3 * j + 2] = offset[0] + offset[1] * 16;
  }
  return c;
}

// Decodes all elements but the odd ones, whose exponents read as 0.
DEVICE Tile<bf16> decode_lossless(const LosslessCodes& c) {
  Tile<bf16> t;
  for (int j = 0; j < tile_rows; ++j) {
    const u32 largest = __byte_perm(c.largest, 0, 0x1111 * j);
    for (int h = 0; h < 2; ++h) {
      const u32 offset = c.word[3 * j + 2] >> 4 * h & 0x0f0f0f0f, rest = c.word[3 * j + h];
      const u32 exponent = (largest - offset) & ~spread_signs(offset + 0x71717171);  // 0 where the offset is 15
      const u32 low = choose_bits(0x80808080, exponent << 7, rest);
      const u32 high = choose_bits(0x80808080, rest, exponent >> 1);
      t.word[j][2 * h] = __byte_perm(low, high, 0x5140);
      t.word[j][2 * h + 1] = __byte_perm(low, high, 0x7362);
    }
  }
  return t;
}

template <int Count>
DEVICE void store_pieces(char* at, const u32 (&word)[Count]) {
  for (int p = 0; p < Count / 4; ++p)
    reinterpret_cast<Pack*>(at)[p * 32 + lane()] = {
        {word[4 * p], word[4 * p + 1], word[4 * p + 2], word[4 * p + 3]}};
}

template <int Count>
DEVICE void load_pieces(const char* at, u32 (&word)[Count]) {
  for (int p = 0; p < Count / 4; ++p) {
    const Pack pack = reinterpret_cast<const Pack*>(at)[p * 32 + lane()];
    for (int w = 0; w < 4; ++w) word[4 * p + w] = pack.word[w];
  }
}

// A lane's words of a tile.
using TileWords = u32[tile_rows * 4];

DEVICE u32 word_of(const Tile<bf16>& t, u32 index) {
  u32 word = 0;
#pragma unroll
  for (int w = 0; w < 4 * tile_rows; ++w) word = w == index ? t.word[w / 4][w % 4] : word;
  return word;
}

// Sends a tile with odd elements. Kept short rather than fast.
DEVICE void send_odd(const LosslessTile& to, const Tile<bf16>& t, const LosslessCodes& c) {
  u32 before = 0, total = 0;
#pragma unroll 1
  for (int l = 0; l < 32; ++l) {
    const u32 count = __shfl_sync(all_lanes, u32(__popc(c.odd)), l);
    before += l < lane() ? count : 0;
    total += count;
  }
  if (lane() == 0) {
    to.header[0] = c.largest;
    to.header[1] = total > most_odd ? as_it_is : total;
  }
  if (total > most_odd) return store_pieces(to.codes, reinterpret_cast<const TileWords&>(t.word[0][0]));
  store_pieces(to.codes, c.word);
#pragma unroll 1
  for (u32 rest = c.odd; rest; rest &= rest - 1) {
    const u32 i = __ffs(rest) - 1;
    const u32 exponent = word_of(t, i / 2) >> (7 + i % 2 * 16) & 0xff;
    to.header[2 + before++] = lane() | i << 5 | exponent << 16;
  }
}

DEVICE void send_even(const LosslessTile& to, const LosslessCodes& c) {
  store_pieces(to.codes, c.word);
  if (lane() == 0) *reinterpret_cast<Words<2>*>(to.header) = {{c.largest, 0}};
}

// Sends a tile to the places `to(0)` .. `to(Count - 1)`.
template <int Count, class To>
DEVICE void send_tile(To to, const Tile<bf16>& t, const LosslessCodes& c) {
  if (__any_sync(all_lanes, c.odd != 0)) {
#pragma unroll 1
    for (int i = 0; i < Count; ++i) send_odd(to(i), t, c);
  } else {
#pragma unroll
    for (int i = 0; i < Count; ++i) send_even(to(i), c);
  }
}

DEVICE LosslessCodes receive_tile(const LosslessTile& from) {
  LosslessCodes c;
  load_pieces(from.codes, c.word);
  const Words<2> header = *reinterpret_cast<const Words<2>*>(from.header);
  c.largest = header.word[0];
  c.odd = header.word[1];
  return c;
}

DEVICE Tile<bf16> decode_tile(const LosslessTile& from, const LosslessCodes& c) {
  Tile<bf16> t = decode_lossless(c);
  if (c.odd == as_it_is) {
    load_pieces(from.codes, reinterpret_cast<TileWords&>(t.word[0][0]));
  } else {
    const u32 odd = min(c.odd, most_odd);  // at most as many as fit, whatever other ranks sent
#pragma unroll 1
    for (u32 k = 0; k < odd; ++k) {
      const u32 entry = from.header[2 + k], i = entry >> 5 & 31;
      if ((entry & 31) != lane()) continue;
      const u32 exponent = entry >> 16 << (7 + i % 2 * 16);
      for (int w = 0; w < 4 * tile_rows; ++w) t.word[w / 4][w % 4] |= w == i / 2 ? exponent : 0;
    }
  }
  return t;
}

DEVICE void add(float (&total)[tile_rows][run_numel], const Tile<bf16>& t, bool is_first) {
  for (int j = 0; j < tile_rows; ++j) {
    float v[run_numel];
    t.unpack(j, v);
    for (int e = 0; e < run_numel; ++e) total[j][e] = is_first ? v[e] : __fadd_rn(total[j][e], v[e]);
  }
}

// The sum of this rank's tile and of the one at `from(r)` of every other rank r: in rank order, in fp32, rounded once.
template <int N, class From>
DEVICE Tile<bf16> sum_of_tiles(int rank, const Tile<bf16>& mine, From from) {
  constexpr int batch = 3;  // ranks whose tiles a warp has in flight
  float total[tile_rows][run_numel];
#pragma unroll
  for (int first = 0; first < N; first += batch) {
    LosslessCodes part[batch] = {};
    for (int r = first; r < first + batch && r < N; ++r)
      if (r != rank) part[r - first] = receive_tile(from(r));
#pragma unroll
    for (int r = first; r < first + batch && r < N; ++r)
      add(total, r == rank ? mine : decode_tile(from(r), part[r - first]), r == 0);
  }
  Tile<bf16> sum;
  for (int j = 0; j < tile_rows; ++j) sum.round(j, total[j]);
  return sum;
}

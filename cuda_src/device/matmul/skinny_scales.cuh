// The scales of a skinny matmul of e4m3 operands, and its products in the order of scaled_products.cuh (sm_90a only).
//
// The operands are swapped: a row of the sums is a row of W, and a column of them is a row of A. So the scale of a row
// of A is that of a column, and the 64 rows of a tile have one scale of a block of W. The lanes of a warp load the scales
// of A between them, and shuffle each to those that need it.
#pragma once
#include "device/matmul/scaled_products.cuh"

// Scales of the rows of A, of all of K or of `Blocks` blocks: that of row r in block b is number b * Tile::columns + r,
// and a lane has every 32nd.
template <class Tile, int Blocks>
struct ScalesOfA {
  static constexpr int count = (Blocks * Tile::columns + 31) / 32;
  float of_lane[count];

  __device__ static u32 number(int i) { return 32 * i + threadIdx.x % 32; }

  __device__ __forceinline__ void load(const ScaledMatmulArguments& m, u32 first, u32 blocks) {
#pragma unroll
    for (int i = 0; i < count; ++i) {  // rows and blocks outside A take any scale
      const u32 row = min(number(i) % Tile::columns, m.m - 1), block = min(first + number(i) / Tile::columns, blocks - 1);
      of_lane[i] = m.a_scale[row * m.a_scale_row + block * m.a_scale_block];
    }
  }

  // By a warp: calls `visit` for each of this thread's columns, with its scale in a block and the index of its first
  // sum. That of the sum eight rows below is larger by two.
  template <class Visit>
  __device__ __forceinline__ void visit(int block, const Visit& visit) const {
#pragma unroll
    for (int pair = 0; pair < Tile::columns / 4; ++pair) {
      const int eight = block * (Tile::columns / 8) + pair / 2;
      const u32 lane = eight % 4 * 8 + threadIdx.x % 4 * 2 + pair % 2;
      visit(__shfl_sync(0xffffffff, of_lane[eight / 4], lane), pair / 2 * 4 + pair % 2);
    }
  }
};

// The scales of a tile whose first column in the result is `column`. `load` begins before its products. Before every
// `ahead` blocks `take` waits for their scales, and then `load_blocks` begins with those of the `ahead` blocks after them.
template <class Scales, class Tile>
struct SkinnyScales {  // Unscaled
  __device__ static void load(const MatmulArguments&, u32) {}
};

template <class Tile>
struct SkinnyScales<RowScales, Tile> {
  static constexpr bool overlaps = true;  // whether there are registers for the sums of two blocks
  static constexpr int ahead = 2;
  ScalesOfA<Tile, 1> of_a;
  float of_w[2];

  __device__ __forceinline__ void load(const ScaledMatmulArguments& m, u32 column) {
    of_a.load(m, 0, 1);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 at = column + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
      of_w[half] = m.w_scale[min(at, m.n - 1) * m.w_scale_row];
    }
  }
  __device__ __forceinline__ void load_blocks(const ScaledMatmulArguments&, u32, u32) {}
  __device__ __forceinline__ void take() {}

  __device__ __forceinline__ void add(int, const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i) totals[i] += sums[i];
  }
  __device__ __forceinline__ void multiply(SumsOf<Tile>& totals) const {
    of_a.visit(0, [&](float scale, int first) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& total = totals[first + 2 * half];
        total = __fmul_rn(__fmul_rn(total, scale), of_w[half]);
      }
    });
  }
};

// Memory answers later than a block takes, so scales of `ahead` blocks are loaded while those before them are used. They
// are loaded together, once those before have come: a wait for one load is one for all in flight (their scoreboard).
template <class Tile>
struct SkinnyScales<BlockScales, Tile> {
  static constexpr bool overlaps = Tile::columns <= 32;
  static constexpr int ahead = 4;
  ScalesOfA<Tile, ahead> next, now;  // `now` multiplied by those of W
  float next_of_w;                   // a lane has that of every `ahead`-th block

  __device__ __forceinline__ void load(const ScaledMatmulArguments& m, u32 column) { load_blocks(m, column, 0); }
  __device__ __forceinline__ void load_blocks(const ScaledMatmulArguments& m, u32 column, u32 first) {
    const u32 blocks = BlockScales::of_row(m.k), block = min(first + threadIdx.x % ahead, blocks - 1);
    next.load(m, first, blocks);
    next_of_w = m.w_scale[min(column, m.n - 1) / BlockScales::rows * m.w_scale_row + block * m.w_scale_block];
  }
  __device__ __forceinline__ void take() {
#pragma unroll
    for (int i = 0; i < next.count; ++i) {
      const float of_w = __shfl_sync(0xffffffff, next_of_w, next.number(i) / Tile::columns);
      now.of_lane[i] = __fmul_rn(next.of_lane[i], of_w);
    }
  }

  // Of block `i` of those that were taken.
  __device__ __forceinline__ void add(int i, const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
    now.visit(i, [&](float scale, int first) {
#pragma unroll
      for (int sum = first; sum < first + 4; sum += 2) totals[sum] = __fmaf_rn(sums[sum], scale, totals[sum]);
    });
  }
  __device__ __forceinline__ void multiply(SumsOf<Tile>&) const {}
};

// By the warpgroup: the products of a tile, whose first scales are on their way. A block of K is added while the products
// of the next run, if registers hold the sums of both.
template <class Multiplier, class Tile, class Scales>
struct ScaledSkinnyProducts {
  static_assert(Tile::leaves == 1 && !Tile::partials);
  using Sums = SumsOf<Tile>;
  using OfTile = SkinnyScales<Scales, Tile>;
  const Multiplier& multiplier;
  const ScaledMatmulArguments& m;
  const u32 column;

  struct Block {
    Sums sums;
    u32 place;
  };

  __device__ __forceinline__ void multiply(Position<Tile>& at, Sums& totals, OfTile& scales) const {
    constexpr u32 ahead = OfTile::ahead;
    const auto operands = multiplier.first_operands();
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i) totals[i] = 0;
    const u32 blocks = (m.k + Multiplier::depth - 1) / Multiplier::depth;
    u32 block = 0;
    if constexpr (OfTile::overlaps) {
      Block even, odd;
      queue(operands, at, even);
      for (; block + ahead < blocks; block += ahead) {
        scales.take();
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
          queue(operands, at, i % 2 ? even : odd);
          if (i == 0) scales.load_blocks(m, column, block + ahead);
          add_all_but_last(i % 2 ? odd : even, scales, i, totals);
        }
      }
      scales.take();
      add_rest<0>(operands, at, even, odd, scales, blocks - block, totals);
    } else {
      Block only;
      for (; block < blocks; block += ahead) {
        scales.take();
#pragma unroll
        for (int i = 0; i < ahead; ++i) {
          if (block + i == blocks) break;
          queue(operands, at, only);
          if (i == 0) scales.load_blocks(m, column, block + ahead);
          add_last(only, scales, i, totals);
        }
      }
    }
    scales.multiply(totals);
  }

 private:
  template <class Operands>
  __device__ __forceinline__ void queue(const Operands& operands, Position<Tile>& at, Block& it) const {
    multiplier.queue_place(operands, at, it.sums, 0);
    it.place = at.place;
    at.next();
  }
  __device__ __forceinline__ void add_all_but_last(Block& it, const OfTile& scales, int i, Sums& totals) const {
    wait_for_all_but_last_products(it.sums);
    multiplier.release(it.place);
    scales.add(i, it.sums, totals);
  }
  __device__ __forceinline__ void add_last(Block& it, const OfTile& scales, int i, Sums& totals) const {
    multiplier.finish(it.sums, it.place);
    scales.add(i, it.sums, totals);
  }
  // Block I of the last `left` ones, which has been queued, and those after it.
  template <int I, class Operands>
  __device__ __forceinline__ void add_rest(const Operands& operands, Position<Tile>& at, Block& it, Block& next,
                                           const OfTile& scales, u32 left, Sums& totals) const {
    if (I + 1 == OfTile::ahead || left == I + 1) return add_last(it, scales, I, totals);
    if constexpr (I + 1 < OfTile::ahead) {
      queue(operands, at, next);
      add_all_but_last(it, scales, I, totals);
      add_rest<I + 1>(operands, at, next, it, scales, left, totals);
    }
  }
};

// The scales of a skinny matmul of e4m3 operands, and its products in the order of scaled_products.cuh (sm_90a only).
//
// The operands are swapped: a row of the sums is a row of W, and a column of them is a row of A. So the scale of a row
// of A is that of a column, and the 64 rows of a tile have one scale of a block of W. A lane loads the scale of every
// 32nd row of A, and shuffles it to those that need it.
#pragma once
#include "device/matmul/scaled_products.cuh"

// Scales of the rows of A, of all of K or of a block.
template <class Tile>
struct ScalesOfA {
  float of_lane[(Tile::columns + 31) / 32];

  __device__ __forceinline__ void load(const ScaledMatmulArguments& m, u32 block) {
#pragma unroll
    for (int i = 0; i < (Tile::columns + 31) / 32; ++i)  // columns outside A take any scale
      of_lane[i] = m.a_scale[min(32 * i + threadIdx.x % 32, m.m - 1) * m.a_scale_row + block * m.a_scale_block];
  }

  // By a warp: calls `visit` for each of this thread's columns, with its scale and the index of its first sum. That of
  // the sum eight rows below is larger by two.
  template <class Visit>
  __device__ __forceinline__ void visit(const Visit& visit) const {
#pragma unroll
    for (int pair = 0; pair < Tile::columns / 4; ++pair) {
      const u32 lane = pair / 2 % 4 * 8 + threadIdx.x % 4 * 2 + pair % 2;
      visit(__shfl_sync(0xffffffff, of_lane[pair / 8], lane), pair / 2 * 4 + pair % 2);
    }
  }
};

template <class Scales, class Tile>
struct SkinnyScales;

template <class Tile>
struct SkinnyScales<RowScales, Tile> {
  static constexpr bool overlaps = true;  // whether there are registers for the sums of two blocks

  struct OfBlock {
    __device__ __forceinline__ void load(const ScaledMatmulArguments&, u32, u32) {}
    __device__ __forceinline__ void add(const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
#pragma unroll
      for (int i = 0; i < Tile::columns / 2; ++i) totals[i] += sums[i];
    }
  };

  // Loaded before the products of a tile, whose first column in the result is `column`.
  struct OfTotals {
    ScalesOfA<Tile> of_a;
    float of_w[2];

    __device__ __forceinline__ void load(const ScaledMatmulArguments& m, u32 column) {
      of_a.load(m, 0);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 at = column + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * half;
        of_w[half] = m.w_scale[min(at, m.n - 1) * m.w_scale_row];
      }
    }
    __device__ __forceinline__ void multiply(SumsOf<Tile>& totals) const {
      of_a.visit([&](float scale, int first) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& total = totals[first + 2 * half];
          total = __fmul_rn(__fmul_rn(total, scale), of_w[half]);
        }
      });
    }
  };
};

template <class Tile>
struct SkinnyScales<BlockScales, Tile> {
  static constexpr bool overlaps = Tile::columns <= 32;

  struct OfBlock {
    ScalesOfA<Tile> of_a;
    float of_w;

    __device__ __forceinline__ void load(const ScaledMatmulArguments& m, u32 column, u32 block) {
      of_a.load(m, block);
      of_w = m.w_scale[min(column, m.n - 1) / BlockScales::rows * m.w_scale_row + block * m.w_scale_block];
    }
    __device__ __forceinline__ void add(const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
      of_a.visit([&](float of_row, int first) {
        const float scale = __fmul_rn(of_row, of_w);
#pragma unroll
        for (int i = first; i < first + 4; i += 2) totals[i] = __fmaf_rn(sums[i], scale, totals[i]);
      });
    }
  };

  struct OfTotals {
    __device__ __forceinline__ void load(const ScaledMatmulArguments&, u32) {}
    __device__ __forceinline__ void multiply(SumsOf<Tile>&) const {}
  };
};

// By the warpgroup: the products of a tile whose first column in the result is `column`. A block of K is added while
// the products of the next run, if registers hold the sums of both.
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
    typename OfTile::OfBlock scales;
    u32 place;
  };

  __device__ __forceinline__ void multiply(Position<Tile>& at, Sums& totals) const {
    const auto operands = multiplier.first_operands();
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i) totals[i] = 0;
    typename OfTile::OfTotals scales;
    scales.load(m, column);
    const u32 blocks = (m.k + Multiplier::depth - 1) / Multiplier::depth;
    if constexpr (OfTile::overlaps) {
      Block even, odd;
      queue(operands, at, even, 0);
      u32 block = 1;
      for (; block + 1 < blocks; block += 2) {
        queue(operands, at, odd, block);
        add_all_but_last(even, totals);
        queue(operands, at, even, block + 1);
        add_all_but_last(odd, totals);
      }
      if (block < blocks) {
        queue(operands, at, odd, block);
        add_all_but_last(even, totals);
        add_last(odd, totals);
      } else {
        add_last(even, totals);
      }
    } else {
      Block only;
      for (u32 block = 0; block < blocks; ++block) {
        queue(operands, at, only, block);
        add_last(only, totals);
      }
    }
    scales.multiply(totals);
  }

 private:
  // The scales come while the block's operands do.
  template <class Operands>
  __device__ __forceinline__ void queue(const Operands& operands, Position<Tile>& at, Block& it, u32 block) const {
    it.scales.load(m, column, block);
    multiplier.queue_place(operands, at, it.sums, 0);
    it.place = at.place;
    at.next();
  }
  __device__ __forceinline__ void add_all_but_last(Block& it, Sums& totals) const {
    wait_for_all_but_last_products(it.sums);
    multiplier.release(it.place);
    it.scales.add(it.sums, totals);
  }
  __device__ __forceinline__ void add_last(Block& it, Sums& totals) const {
    multiplier.finish(it.sums, it.place);
    it.scales.add(it.sums, totals);
  }
};

// Products of e4m3 operands with fp32 scales (sm_90a only), batch-invariant: graphar/numerics/fp8_products.py specifies
// their order, which depends neither on the tile nor on the grid.
//
//   a place of the ring: 128 of K   --4 wgmma, from zero--> the sums of a block   --add in fp32--> totals
//
// The accumulator of 8-bit products keeps about 14 bits, so the totals are added outside of the tensor core. A consumer
// with up to 128 columns has registers for the sums of two blocks: one is added while the products of the next run. With
// more columns it has one, and the products of the other consumer run meanwhile.
#pragma once
#include "device/matmul/pipeline.cuh"

// In place of the scales of operands that have none.
struct Unscaled {
  using Arguments = MatmulArguments;
};

template <class Scales>
constexpr bool is_scaled = true;
template <>
constexpr bool is_scaled<Unscaled> = false;

// The two rows of C that this thread's sums lie in: sum i in that of `half` i / 2 % 2. `row` is the tile's first one.
template <class Tile>
__device__ __forceinline__ u32 scaled_row(const ScaledMatmulArguments& a, u32 row, u32 index, int half) {
  const u32 at = row + 64 * Tile::warpgroup(index) + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4 + 8 * half;
  return min(at, a.m - 1);  // rows and columns outside C take any scale
}

// A scale for each row of A and each row of W: they multiply the totals.
struct RowScales {
  using Arguments = ScaledMatmulArguments;

  // Those of a block.
  template <class Tile>
  struct OfBlock {
    __device__ __forceinline__ void load(const Arguments&, u32, u32, u32, u32) {}
    __device__ __forceinline__ float add(int, float sum, float total) const { return total + sum; }
  };

  // Those of a tile, loaded before its products, of which each lane keeps every 32nd column's. `row` and `column` are the
  // tile's first ones in C.
  template <class Tile>
  struct OfTile {
    static_assert(Tile::columns % 32 == 0);
    float of_row[2], of_column[Tile::columns / 32];

    __device__ __forceinline__ void load(const Arguments& a, u32 row, u32 column, u32 index) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of_row[half] = a.a_scale[scaled_row<Tile>(a, row, index, half) * a.a_scale_row];
#pragma unroll
      for (int i = 0; i < Tile::columns / 32; ++i)
        of_column[i] = a.w_scale[min(column + 32 * i + threadIdx.x % 32, a.n - 1) * a.w_scale_row];
    }

    __device__ __forceinline__ void multiply(SumsOf<Tile>& totals) const {
#pragma unroll
      for (int pair = 0; pair < Tile::columns / 4; ++pair) {
        const u32 at = pair / 2 % 4 * 8 + threadIdx.x % 4 * 2 + pair % 2;
        const float scale = __shfl_sync(0xffffffff, of_column[pair / 8], at);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& total = totals[pair / 2 * 4 + 2 * half + pair % 2];
          total = __fmul_rn(__fmul_rn(total, of_row[half]), scale);
        }
      }
    }
  };
};

// A scale for 128 columns of each row of A, and for 128 columns of 128 rows of W: they multiply the sums of a block.
struct BlockScales {
  using Arguments = ScaledMatmulArguments;
  static constexpr u32 rows = 128;  // of W, that share a scale

  template <class Tile>
  struct OfBlock {
    static_assert(Tile::columns % 64 == 0, "no 64 columns of a tile have two scales");
    float of_row[2], of_columns[Tile::boxes];

    // `row` and `column` are the tile's first ones in C.
    __device__ __forceinline__ void load(const Arguments& a, u32 row, u32 column, u32 index, u32 block) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of_row[half] = a.a_scale[scaled_row<Tile>(a, row, index, half) * a.a_scale_row + block * a.a_scale_block];
#pragma unroll
      for (int box = 0; box < Tile::boxes; ++box)
        of_columns[box] =
            a.w_scale[min(column + 64 * box, a.n - 1) / rows * a.w_scale_row + block * a.w_scale_block];
    }

    __device__ __forceinline__ float add(int i, float sum, float total) const {
      return __fmaf_rn(sum, __fmul_rn(of_row[i / 2 % 2], of_columns[i / 32]), total);
    }
  };

  template <class Tile>
  struct OfTile {
    __device__ __forceinline__ void load(const Arguments&, u32, u32, u32) {}
    __device__ __forceinline__ void multiply(SumsOf<Tile>&) const {}
  };
};

// By a consumer warpgroup.
template <class Multiplier, class Tile, class Scales>
struct ScaledProducts {
  static_assert(Tile::turns == 1 && Tile::leaves == 1 && Tile::columns <= 192);
  using Sums = SumsOf<Tile>;
  using OfBlock = typename Scales::template OfBlock<Tile>;
  const Multiplier& multiplier;
  const ScaledMatmulArguments& a;
  const u32 row, column;  // the tile's first ones in C

  // The sums of a block, and its scales, which are loaded while its products run.
  struct Block {
    Sums sums;
    OfBlock scales;
    u32 place;
  };

  // All of K, for one tile.
  __device__ __forceinline__ void multiply(Position<Tile>& at, Sums& totals) const {
    const auto operands = multiplier.first_operands();
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i) totals[i] = 0;
    const u32 blocks = (a.k + Multiplier::depth - 1) / Multiplier::depth;
    typename Scales::template OfTile<Tile> scales;
    scales.load(a, row, column, multiplier.index);
    if constexpr (Tile::columns <= 128) {
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
  template <class Operands>
  __device__ __forceinline__ void queue(const Operands& operands, Position<Tile>& at, Block& it, u32 block) const {
    multiplier.queue_place(operands, at, it.sums, 0);
    it.scales.load(a, row, column, multiplier.index, block);
    it.place = at.place;
    at.next();
  }

  // Adds a block once its products are complete, while those of the block that was queued after it run.
  __device__ __forceinline__ void add_all_but_last(Block& it, Sums& totals) const {
    wait_for_all_but_last_products(it.sums);
    multiplier.release(it.place);
    add(it, totals);
  }
  __device__ __forceinline__ void add_last(Block& it, Sums& totals) const {
    multiplier.finish(it.sums, it.place);
    add(it, totals);
  }

  __device__ __forceinline__ void add(const Block& it, Sums& totals) const {
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i) totals[i] = it.scales.add(i, it.sums[i], totals[i]);
  }
};

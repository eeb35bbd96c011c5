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
  template <class T>
  using Operand = T;  // the type of the operands of products whose results have type T
};

template <class Scales>
constexpr bool is_scaled = true;
template <>
constexpr bool is_scaled<Unscaled> = false;

// The first of the 16 rows of C that this warp's sums lie in; `row` is the tile's first one. Sum i of a thread lies in row
// lane / 4 + 8 * (i / 2 % 2) of them.
template <class Tile>
__device__ __forceinline__ u32 first_row_of_warp(u32 row, u32 index) {
  return row + 64 * Tile::warpgroup(index) + threadIdx.x / 32 % 4 * 16;
}

// A scale for each row of A and each row of W: they multiply the totals.
struct RowScales {
  using Arguments = ScaledMatmulArguments;
  template <class T>
  using Operand = e4m3;

  __device__ static u32 of_row(u32) { return 1; }  // of A, where K is given

  // Those of a tile, of which each lane keeps every 32nd column's. `row` and `column` are the tile's first ones in C.
  template <class Tile>
  struct OfTile {
    static_assert(Tile::columns % 32 == 0);
    float of_row[2], of_column[Tile::columns / 32];

    // Before the products.
    __device__ __forceinline__ void load(const Arguments& a, u32 row, u32 column, u32 index, u32) {
      const u32 mine = first_row_of_warp<Tile>(row, index) + threadIdx.x % 32 / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of_row[half] = a.a_scale[min(mine + 8 * half, a.m - 1) * a.a_scale_row];
#pragma unroll
      for (int i = 0; i < Tile::columns / 32; ++i)
        of_column[i] = a.w_scale[min(column + 32 * i + threadIdx.x % 32, a.n - 1) * a.w_scale_row];
    }

    __device__ __forceinline__ void take_block(int) {}
    __device__ __forceinline__ float add(int, float sum, float total) const { return total + sum; }

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
  template <class T>
  using Operand = e4m3;
  static constexpr u32 rows = 128;  // of W, that share a scale

  __device__ static u32 of_row(u32 k) { return (k + row_nbytes - 1) / row_nbytes; }  // of A: a place has 128 of K

  // Those of a tile. A warp has 16 scales of A in a block, and a few of W: each lane loads one of them, two blocks before
  // it is used, since L2 may answer later than a block takes.
  template <class Tile>
  struct OfTile {
    static_assert(Tile::columns % 64 == 0, "no 64 columns of a tile have two scales");
    // Columns of a tile that surely share a scale: tiles begin at multiples of their columns.
    static constexpr u32 width = Tile::columns % rows == 0 ? rows : 64, count = Tile::columns / width;
    const float* next;     // this lane's scale of the next block to load
    u64 stride;            // from there to that of the block after it
    u32 left;              // blocks that are not loaded yet
    float loaded[2] = {};  // of an even block, and of an odd one
    float of[2][count];    // of the block that was taken last: what multiplies its sums

    // Before the products. `row` and `column` are the tile's first ones in C.
    __device__ __forceinline__ void load(const Arguments& a, u32 row, u32 column, u32 index, u32 blocks) {
      const u32 lane = threadIdx.x % 32;
      // Rows and columns outside C take any scale.
      if (lane < 16) {
        next = a.a_scale + min(first_row_of_warp<Tile>(row, index) + lane, a.m - 1) * a.a_scale_row;
        stride = a.a_scale_block;
      } else {
        next = a.w_scale + min(column + min(lane - 16, count - 1) * width, a.n - 1) / rows * a.w_scale_row;
        stride = a.w_scale_block;
      }
      left = blocks;
      load_next(0);
      load_next(1);
    }

    // By all lanes, once for each block in the order of K: takes the scales of a block, which is even or odd.
    __device__ __forceinline__ void take_block(int odd) {
      const u32 row = threadIdx.x % 32 / 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float of_row = __shfl_sync(0xffffffff, loaded[odd], row + 8 * half);
#pragma unroll
        for (int i = 0; i < int(count); ++i)
          of[half][i] = __fmul_rn(of_row, __shfl_sync(0xffffffff, loaded[odd], 16 + i));
      }
      load_next(odd);
    }

    __device__ __forceinline__ float add(int i, float sum, float total) const {
      return __fmaf_rn(sum, of[i / 2 % 2][2 * i / width], total);
    }

    __device__ __forceinline__ void multiply(SumsOf<Tile>&) const {}

   private:
    __device__ __forceinline__ void load_next(int odd) {
      if (left == 0) return;
      --left;
      loaded[odd] = *next;
      next += stride;
    }
  };
};

// By a consumer warpgroup.
template <class Multiplier, class Tile, class Scales>
struct ScaledProducts {
  static_assert(Tile::turns == 1 && Tile::leaves == 1 && Tile::columns <= 192);
  using Sums = SumsOf<Tile>;
  using OfTile = typename Scales::template OfTile<Tile>;
  const Multiplier& multiplier;
  const ScaledMatmulArguments& a;
  const u32 row, column;  // the tile's first ones in C

  struct Block {
    Sums sums;
    u32 place;
  };

  // The first loads of the tile's scales.
  __device__ __forceinline__ void load(OfTile& scales) const {
    scales.load(a, row, column, multiplier.index, blocks());
  }

  // All of K, for one tile.
  __device__ __forceinline__ void multiply(Position<Tile>& at, Sums& totals) const {
    OfTile scales;
    load(scales);
    multiply(at, totals, scales);
  }

  // The same with scales that `load` was called for.
  __device__ __forceinline__ void multiply(Position<Tile>& at, Sums& totals, OfTile& scales) const {
    const auto operands = multiplier.first_operands();
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i) totals[i] = 0;
    const u32 blocks = this->blocks();
    if constexpr (Tile::columns <= 128) {
      Block even, odd;
      queue(operands, at, even);
      u32 block = 1;
      for (; block + 1 < blocks; block += 2) {
        queue(operands, at, odd);
        add_all_but_last(even, scales, 0, totals);
        queue(operands, at, even);
        add_all_but_last(odd, scales, 1, totals);
      }
      if (block < blocks) {
        queue(operands, at, odd);
        add_all_but_last(even, scales, 0, totals);
        add_last(odd, scales, 1, totals);
      } else {
        add_last(even, scales, 0, totals);
      }
    } else {
      Block only;
      for (u32 block = 0; block < blocks; block += 2) {
        queue(operands, at, only);
        add_last(only, scales, 0, totals);
        if (block + 1 == blocks) break;
        queue(operands, at, only);
        add_last(only, scales, 1, totals);
      }
    }
    scales.multiply(totals);
  }

 private:
  __device__ u32 blocks() const { return (a.k + Multiplier::depth - 1) / Multiplier::depth; }

  template <class Operands>
  __device__ __forceinline__ void queue(const Operands& operands, Position<Tile>& at, Block& it) const {
    multiplier.queue_place(operands, at, it.sums, 0);
    it.place = at.place;
    at.next();
  }

  // Adds a block once its products are complete, while those of the block that was queued after it run.
  __device__ __forceinline__ void add_all_but_last(Block& it, OfTile& scales, int odd, Sums& totals) const {
    scales.take_block(odd);
    wait_for_all_but_last_products(it.sums);
    multiplier.release(it.place);
    add(it, scales, totals);
  }
  __device__ __forceinline__ void add_last(Block& it, OfTile& scales, int odd, Sums& totals) const {
    scales.take_block(odd);
    multiplier.finish(it.sums, it.place);
    add(it, scales, totals);
  }

  __device__ __forceinline__ void add(const Block& it, const OfTile& scales, Sums& totals) const {
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i) totals[i] = scales.add(i, it.sums[i], totals[i]);
  }
};

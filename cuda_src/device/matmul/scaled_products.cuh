// Products of e4m3 operands with fp32 scales (sm_90a only), in the order of graphar/numerics/fp8_products.py.
//
//   a place of the ring: 128 of K   --4 wgmma, from zero--> the sums of a block   --add in fp32--> totals
//
// The accumulator of 8-bit products keeps about 14 bits, so the totals are added outside of the tensor core, while the
// next block's products run if registers hold the sums of two, or else the other consumer's products.
// A skinny matmul swaps its operands: a row of its sums is a row of W, and a column of them is a row of A.
#pragma once
#include "device/matmul/pipeline.cuh"

struct Unscaled {
  using Arguments = MatmulArguments;
  template <class T>
  using Operand = T;  // the type of the operands of products whose results have type T
};

template <class Scales>
constexpr bool is_scaled = !are_same<Scales, Unscaled>;

// The scale of a row of A or of W, of all of K or of a block. Rows outside the operand take any scale.
DEVICE float scale_of_a(const ScaledMatmulArguments& a, u32 row, u32 block = 0) {
  return a.a_scale[min(row, a.m - 1) * a.a_scale_row + block * a.a_scale_block];
}
DEVICE float scale_of_w(const ScaledMatmulArguments& a, u32 row) {
  return a.w_scale[min(row, a.n - 1) * a.w_scale_row];
}

// The first row of this warp's 16; `row` is the tile's. Sum i of a thread lies in row lane / 4 + i / 2 % 2 * 8 of them.
template <class Tile>
DEVICE u32 first_row_of_warp(u32 row, u32 index) {
  return row + 64 * Tile::warpgroup(index) + threadIdx.x / 32 % 4 * 16;
}

// The scales of the columns of a tile's sums. Each lane keeps every 32nd.
template <class Tile>
struct ColumnScales {
  float of_lane[(Tile::columns + 31) / 32];

  template <class ScaleOf>
  DEVICE void load(const ScaleOf& scale_of) {
#pragma unroll
    for (int i = 0; i < (Tile::columns + 31) / 32; ++i) of_lane[i] = scale_of(32 * i + threadIdx.x % 32);
  }

  // By a warp: calls `visit` for each of this thread's columns, with its scale and the index of its first of two sums.
  template <class Visit>
  DEVICE void visit(const Visit& visit) const {
#pragma unroll
    for (int pair = 0; pair < Tile::columns / 4; ++pair) {
      const u32 lane = pair / 2 % 4 * 8 + threadIdx.x % 4 * 2 + pair % 2;
      visit(__shfl_sync(0xffffffff, of_lane[pair / 8], lane), pair / 2 * 4 + pair % 2);
    }
  }
};

struct Scaled {
  using Arguments = ScaledMatmulArguments;
  template <class T>
  using Operand = e4m3;
};

// What the scales of a tile need not do.
struct ScalesOfTile {
  struct OfBlock {};
  DEVICE void load_block(OfBlock&, u32) {}
  DEVICE void take_block(int) {}
  template <class Sums>
  DEVICE void multiply(Sums&) const {}
};

// A scale for each row of A and each row of W: they multiply the totals, A's first.
struct RowScales : Scaled {
  __device__ static u32 of_row(u32) { return 1; }  // of A, where K is given

  // The scales of a tile, whose sums have the given first row and column.
  template <class Tile>
  struct OfTile : ScalesOfTile {
    static constexpr bool overlaps = Tile::columns <= 128;  // whether registers hold the sums of two blocks
    float of_row[2];
    ColumnScales<Tile> of_columns;

    DEVICE void load(const Arguments& a, u32 row, u32 column, u32 index, u32) {
      const auto of_a = [&](u32 i) { return scale_of_a(a, (Tile::swapped ? column : row) + i); };
      const auto of_w = [&](u32 i) { return scale_of_w(a, (Tile::swapped ? row : column) + i); };
      const u32 mine = first_row_of_warp<Tile>(0, index) + threadIdx.x % 32 / 4;
      if constexpr (Tile::swapped) of_columns.load(of_a);
      for (int half = 0; half < 2; ++half) of_row[half] = Tile::swapped ? of_w(mine + 8 * half) : of_a(mine + 8 * half);
      if constexpr (!Tile::swapped) of_columns.load(of_w);
    }

    DEVICE void add(const OfBlock&, const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
#pragma unroll
      for (int i = 0; i < Tile::columns / 2; ++i) totals[i] += sums[i];
    }

    DEVICE void multiply(SumsOf<Tile>& totals) const {
      of_columns.visit([&](float scale, int first) {
        for (int half = 0; half < 2; ++half) {
          float& total = totals[first + 2 * half];
          const float of_a = Tile::swapped ? scale : of_row[half], of_w = Tile::swapped ? of_row[half] : scale;
          total = __fmul_rn(__fmul_rn(total, of_a), of_w);
        }
      });
    }
  };
};

constexpr u32 block_rows = 128;  // of W, that share a scale

// The scales of a tile's blocks: 16 of A and a few of W. Each lane loads one of them, two blocks ahead, for L2 is slow.
template <class Tile, bool Swapped = Tile::swapped>
struct ScalesOfBlocks : ScalesOfTile {
  static_assert(Tile::columns % 64 == 0, "no 64 columns of a tile have two scales");
  static constexpr bool overlaps = Tile::columns <= 128;
  // Columns of a tile that surely share a scale: tiles begin at multiples of their columns.
  static constexpr u32 width = Tile::columns % block_rows == 0 ? block_rows : 64, count = Tile::columns / width;
  const float* next;     // this lane's scale of the next block to load
  u64 stride;            // from there to the scale of the block after it
  u32 left;              // blocks that are not loaded yet
  float loaded[2] = {};  // of an even block, and of an odd one
  float of[2][count];    // of the block that was taken last: what multiplies its sums

  DEVICE void load(const ScaledMatmulArguments& a, u32 row, u32 column, u32 index, u32 blocks) {
    const u32 lane = threadIdx.x % 32;
    // Rows and columns outside C take any scale.
    if (lane < 16) {
      next = a.a_scale + min(first_row_of_warp<Tile>(row, index) + lane, a.m - 1) * a.a_scale_row;
      stride = a.a_scale_block;
    } else {
      next = a.w_scale + min(column + min(lane - 16, count - 1) * width, a.n - 1) / block_rows * a.w_scale_row;
      stride = a.w_scale_block;
    }
    left = blocks;
    load_next(0);
    load_next(1);
  }

  // By all lanes, once for each block in the order of K: takes the scales of a block, which is even or odd.
  DEVICE void take_block(int odd) {
    const u32 row = threadIdx.x % 32 / 4;
    for (int half = 0; half < 2; ++half) {
      const float of_row = __shfl_sync(0xffffffff, loaded[odd], row + 8 * half);
#pragma unroll
      for (int i = 0; i < int(count); ++i)
        of[half][i] = __fmul_rn(of_row, __shfl_sync(0xffffffff, loaded[odd], 16 + i));
    }
    load_next(odd);
  }

  DEVICE void add(const OfBlock&, const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i)
      totals[i] = __fmaf_rn(sums[i], of[i / 2 % 2][2 * i / width], totals[i]);
  }

 private:
  DEVICE void load_next(int odd) {
    if (left == 0) return;
    --left;
    loaded[odd] = *next;
    next += stride;
  }
};

// The same of a skinny tile, all rows of whose sums have one scale of W. A block's scales come while its operands do.
template <class Tile>
struct ScalesOfBlocks<Tile, true> : ScalesOfTile {
  static_assert(Tile::rows == 64, "no 64 rows of W have two scales");
  static constexpr bool overlaps = Tile::columns <= 32;
  struct OfBlock {
    ColumnScales<Tile> of_a;
    float of_w;
  };
  const ScaledMatmulArguments* arguments;
  u32 row;

  DEVICE void load(const ScaledMatmulArguments& a, u32 first_row, u32, u32, u32) {
    arguments = &a;
    row = first_row;
  }

  // Before the products of a block.
  DEVICE void load_block(OfBlock& scales, u32 block) const {
    const ScaledMatmulArguments& a = *arguments;
    scales.of_a.load([&](u32 i) { return scale_of_a(a, i, block); });
    scales.of_w = a.w_scale[min(row, a.n - 1) / block_rows * a.w_scale_row + block * a.w_scale_block];
  }

  DEVICE void add(const OfBlock& scales, const SumsOf<Tile>& sums, SumsOf<Tile>& totals) const {
    scales.of_a.visit([&](float of_a, int first) {
      const float scale = __fmul_rn(of_a, scales.of_w);
#pragma unroll
      for (int i = first; i < first + 4; i += 2) totals[i] = __fmaf_rn(sums[i], scale, totals[i]);
    });
  }
};

// A scale for 128 columns of each row of A, and for 128 columns of 128 rows of W: they multiply the sums of a block.
struct BlockScales : Scaled {
  template <class Tile>
  using OfTile = ScalesOfBlocks<Tile>;

  __device__ static u32 of_row(u32 k) { return (k + row_nbytes - 1) / row_nbytes; }  // of A: a place has 128 of K
};

template <class Multiplier, class Tile, class Scales>
struct ScaledProducts {
  static_assert(Tile::turns == 1 && Tile::leaves == 1 && Tile::columns <= 192);
  using Sums = SumsOf<Tile>;
  using OfTile = typename Scales::template OfTile<Tile>;
  const Multiplier& multiplier;
  const ScaledMatmulArguments& a;
  const u32 row, column;  // the first ones of the tile's sums

  struct Block {
    Sums sums;
    typename OfTile::OfBlock scales;
    u32 place;
  };

  DEVICE void load(OfTile& scales) const { scales.load(a, row, column, multiplier.index, blocks()); }

  // All of K, for one tile.
  DEVICE void multiply(Position<Tile>& at, Sums& totals) const {
    OfTile scales;
    load(scales);
    multiply(at, totals, scales);
  }

  // The same with scales that `load` was called for.
  DEVICE void multiply(Position<Tile>& at, Sums& totals, OfTile& scales) const {
    const auto operands = multiplier.first_operands();
#pragma unroll
    for (int i = 0; i < Tile::columns / 2; ++i) totals[i] = 0;
    const u32 blocks = this->blocks();
    const auto queue = [&](Block& it, u32 block) {
      scales.load_block(it.scales, block);
      multiplier.queue_place(operands, at, it.sums, 0);
      it.place = at.place;
      at.next();
    };
    if constexpr (OfTile::overlaps) {
      Block even, odd;
      queue(even, 0);
      u32 block = 1;
      for (; block + 1 < blocks; block += 2) {
        queue(odd, block);
        add_all_but_last(even, scales, 0, totals);
        queue(even, block + 1);
        add_all_but_last(odd, scales, 1, totals);
      }
      if (block < blocks) {
        queue(odd, block);
        add_all_but_last(even, scales, 0, totals);
        add_last(odd, scales, 1, totals);
      } else {
        add_last(even, scales, 0, totals);
      }
    } else {
      constexpr u32 step = Tile::swapped ? 1 : 2;
      Block only;
      for (u32 block = 0; block < blocks; block += step) {
        queue(only, block);
        add_last(only, scales, 0, totals);
        if (step == 1) continue;
        if (block + 1 == blocks) break;
        queue(only, block + 1);
        add_last(only, scales, 1, totals);
      }
    }
    scales.multiply(totals);
  }

 private:
  __device__ u32 blocks() const { return (a.k + Multiplier::depth - 1) / Multiplier::depth; }

  // Adds a block once its products are complete, while the products of the block queued after it run.
  DEVICE void add_all_but_last(Block& it, OfTile& scales, int odd, Sums& totals) const {
    scales.take_block(odd);
    wait_for_all_but_last_products(it.sums);
    multiplier.release(it.place);
    scales.add(it.scales, it.sums, totals);
  }
  DEVICE void add_last(Block& it, OfTile& scales, int odd, Sums& totals) const {
    scales.take_block(odd);
    multiplier.finish(it.sums, it.place);
    scales.add(it.scales, it.sums, totals);
  }
};

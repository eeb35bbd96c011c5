// The tiles of a matmul's result, and the order in which a grid computes them.
#pragma once
#include "tensor_map.cuh"
#include "wgmma.cuh"

constexpr u32 tile_depth = 64;   // of K in a place: 128 bytes, the width of a box
constexpr u32 row_nbytes = 128;  // of a box
constexpr u32 box_nbytes = 64 * row_nbytes;

enum Layout { by_rows, by_columns };  // of W: [N, K], [K, N]

// M x N elements of C, computed with `Stages` places in the ring, by a block of `Cluster`. A warpgroup for each 64 rows; or
// two, `Alternating`, each with tiles of 64 rows of its own, so that one multiplies while the other finishes a tile. On its
// way out a tile has room in shared memory for two boxes of each consumer, or as a `Whole`. `Recorded`: timeline.cuh.
template <int M, int N, int Stages, int Cluster, bool Whole = false, bool Alternating = false, bool Recorded = false>
struct MatmulTile {
  static_assert(!Alternating || M == 64);
  static constexpr int rows = M, columns = N, stages = Stages, cluster = Cluster;
  static constexpr int strips = M / 64, turns = Alternating ? 2 : 1, consumers = strips * turns, boxes = N / 64;
  static constexpr int staged = Whole || boxes < 2 ? boxes : 2;
  static constexpr bool recorded = Recorded;
  static constexpr u32 a_nbytes = M * row_nbytes, w_nbytes = N * row_nbytes, place_nbytes = a_nbytes + w_nbytes;

  // Which of a block's tiles is the first of a consumer, which has every `turns`-th, and which 64 rows of it.
  __device__ static constexpr u32 turn(u32 consumer) { return consumer / strips; }
  __device__ static constexpr u32 strip(u32 consumer) { return consumer % strips; }
};

// The tiles of a block, in the order of the whole grid: `group_rows` rows of tiles at a time, column by column, so that
// what runs at the same time shares operands in L2; beginning with row `first_row`, and from the last row on to row 0.
// A row is that of a cluster.
template <class Tile>
struct Walk {
  const MatmulArguments& a;
  static constexpr u32 height = Tile::rows * Tile::cluster;
  const u32 rows = (a.m + height - 1) / height, columns = (a.n + Tile::columns - 1) / Tile::columns;
  u32 group = 0, within = blockIdx.x / Tile::cluster;  // the first row of the group, and where in it

  __device__ u32 rows_of_group() const { return min(a.group_rows, rows - group); }

  // Whether there is a tile left; finds its group.
  __device__ bool more() {
    while (group < rows && within >= rows_of_group() * columns) {
      within -= rows_of_group() * columns;
      group += a.group_rows;
    }
    return group < rows;
  }
  __device__ void next() { within += gridDim.x / Tile::cluster; }

  // The first row and column of this block's tile.
  __device__ void locate(u32& row, u32& column) const {
    column = within / rows_of_group();
    row = group + within - column * rows_of_group() + a.first_row;
    if (row >= rows) row -= rows;
    row *= height;
    column *= Tile::columns;
    if constexpr (Tile::cluster > 1) row += block_in_cluster() * Tile::rows;
  }
};

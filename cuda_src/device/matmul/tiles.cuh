// The tiles of a matmul's result, and the order in which a grid computes them.
#pragma once
#include "device/arguments.cuh"
#include "device/ptx/tensor_map.cuh"

constexpr u32 row_nbytes = 128;  // of a box
template <class T>
constexpr u32 depth_of = row_nbytes / sizeof(typename T::Storage);  // of K in a place, whose elements are of type T
constexpr u32 tile_depth = 64;                                      // the same of 16-bit elements
constexpr u32 box_nbytes = 64 * row_nbytes;

enum OperandLayout { by_rows, by_columns };  // of W: [N, K], [K, N]

// M x N elements of C, of a block in a cluster of `Cluster`, with `Stages` places in the ring. A consumer warpgroup has
// 64 rows: a warpgroup tile. With `Alternating` two consumers compute separate tiles, all rows in blocks of 64, so that
// one multiplies while the other finishes a tile. Shared memory holds two finished boxes of each consumer, one of each
// of three consumers, or with `Whole` the whole tile; with `Partials` in fp32. K is added in `Leaves` leaves
// (leaf_tree.cuh), which the `Split` blocks of a cluster compute together.
template <int M, int N, int Stages, int Cluster, bool Whole = false, bool Alternating = false, int Leaves = 1,
          int Split = 1, bool Partials = false>
struct MatmulTile {
  static constexpr int rows = M, columns = N, stages = Stages, cluster = Cluster;
  static constexpr int row_blocks = Alternating ? M / 64 : 1;  // of a consumer, 64 rows each
  static constexpr int warpgroups = M / 64 / row_blocks, turns = Alternating ? 2 : 1, consumers = warpgroups * turns;
  static constexpr int split = Split, blocks = Cluster * Split;  // of a cluster
  static_assert(Split == 1 || (Cluster == 1 && !Alternating));
  static constexpr int leaves = Leaves, own_leaves = Leaves / Split;  // of the tile, and of one block
  static constexpr int nodes = 1 + (own_leaves > 1) + (own_leaves > 2) + (own_leaves > 4);  // at the same time
  // Whether one of the nodes waits in shared memory: at most so many sums of a thread fit in its registers.
  static constexpr bool spills = nodes * N / 2 > 192;
  static_assert(Leaves == 1 || consumers <= 2);
  static_assert(Split == 1 || (Leaves % Split == 0 && !spills));
  static constexpr int boxes = (N + 63) / 64;
  static constexpr int staged = Partials              ? 2 * boxes
                                : spills || Split > 1 ? N / 32
                                : Whole || boxes < 2  ? boxes
                                : consumers > 2       ? 1
                                                      : 2;
  static constexpr bool swapped = false;
  static constexpr u32 a_nbytes = M * row_nbytes, w_nbytes = N * row_nbytes, place_nbytes = a_nbytes + w_nbytes;

  // A consumer computes every `turns`-th tile of its block, from tile `turn` on, and in it warpgroup tile `warpgroup`.
  __device__ static constexpr u32 turn(u32 consumer) { return consumer / warpgroups; }
  __device__ static constexpr u32 warpgroup(u32 consumer) { return consumer % warpgroups; }
};

// The tiles of a block, in the order of the whole grid. `group_rows` rows of tiles are walked at a time, column by
// column, so that tiles computed at one time share operands in L2. A row of tiles is as high as a cluster. No group
// crosses row `border`. With leaves a grid computes a part of the tiles: those from `first_tile` on, before `end_tile`.
template <class Tile>
struct Walk {
  const MatmulArguments& a;
  static constexpr u32 height = Tile::rows * Tile::cluster;
  const u32 rows = (a.m + height - 1) / height, border = rows;
  const u32 columns = (a.n + Tile::columns - 1) / Tile::columns;
  u32 number = (Tile::leaves > 1 ? a.first_tile : 0) + blockIdx.x / Tile::blocks;
  u32 group = 0, within = number;  // the first row of the group, and the tile in it

  __device__ u32 rows_of_group() const { return min(a.group_rows, (group < border ? border : rows) - group); }

  // Whether a tile is left. Finds its group.
  __device__ bool more() {
    if (Tile::leaves > 1 && number >= a.end_tile) return false;
    while (group < rows && within >= rows_of_group() * columns) {
      within -= rows_of_group() * columns;
      group += rows_of_group();
    }
    return group < rows;
  }
  __device__ void next(u32 tiles = 1) {
    number += tiles * (gridDim.x / Tile::blocks);
    within += tiles * (gridDim.x / Tile::blocks);
  }

  // The first row and column of this block's tile.
  __device__ void locate(u32& row, u32& column) const {
    column = within / rows_of_group();
    row = (group + within - column * rows_of_group()) * height;
    column *= Tile::columns;
    if constexpr (Tile::cluster > 1) row += block_in_cluster() * Tile::rows;
  }
};

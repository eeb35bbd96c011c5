// Stores the tiles of a matmul into C (sm_90a only).
#pragma once
#include "device/matmul/pipeline.cuh"

// By a consumer warpgroup: its rows of a tile, as elements of type T, through boxes in shared memory.
template <class T, class Tile>
struct TileStore {
  const MatmulArguments& a;
  const Ring<Tile>& ring;
  const u32 index;  // of the warpgroup among the consumers
  const bool leader = threadIdx.x % 128 == 0;

  // `row` and `column` are the tile's first ones in `c`.
  __device__ void store(const TensorMap& c, SumsOf<Tile>& sums, u32 row, u32 column) const {
    for (int block = 0; block < Tile::row_blocks; ++block)
      store_block(c, sums_of_block<Tile>(sums, block), row + 64 * (Tile::warpgroup(index) + block), column);
  }

  // After the last tile.
  __device__ void wait() const {
    if (leader) wait_for_bulk_stores();
  }

 private:
  static constexpr int box_columns = row_nbytes / sizeof(typename T::Storage);
  static constexpr int boxes = (Tile::columns + box_columns - 1) / box_columns;

  // Stores 64 rows box by box, each to a place that was read. The first barrier follows reads of sums (leaf_tree.cuh).
  __device__ void store_block(const TensorMap& c, const float (&sums)[Tile::columns / 2], u32 row, u32 column) const {
    const u32 barrier = 1 + index;
    for (int box = 0; box < boxes; ++box) {
      // The last box of a tile that is not a whole number of boxes wide repeats columns of the box before.
      const int first = min(box_columns * box, max(Tile::columns - box_columns, 0));
      char* const place = ring.staging + (index * Tile::staged + box % Tile::staged) * box_nbytes;
      if (box == 0 || box >= Tile::staged) {
        if (leader && box == 0) wait_for_bulk_sources<0>();
        if (leader && box > 0) wait_for_bulk_sources<Tile::staged - 1>();
        sync_warpgroup(barrier);
      }
      if constexpr (box_columns == 64)
        round_box<T>(sums, first, place);
      else
        write_box(sums, first, place);
      fence_async_proxy_shared();
      sync_warpgroup(barrier);
      if (!leader) continue;
      tensor_store(c, column + first, row, place);
      commit_bulk_stores();
    }
  }
};

// Stores finished tiles of a matmul into C (sm_90a only).
#pragma once
#include "device/matmul/pipeline.cuh"

// By a consumer warpgroup: its 64 rows of a tile, rounded, through boxes in shared memory.
template <class T, class Tile>
struct TileStore {
  const MatmulArguments& a;
  const Ring<Tile>& ring;
  const u32 index;  // of the warpgroup among the consumers
  const bool leader = threadIdx.x % 128 == 0;

  // Stores box by box. A place of the staging is overwritten once its last box has been read. `row` and `column` are
  // the tile's first ones in `c`.
  __device__ void store(const TensorMap& c, const float (&sums)[Tile::columns / 2], u32 row, u32 column) const {
    const u32 barrier = 1 + index;
#pragma unroll
    for (int box = 0; box < Tile::boxes; ++box) {
      // The last box of a tile that is no multiple of 64 columns wide repeats columns of the box before.
      const int first = min(64 * box, max(Tile::columns - 64, 0));
      char* const place = ring.staging + (index * Tile::staged + box % Tile::staged) * box_nbytes;
      if (box == 0 || box >= Tile::staged) {
        if (leader && box == 0) wait_for_bulk_sources<0>();
        if (leader && box > 0) wait_for_bulk_sources<Tile::staged - 1>();
        sync_warpgroup(barrier);
      }
      round_box<T>(sums, first, place);
      fence_async_proxy_shared();
      sync_warpgroup(barrier);
      if (!leader) continue;
      tensor_store(c, column + first, row + 64 * index, place);
      commit_bulk_stores();
    }
  }

  // After the last tile.
  __device__ void wait() const {
    if (leader) wait_for_bulk_stores();
  }
};

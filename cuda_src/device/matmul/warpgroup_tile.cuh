// Warpgroup tiles on their way between ranks: the 64 rows of a tile that one warpgroup computes (sm_90 and newer). A
// warpgroup tile is boxes of 64 x 64 elements. A slot has a place of 8 KB for every box of a rank's rows. With partials
// in fp32 a box takes two places, so a slot has room for half as many of them. Flags stay where they are, and there are
// more of them than boxes. The bytes in a place are described in tile_travel.cuh.
//
//   scratch: the signal pad, whose row 0 holds the call that each rank has entered
//            partial, for this rank's rows:
//              flags[N - 1][capacity]   by source, the next rank first: at a warpgroup tile's first box, 1 once sent
//              boxes[N - 1][capacity]   the source's products, from place `box * Travel::places` of a slot on
//            finished, for the sources' rows, where ranks gather the sums: flags and boxes again
//
// (10) A warpgroup tile travels by bulk stores of one thread, which then sets its flag to 1. The reader clears it.
//     - Visibility. The thread waits until its stores are complete (not only read): by (5) they then count as its own
//       writes, and the release store of the flag, by it or after a barrier of its warp, publishes them. A warp
//       acquires the flags of a warpgroup tile, and after a barrier of its own arrives at an mbarrier. Release and
//       acquire are cumulative, so threads that wait for that mbarrier read with plain loads (20). So do the warp's own
//       threads, where it gathers.
//     - Reuse. Once a kernel has ended, its flags are 0 and its tiles are read. Before its first store a sender waits
//       until all ranks have entered the call, so by (13) their kernels before have ended. It then fences, as (5)
//       demands of copies that overwrite what was read. So any shapes and tiles may follow one another.
//     - Progress. A tile is computed by the blocks of one index on all ranks, and gathered by them, so that a block
//       waits for the blocks of its index alone; (18) says why that is enough. A block computes the rows of other
//       owners first, and that waits for nobody but for ranks to enter, which block 0 does before all else. It waits
//       for partial tiles after that. Finished tiles are waited for by warps for which nobody waits, and with more
//       patience: their source may wait for partial tiles itself, and the record shall name the rank that did not come.
//       Results are right with any grids and tiles, but ranks need equal ones to have their tiles in the same blocks.
//       Ranks with different K may take different tiles (plan.matmuls.tile_for).
//     - Timeouts. Once a wait has expired, its rank enters no further call and neither sends nor reads: flags left at 1
//       mislead nobody, and its peers' waits expire in turn.
#pragma once
#include "device/matmul/tiles.cuh"
#include "device/sync/signal_pad.cuh"

enum Area { partial, finished };

struct WarpgroupTile {
  u32 row, column;  // the first ones; the row is counted from its owner's first
  u32 box;          // the place of its first box in a slot
};

// A box of a warpgroup tile in the output, which is [m, n] without gaps, of 16-bit elements.
struct Box {
  u16* output;        // its first element
  u32 rows, columns;  // of its owner from there on, in this box and beyond; columns may be 0
  u32 column;         // its first
};

DEVICE Box box_of(const MatmulArguments& m, const Arguments& a, int owner, const WarpgroupTile& tile, int box) {
  const u32 column = tile.column + 64 * box;
  u16* const output = static_cast<u16*>(a.output) + (a.begin[owner] + tile.row) * m.n + column;
  return {output, u32(a.count[owner]) - tile.row, column < m.n ? m.n - column : 0, column};
}

// By all threads: finds the first of each owner's tiles that is this block's. The tiles of all owners, rank 0's first,
// are dealt to the clusters of the grid in turn, so that a tile is computed by the same block on every rank.
template <class Tile, int N>
DEVICE void deal_tiles(const MatmulArguments& m, const Arguments& a, u32 (&first)[max_ranks]) {
  if (threadIdx.x >= N) return;
  constexpr u32 height = Tile::rows * Tile::cluster;
  const u32 clusters = gridDim.x / Tile::cluster, columns = (m.n + Tile::columns - 1) / Tile::columns;
  u32 before = 0;
#pragma unroll 1
  for (int owner = 0; owner < threadIdx.x; ++owner) before += (u32(a.count[owner]) + height - 1) / height * columns;
  first[threadIdx.x] = (blockIdx.x / Tile::cluster + clusters - before % clusters) % clusters;
}

// The tiles of a block, owner by owner: the next rank's rows first, this rank's own last.
template <class Tile, int N>
struct WalkByOwner {
  const MatmulArguments& m;
  const Arguments& a;
  const u32 (&first)[max_ranks];  // from deal_tiles
  int hop = 1;
  u32 index = first[owner()];  // among the tiles of this owner; a row of tiles is as high as a cluster
  static constexpr u32 height = Tile::rows * Tile::cluster;

  __device__ bool own() const { return hop == N; }
  __device__ int owner() const { return (a.rank + hop) % N; }
  __device__ u32 rows() const { return (u32(a.count[owner()]) + height - 1) / height; }
  __device__ u32 columns() const { return (m.n + Tile::columns - 1) / Tile::columns; }
  __device__ u32 tiles() const { return rows() * columns(); }
  __device__ static u32 clusters() { return gridDim.x / Tile::cluster; }

  // Whether a tile is left. Finds its owner.
  __device__ bool more() {
    while (hop <= N && index >= tiles()) {
      // Two consumers that alternate step over one tile each, which may be the next owner's.
      const u32 beyond = index - tiles() < clusters() ? 0 : clusters();
      ++hop;
      index = first[owner()] + beyond;
    }
    return hop <= N;
  }
  __device__ void next(u32 tiles = 1) { index += tiles * clusters(); }

  // The tile's first row, counted from the owner's first, and column, in the order of Walk.
  __device__ void locate_in_part(u32& row, u32& column) const {
    const u32 group = index / (m.group_rows * columns()) * m.group_rows;
    const u32 within = index - group * columns(), rows_of_group = min(m.group_rows, rows() - group);
    column = within / rows_of_group;
    row = (group + within - column * rows_of_group) * height;
    column *= Tile::columns;
    if constexpr (Tile::cluster > 1) row += block_in_cluster() * Tile::rows;
  }

  // The same, the row counted from the first of A.
  __device__ void locate(u32& row, u32& column) const {
    locate_in_part(row, column);
    row += u32(a.begin[owner()]);
  }

  // Warpgroup tile `at` of the tile. False where its owner has no such rows.
  __device__ bool find(u32 at, WarpgroupTile& tile) const {
    locate_in_part(tile.row, tile.column);
    tile.row += 64 * at;
    tile.box = tile.row / 64 * ((m.n + 63) / 64) + tile.column / 64;
    return tile.row < a.count[owner()];
  }
};

// The flags and places of one area of the scratch on all ranks.
template <int N>
struct TileExchange {
  const Arguments& a;
  const Area area = partial;

  // The flag on rank `to` of a box from rank `from`.
  __device__ u32* flag(int to, int from, u32 box) const {
    return reinterpret_cast<u32*>(area_of(to)) + slot(to, from) + box;
  }
  // A place on rank `to` of the slot of rank `from`; a box may take several.
  __device__ char* place(int to, int from, u32 number) const {
    return area_of(to) + (N - 1) * a.capacity * sizeof(u32) + (slot(to, from) + number) * box_nbytes;
  }

  // By one warp, whose first thread stores later: waits until every peer has entered. False if one did not in time.
  __device__ bool wait_until_all_entered(const Call& call) const {
    const bool entered = ::wait_until_all_entered<N>(a, call);
    if (threadIdx.x % 32 == 0) fence_async_proxy_global();
    return entered;
  }

  // By one thread, once its stores of a warpgroup tile are complete.
  __device__ void announce(int to, u32 box) const { store_release_sys(flag(to, a.rank, box), 1); }

  // By one warp: waits for this tile of every peer, and resets its flags. False if one did not come in time.
  __device__ bool wait_for_partials(const Call& call, u32 box) const {
    const int hop = threadIdx.x % 32 + 1;
    const bool failed = hop < N && !wait_for_flag_of(call, (a.rank + hop) % N, box);
    __syncwarp();
    return !__any_sync(0xffffffff, failed);
  }

  __device__ bool wait_for_finished(const Call& call, int from, u32 box) const {
    const bool failed = threadIdx.x % 32 == 0 && !wait_for_flag_of(call, from, box);
    __syncwarp();
    return !__any_sync(0xffffffff, failed);
  }

 private:
  __device__ char* area_of(int rank) const {
    return reinterpret_cast<char*>(after_signal_pad(a, rank)) +
           area * (N - 1) * a.capacity * u64(sizeof(u32) + box_nbytes);
  }
  __device__ u64 slot(int to, int from) const { return u64((from - to + N) % N - 1) * a.capacity; }

  __device__ bool wait_for_flag_of(const Call& call, int from, u32 box) const {
    u32* const there = flag(a.rank, from, box);
    Deadline deadline;
    while (load_acquire_sys(there) == 0) {
      const Deadline::State state = deadline.check(a, call, area == finished ? 5 : 4);
      if (state == Deadline::waiting) continue;
      if (state == Deadline::expired) report(a, timed_out, call.epoch, from, 1, 0);
      return false;
    }
    store_relaxed_gpu(there, 0);
    return true;
  }
};

// The ring of places in shared memory that hold the next operands of a matmul (sm_90a only).
//
//   producer, one thread     A, W --TMA--> place i % stages     arrives at `filled`
//   consumers, warpgroups    place i % stages --wgmma--> sums   arrive at `emptied`
//
// (9) Use u of a place is phase u of its two mbarriers: `filled` (one arrival, and the bytes of the loads) and
//     `emptied` (an arrival of each consumer warp).
//     - A fill waits for `emptied` u - 1, where phase -1 of a new mbarrier counts as ended. A consumer waits for
//       `filled` u before it multiplies, and arrives at `emptied` u once a wait for those products has returned. So no
//       place is overwritten while it is read.
//     - Parities suffice: `filled` u + 1 needs a fill after `emptied` u, thus after every consumer's wait for `filled`
//       u has returned. `emptied` u + 1 needs `filled` u + 1, thus a fill after the wait for `emptied` u.
//     - Where consumers alternate (tiles.cuh) each use belongs to one of them, and its warps alone arrive. A consumer
//       begins to wait for its uses once the other has waited for all uses before them, so waits still come in the
//       order of uses.
//     - Loads write and products read through the async proxy, so no fence stands between them. The wait for `filled`
//       orders the loads before the products. Reads by products are over when the wait for the products returns.
//     - In a cluster each block's fill writes to the same place of all blocks, so `emptied` counts the consumer warps
//       of all. Another block's bytes for use u may come before this block's own arrival, but not before `filled` u - 1
//       has ended: they were sent after this block's consumers had arrived for use u - 1.
#pragma once
#include "device/matmul/tiles.cuh"

template <class Tile>
struct Position {
  u32 place = 0, use = 0;

  __device__ void next() {
    if (++place < Tile::stages) return;
    place = 0;
    ++use;
  }
  __device__ void skip(u32 count) {
    use += (place + count) / Tile::stages;
    place = (place + count) % Tile::stages;
  }
};

// In shared memory: the places (boxes of A, then of W), the staged boxes of each consumer, the mbarriers.
template <class Tile>
struct Ring {
  char* const places = dynamic_shared_boxes();
  char* const staging = places + Tile::stages * Tile::place_nbytes;
  Mbarrier* const filled = reinterpret_cast<Mbarrier*>(staging + Tile::consumers * Tile::staged * box_nbytes);
  Mbarrier* const emptied = filled + Tile::stages;

  __device__ void init() const {
    for (int i = 0; i < Tile::stages; ++i) {
      filled[i].init(1);
      emptied[i].init(4 * Tile::warpgroups * Tile::cluster);
    }
    fence_async_proxy_shared();
  }

  // By all threads, after init: makes the mbarriers, and nothing else (23), known to all blocks of the cluster.
  __device__ void share() const {
    if constexpr (Tile::blocks == 1)
      __syncthreads();
    else
      sync_cluster_mbarriers();
  }

  __device__ void wait_for_emptied(const Position<Tile>& at) const { emptied[at.place].wait(at.use - 1); }

  // By the producer, at the end: other blocks' consumers arrive at mbarriers of this block, which must not end before.
  __device__ void wait_for_cluster(Position<Tile> at) const {
    if constexpr (Tile::cluster > 1)
      for (int i = 0; i < Tile::stages; ++i, at.next()) wait_for_emptied(at);
  }

  __device__ char* a(u32 place) const { return places + place * Tile::place_nbytes; }
  __device__ char* w(u32 place) const { return a(place) + Tile::a_nbytes; }
};

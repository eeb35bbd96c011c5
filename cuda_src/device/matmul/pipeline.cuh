// The block of a matmul: a ring of places in its shared memory that hold the next operands, one thread that loads them,
// warpgroups that multiply them, and the way of finished tiles into C (sm_90a only).
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
#include "device/ptx/wgmma.cuh"

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

// Loads a box into all blocks of the cluster.
template <int Cluster>
DEVICE void load_for_cluster(char* to, const TensorMap& map, u32 x, u32 y, Mbarrier& filled) {
  if constexpr (Cluster == 1)
    tensor_load(to, map, x, y, filled);
  else
    tensor_load(to, map, x, y, filled, (1 << Cluster) - 1);
}

template <class Tile, OperandLayout W, class T = bf16>
struct Producer {
  const MatmulArguments& a;
  const TensorMap& a_map;
  const TensorMap& w_map;
  const Ring<Tile>& ring;

  // Loads this block's share of W for the cluster: a part of the columns, or of K if the columns are in several boxes.
  __device__ void load_w(u32 place, u32 column, u32 k) const {
    const u32 part = Tile::cluster > 1 ? block_in_cluster() : 0;
    if constexpr (W == by_rows) {
      constexpr u32 share = Tile::columns / Tile::cluster;
      load_for_cluster<Tile::cluster>(ring.w(place) + part * share * row_nbytes, w_map, k, column + part * share,
                                      ring.filled[place]);
    } else {
      static_assert(Tile::columns % 64 == 0);
      constexpr u32 share = tile_depth / Tile::cluster;
#pragma unroll
      for (int box = 0; box < Tile::boxes; ++box)
        load_for_cluster<Tile::cluster>(ring.w(place) + box * box_nbytes + part * share * row_nbytes, w_map,
                                        column + 64 * box, k + part * share, ring.filled[place]);
    }
  }

  // Loads K, or this block's part of it if the leaves are split, for a tile: `a_nbytes` of `rows_map` in each box.
  __device__ void load_tile(Position<Tile>& at, const TensorMap& rows_map, u32 a_nbytes, u32 row, u32 column) const {
    const u32 first = Tile::split > 1 ? block_in_cluster() * (a.k / Tile::split) : 0;
    for (u32 k = first; k < first + a.k / Tile::split; k += depth_of<T>, at.next()) {
      ring.wait_for_emptied(at);
      ring.filled[at.place].arrive_and_expect(a_nbytes + Tile::w_nbytes);
      tensor_load(ring.a(at.place), rows_map, k, row, ring.filled[at.place]);
      load_w(at.place, column, k);
    }
  }

  // Bytes of a box of A, without most rows outside of it: the copy engine is slow for them. Old values are harmless.
  __device__ static u32 a_nbytes_of(u32 rows) { return min(u32(Tile::rows), (rows + 7) / 8 * 8) * row_nbytes; }

  template <class Tiles>
  __device__ void run(Tiles walk) const {
    const u32 a_nbytes = a_nbytes_of(a.m);
    Position<Tile> at;
    for (; walk.more(); walk.next()) {
      u32 row, column;
      walk.locate(row, column);
      load_tile(at, a_map, a_nbytes, row, column);
    }
    ring.wait_for_cluster(at);
  }
};

// What a thread of a consumer holds, for each block of 64 rows.
template <class Tile>
using SumsOf = float[Tile::row_blocks * Tile::columns / 2];

template <class Tile>
DEVICE auto& sums_of_block(SumsOf<Tile>& sums, int block) {
  return reinterpret_cast<float(&)[Tile::columns / 2]>(sums[block * Tile::columns / 2]);
}

// Where an operand of wgmma lies in shared memory, in boxes (tensor_map.cuh): a "matrix descriptor" of PTX. By rows of
// 64 elements of K: 8 rows are 1024 bytes, and the next 8 follow. By columns: boxes of 64 of K, each a row of 64
// columns; the next 64 columns are the next box. Parts of an operand lie `offset` bytes further, also inside the
// swizzled 128.
template <OperandLayout Layout>
DEVICE u64 operand(const void* shared) {
  constexpr u64 swizzle_128_bytes = u64(1) << 62, stride_nbytes = 1024,
                leading_nbytes = Layout == by_rows ? 16 : box_nbytes;
  return swizzle_128_bytes | stride_nbytes >> 4 << 32 | leading_nbytes >> 4 << 16 |
         (shared_address(shared) & 0x3ffff) >> 4;
}
DEVICE u64 advance(u64 operand, u32 offset) { return operand + (offset >> 4); }

// A warpgroup that multiplies its rows of each tile. Operands lie in boxes, as in the matrices they come from.
template <class T, class Tile, OperandLayout W, OperandLayout A = by_rows>
struct Multiplier {
  static constexpr u32 depth = depth_of<T>, k_step = depth / 4;
  static_assert(sizeof(typename T::Storage) == 2 || (A == by_rows && W == by_rows), "wgmma transposes 16 bits");
  static constexpr u32 a_step = A == by_rows ? row_nbytes / 4 : k_step * row_nbytes;
  static constexpr u32 w_step = W == by_rows ? row_nbytes / 4 : k_step * row_nbytes;
  const MatmulArguments& a;
  const Ring<Tile>& ring;
  const u32 index;  // of the warpgroup among the consumers
  const u32 lane = threadIdx.x % 32;

  __device__ void release(u32 place) const {
    if constexpr (Tile::cluster == 1) {
      if (lane == 0) ring.emptied[place].arrive();
    } else {
      if (lane < Tile::cluster) ring.emptied[place].arrive_at(lane);
    }
  }

  using Sums = SumsOf<Tile>;

  __device__ void multiply(Position<Tile>& at, Sums& sums) const { finish(sums, queue(at, sums)); }

  // All of K, for one tile. One group of products is always queued behind the running one. Returns the last place.
  __device__ u32 queue(Position<Tile>& at, Sums& sums) const {
    const Operands operands = first_operands();
    u32 before = 0;
    for (u32 k = 0; k < a.k; k += depth, at.next()) {
      queue_place(operands, at, sums, k);
      wait_for_all_but_last_products();
      if (k > 0) release(before);
      before = at.place;
    }
    return before;
  }

  // In place 0 of the ring.
  struct Operands {
    u64 rows, columns;
  };
  DEVICE Operands first_operands() const {
    const char* const mine = ring.a(0) + Tile::warpgroup(index) * box_nbytes;
    return {operand<A>(mine), operand<W>(ring.w(0))};
  }

  // Queues a group: the products of a place whose first column of K is `k`. Sums begin at zero where `k` is 0.
  DEVICE void queue_place(const Operands& operands, const Position<Tile>& at, Sums& sums, u32 k) const {
    const auto [rows, columns] = operands;
    ring.filled[at.place].wait(at.use);
    const u32 place = at.place * Tile::place_nbytes;
    fence_sums();
#pragma unroll
    for (u32 step = 0; step < depth / k_step; ++step)
#pragma unroll
      for (int block = 0; block < Tile::row_blocks; ++block)
        Product<Tile::columns, A == by_columns, W == by_columns>::add(
            T{}, sums_of_block<Tile>(sums, block), advance(rows, place + block * box_nbytes + step * a_step),
            advance(columns, place + step * w_step), k + step == 0);
    commit_products();
  }

  __device__ void finish(Sums& sums, u32 last) const {
    wait_for_products(sums);
    release(last);
  }
};

// Consumers that alternate take the tiles of a block in turn.
template <class Tile>
struct Turns {
  Mbarrier queued[Tile::consumers];  // phase k: all products of the consumer's k-th tile are queued

  __device__ void init() {
    if constexpr (Tile::turns > 1)
      for (int i = 0; i < Tile::consumers; ++i) queued[i].init(4);
  }

  // By a consumer: all of K, for its tile `number`. Consumers that alternate wait for each other's products. Otherwise
  // one could mistake operands loaded for the other for its own, as only the parity distinguishes a place's uses (9).
  template <class Multiplier>
  __device__ void multiply(const Multiplier& multiplier, Position<Tile>& at, SumsOf<Tile>& sums, u32 number) {
    if constexpr (Tile::turns == 1) {
      multiplier.multiply(at, sums);
    } else {
      const u32 index = multiplier.index;
      if (index + number > 0) at.skip((multiplier.a.k + Multiplier::depth - 1) / Multiplier::depth);
      queued[1 - index].wait(index + number - 1);
      const u32 last = multiplier.queue(at, sums);
      if (multiplier.lane == 0) queued[index].arrive();
      multiplier.finish(sums, last);
    }
  }
};

// Rounds 64 x 64 sums, from `column` of the tile on, into a swizzled box.
template <class T, int Count>
DEVICE void round_box(const float (&sums)[Count], int column, char* to) {
  const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int chunk = 0; chunk < 8; chunk += 2) {
    u32 words[4];
    for (int i = 0; i < 4; ++i) words[i] = T::round(sums + (column / 8 + chunk) * 4 + i * 2);
    store_matrices(to + row * row_nbytes + ((chunk + lane / 16) ^ row % 8) * 16, words);
  }
}

// Writes 64 x 32 sums, from `column` of the tile on, into a swizzled box of fp32.
template <int Count>
DEVICE void write_box(const float (&sums)[Count], int column, char* to) {
  const u32 lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  for (int pair = 0; pair < 8; ++pair) {
    const int i = column / 2 + pair * 2;
    const u32 at = row + pair % 2 * 8, chunk = pair / 2 * 2 + lane % 4 / 2;
    *reinterpret_cast<u64*>(to + at * row_nbytes + (chunk ^ at % 8) * 16 + lane % 2 * 8) =
        u64(__float_as_uint(sums[i + 1])) << 32 | __float_as_uint(sums[i]);
  }
}

// Sums that stay in fp32 are a rank's partials, which get no bias.
template <class T, int Count>
DEVICE void add_bias(const MatmulArguments& a, u32 column, float (&sums)[Count]) {
  if (sizeof(typename T::Storage) == sizeof(float) || a.bias == nullptr) return;
  const auto* bias = static_cast<const typename T::Storage*>(a.bias);
#pragma unroll
  for (int i = 0; i < Count; i += 4) {
    for (int j = 0; j < 2; ++j) {
      const u32 at = column + 2 * i + threadIdx.x % 4 * 2 + j;
      float b[2];
      T::unpack(at < a.n ? bias[at] : 0, b);
      sums[i + j] += b[0];
      sums[i + 2 + j] += b[0];
    }
  }
}

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

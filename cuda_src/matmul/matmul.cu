// matmul: C[M, N] = A[M, K] * W^T + bias, where W is [N, K] as torch.nn.Linear stores it, or its transpose, [K, N].
//
//   a block walks tiles of C; a ring of places in its shared memory holds the next 128 bytes of K of both operands:
//     producer, one thread     A, W --TMA--> ring[i % stages]
//     consumer, a warpgroup    ring[i % stages] --wgmma--> fp32 sums in registers
//                              sums --round--> boxes of 64 x 64 in shared memory --TMA--> C
//   blocks of a cluster have tiles below each other, and each loads a share of W for all of them
//
// The producer runs ahead across tiles. A grid of any size walks all tiles: the caller chooses how many SMs it takes.
// Products are added in the order of K, so the bits of C depend on A and W alone; or in leaves of K (leaf_tree.cuh),
// which the blocks of a cluster may split. Operands in e4m3 have scales (scaled_products.cuh).
#include "device/matmul/leaf_tree.cuh"
#include "device/matmul/scaled_products.cuh"

// A warpgroup that computes 64 rows of each tile, or with consumers that alternate all of every second tile.
template <class T, class Tile, OperandLayout W, class Result>
__device__ void consume(const MatmulArguments& a, const TensorMap& c, const Ring<Tile>& ring, Turns<Tile>& turns,
                        u32 index) {
  const Multiplier<T, Tile, W> multiplier{a, ring, index};
  const TileStore<Result, Tile> tiles{a, ring, index};
  const NodeExchange<Tile, Result> exchange{a, ring, index};
  Position<Tile> at;
  Walk<Tile> walk{a};
  u32 number = 0;
  for (walk.next(Tile::turn(index)); walk.more(); walk.next(Tile::turns)) {
    SumsOf<Tile> sums;
    u32 row, column;
    if constexpr (Tile::split > 1) exchange.free_places(number);
    if constexpr (Tile::leaves > 1)
      LeafTree<Multiplier<T, Tile, W>, Tile>{multiplier}.multiply(at, sums);
    else
      turns.multiply(multiplier, at, sums, number++);
    walk.locate(row, column);
    if constexpr (Tile::split > 1) {
      exchange.store(sums, row, column, number++);
    } else {
      for (int block = 0; block < Tile::row_blocks; ++block)
        add_bias<Result>(a, column, sums_of_block<Tile>(sums, block));
      tiles.store(c, sums, row, column);
    }
  }
  tiles.wait();
}

// The same of operands with scales. While a tile is stored, the first scales of the next one are on their way from L2.
template <class T, class Tile, class Result, class Scales>
__device__ void consume_scaled(const ScaledMatmulArguments& a, const TensorMap& c, const Ring<Tile>& ring, u32 index) {
  using Products = ScaledProducts<Multiplier<T, Tile, by_rows>, Tile, Scales>;
  const Multiplier<T, Tile, by_rows> multiplier{a, ring, index};
  const TileStore<Result, Tile> tiles{a, ring, index};
  Position<Tile> at;
  Walk<Tile> walk{a};
  typename Products::OfTile scales;
  u32 row = 0, column = 0;
  const auto find_tile = [&] {
    if (!walk.more()) return false;
    walk.locate(row, column);
    Products{multiplier, a, row, column}.load(scales);
    walk.next();
    return true;
  };
  for (bool has_tile = find_tile(); has_tile;) {
    SumsOf<Tile> sums;
    const u32 first_row = row, first_column = column;
    Products{multiplier, a, row, column}.multiply(at, sums, scales);
    has_tile = find_tile();
    add_bias<Result>(a, first_column, sums);
    tiles.store(c, sums, first_row, first_column);
  }
  tiles.wait();
}

// A kernel that is launched early puts two blocks on each SM that is free first, and leaves others idle. The sum of a C
// with this many elements or more loses more time by that than it gains (reports/h200x2/notes.md).
constexpr u64 early_numel = 3 << 20;

template <class T, class Tile, OperandLayout W, class Result, class Scales = Unscaled>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    matmul(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
           const __grid_constant__ TensorMap c_map, const __grid_constant__ typename Scales::Arguments a) {
  const Ring<Tile> ring;
  auto& turns = static_shared<Turns<Tile>>();
  if (threadIdx.x == 0) {
    prefetch(a_map);
    prefetch(w_map);
    prefetch(c_map);
    turns.init();
    NodeExchange<Tile, Result>::init(ring);
    ring.init();
  }
  ring.share();
  wait_for_previous_kernel();
  const u32 warpgroup = same_in_warp(threadIdx.x / 128);
  if (warpgroup == 0) {
    if constexpr (Tile::consumers == 2) shrink_registers<40>();
    if (threadIdx.x < 32 && elected()) {
      fence_async_proxy_global();  // the kernel before may have written A
      Producer<Tile, W, T>{a, a_map, w_map, ring}.run(Walk<Tile>{a});
      if (u64(a.m) * a.n < early_numel) release_next_kernel();
    }
  } else {
    if constexpr (Tile::consumers == 2) grow_registers<232>();
    if constexpr (is_scaled<Scales>)
      consume_scaled<T, Tile, Result, Scales>(a, c_map, ring, warpgroup - 1);
    else
      consume<T, Tile, W, Result>(a, c_map, ring, turns, warpgroup - 1);
  }
}

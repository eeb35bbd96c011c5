// allgather_matmul: the rows of all ranks times W^T, + bias or epilogue, as in matmul.cu; if wanted also the rows.
//
//   rank r: senders, two warps   A ---> scratch[p].slot[r] on every peer p, a few rows at a time, then their flag
//           arrivals, one warp   waits for the flags of the rows of a peer's tile, and tells the producer
//           producer, a thread   A, scratch[r].slot[p], W --TMA--> ring[i % stages]
//           consumers            ring[i % stages] --wgmma--> fp32 sums, + bias or epilogue --round--> C
//           senders, at the end  A, scratch[r].slot[p] -> output, if the gathered rows are wanted
//
// A block multiplies this rank's own rows first, while the links carry rows. Gives the bits of an all-gather followed
// by a matmul. Rows of e4m3 travel with their scales. Ordering between ranks: (21) in gathered_rows.cuh.
#include "device/epilogue.cuh"
#include "device/matmul/gathered_rows.cuh"

template <int N>
struct RowsOfRanks {
  TensorMap of[N];
};

struct GatheredSharedStorage {
  Mbarrier call_known;  // phase 0: `call` has been read
  Mbarrier arrived;     // phase k: the rows of the block's k-th tile of peers' rows are here
  Mbarrier awaited;     // phase k: the producer has waited for that. So `arrived` is at most a phase ahead.
  Call call;
};

// By the first warp of a block.
template <class Tile, class Rows>
__device__ void begin_and_await_rows(const Rows& rows, const Arguments& a, GatheredSharedStorage& shared) {
  const bool first = threadIdx.x == 0;
  const Call call = begin_call_in_warp(a);
  if (!call.aborted && blockIdx.x == 0) {
    rows.clear_next_call(call);
    enter<Rows::ranks>(a, call);
  }
  if (first) {
    shared.call = call;
    shared.call_known.arrive();
  }
  __syncwarp();
  bool failed = call.aborted;
  GatheredTile tile;
  GatheredWalk<Tile, Rows::ranks> walk(rows.m, a);
  for (u32 number = 0; walk.next(tile);) {
    if (tile.owner == a.rank) continue;
    // In a cluster a tile may lie below the rows: then consumers load the scales of the last one.
    const u32 row = Rows::scaled ? min(tile.row, u32(a.count[tile.owner]) - 1) : tile.row;
    failed = failed || !rows.wait(call, tile.owner, row, Tile::rows);
    if (!first) continue;
    shared.awaited.wait(number - 1);
    shared.arrived.arrive();
    ++number;
  }
}

// By one thread.
template <class T, class Tile, int N, OperandLayout W>
__device__ void produce(const MatmulArguments& m, const Arguments& a, const RowsOfRanks<N>& a_maps,
                        const TensorMap& w_map, const Ring<Tile>& ring, GatheredSharedStorage& shared) {
  fence_async_proxy_global();  // the kernel before may have written this rank's rows
  const Producer<Tile, W, T> producer{m, a_maps.of[0], w_map, ring};
  Position<Tile> at;
  GatheredTile tile;
  GatheredWalk<Tile, N> walk(m, a);
  for (u32 number = 0; walk.next(tile);) {
    if (tile.owner != a.rank) {
      shared.arrived.wait(number);
      shared.awaited.arrive();
      fence_async_proxy_global();
      ++number;
    }
    const u32 a_nbytes = producer.a_nbytes_of(a.count[tile.owner]);
    producer.load_tile(at, a_maps.of[tile.owner], a_nbytes, tile.row, tile.column);
  }
  ring.wait_for_cluster(at);
}

template <class T, class Tile, int N, OperandLayout W, class Expression, class Scales>
__device__ void consume(const typename Scales::Arguments& m, const Arguments& a, const RowsOfRanks<N>& c_maps,
                        const Ring<Tile>& ring, u32 index) {
  using Operand = typename Scales::template Operand<T>;
  const Multiplier<Operand, Tile, W> multiplier{m, ring, index};
  const TileStore<T, Tile> tiles{m, ring, index};
  const GatheredRows<Operand, N, Scales> rows(m, a);
  Position<Tile> at;
  GatheredTile tile;
  for (GatheredWalk<Tile, N> walk(m, a); walk.next(tile);) {
    float sums[Tile::columns / 2];
    if constexpr (is_scaled<Scales>) {
      ring.filled[at.place].wait(at.use);
      const auto of_owner = rows.of_rows(tile.owner);
      ScaledProducts<Multiplier<Operand, Tile, W>, Tile, Scales>{multiplier, of_owner, tile.row, tile.column}.multiply(
          at, sums);
    } else {
      multiplier.multiply(at, sums);
    }
    if constexpr (are_same<Expression, Identity>) {
      add_bias<T>(m, tile.column, sums);
    } else {  // whose indices are those in the product of all ranks' rows
      const u32 begin = a.begin[tile.owner], end = begin + a.count[tile.owner];
      apply_to_rows<Expression>(a.epilogue, begin + tile.row + 64 * index, end, tile.column, m.n, sums);
    }
    tiles.store(c_maps.of[tile.owner], sums, tile.row, tile.column);
  }
  tiles.wait();
}

template <class T, int N, class Tile, OperandLayout W, class Expression = Identity, class Scales = Unscaled>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    allgather_matmul(const __grid_constant__ RowsOfRanks<N> a_maps, const __grid_constant__ TensorMap w_map,
                     const __grid_constant__ RowsOfRanks<N> c_maps,
                     const __grid_constant__ typename Scales::Arguments m, const __grid_constant__ Arguments a) {
  using Operand = typename Scales::template Operand<T>;
  const Ring<Tile> ring;
  auto& shared = static_shared<GatheredSharedStorage>();
  if (threadIdx.x == 0) {
    prefetch(w_map);
    if (a.count[a.rank] != 0) {  // a rank without rows has no maps of them
      prefetch(a_maps.of[a.rank]);
      prefetch(c_maps.of[a.rank]);
    }
    shared.call_known.init(1);
    shared.arrived.init(1);
    shared.awaited.init(1);
    ring.init();
  }
  ring.share();
  wait_for_previous_kernel(a);
  const u32 warp = same_in_warp(threadIdx.x / 32);
  if (warp >= 4) {
    if constexpr (Tile::consumers == 2) grow_registers<is_scaled<Scales> ? 224 : 208>();
    consume<T, Tile, N, W, Expression, Scales>(m, a, c_maps, ring, warp / 4 - 1);
  } else {
    if constexpr (Tile::consumers == 2) shrink_registers<is_scaled<Scales> ? 56 : 88>();
    if (warp == 0) {
      begin_and_await_rows<Tile>(GatheredRows<Operand, N, Scales>(m, a), a, shared);
    } else if (warp == 3) {
      if (elected()) produce<Operand, Tile, N, W>(m, a, a_maps, w_map, ring, shared);
      __syncwarp();
    } else {
      shared.call_known.wait(0);
      const GatheredRows<Operand, N, Scales> rows(m, a);
      if (!shared.call.aborted && wait_until_all_entered<N>(a, shared.call)) {
        rows.send(shared.call);
        if (a.output != nullptr) rows.gather(shared.call, 2 * blockIdx.x + warp - 1, 2 * gridDim.x);
      }
    }
  }
  end_call(a, shared.call);
}

// The warps of a matmul whose result is summed over ranks tile by tile, this rank's own rows last.
//
//   warps               role, where C is the number of consumers, 1 or 2
//   0                   begins the call, for the whole block
//   0 .. C - 1          sender of consumer 0 .. C - 1
//   C                   producer, one thread
//   0 .. 3              with all_reduce gatherers, once they have nothing else to do
//   warpgroup 1 .. C    consumer 0 .. C - 1: multiplies, adds the peers' partial tiles to its own rows, stages boxes
//
//   mbarrier            one phase                 arrivals of a phase           who waits
//   call_known          the call                  1: thread 0                   first warpgroup
//   of each consumer, beside the ring's (9) and the mbarriers of Turns:
//     staged[box]       its warpgroup tile        4: its warps                  its sender, one thread
//     sent              its warpgroup tile        1: its sender                 itself, before it stages the next
//     arrived           one in its rank's rows    1: its sender                 itself, before it adds partial tiles
//
// What travels between ranks, and in which order, is in warpgroup_tile.cuh, (10).
#pragma once
#include "device/epilogue.cuh"
#include "device/matmul/leaf_tree.cuh"
#include "device/matmul/scaled_products.cuh"
#include "device/matmul/tile_travel.cuh"

template <class Tile>
struct Handover {
  Mbarrier staged[Tile::boxes], sent, arrived;

  __device__ void init() {
    for (int i = 0; i < Tile::boxes; ++i) staged[i].init(4);
    sent.init(1);
    arrived.init(1);
  }
};

template <class Tile>
struct SummedSharedStorage {
  Handover<Tile> handover[Tile::consumers];
  Turns<Tile> turns;
  Mbarrier call_known;  // phase 0: `call` has been read
  Call call;
  u32 taken;             // warpgroup tiles of the peers that gathering warps have taken
  u32 first[max_ranks];  // of each owner's tiles, the first that is this block's
};

template <class Travel, class Tile>
DEVICE char* staged_box(const Ring<Tile>& ring, u32 consumer, int box) {
  static_assert(Tile::staged == Tile::boxes * Travel::places && !Tile::spills);
  return ring.staging + (consumer * Tile::boxes + box) * Travel::places * box_nbytes;
}

// With all_reduce each rank also sends its sums to all others.
enum Collective { reduce_scatter, all_reduce };

// `T`: the type of the result. `Travel`: the form in which warpgroup tiles travel, AsElements, AsPartials or AsCodes.
// `Scales`: of operands in e4m3, RowScales or BlockScales, which multiply sums before they are rounded; or Unscaled.
template <class T, int N, class Tile, OperandLayout W, Collective Op, class Expression, class Travel, class Scales>
struct Consumer {
  static constexpr bool sum_is_coded = Op == all_reduce && Travel::coded;
  using Products = Multiplier<typename Scales::template Operand<T>, Tile, W>;
  const typename Scales::Arguments& m;
  const Arguments& a;
  const Ring<Tile>& ring;
  const u32 (&first)[max_ranks];  // from deal_tiles
  Handover<Tile>& handover;
  Turns<Tile>& turns;
  const u32 index;  // of the warpgroup among the consumers
  const u32 thread = threadIdx.x % 128;
  using Sums = float[Tile::columns / 2];

  __device__ void add_bias_or_epilogue(Sums& sums, const WarpgroupTile& tile) const {
    if constexpr (sum_is_coded)
      return;  // the bias is added to the values that the codes of the sum decode to
    else if constexpr (are_same<Expression, Identity>)
      add_bias<T>(m, tile.column, sums);
    else
      apply_to_rows<Expression>(a.epilogue, tile.row, u32(a.count[a.rank]), tile.column, m.n, sums);
  }

  __device__ void stage(const Sums& sums, const WarpgroupTile& tile, bool own) const {
    const auto place = [&](int box) { return staged_box<Travel>(ring, index, box); };
    const auto staged = [&](int box) {
      fence_async_proxy_shared();
      __syncwarp();
      if (thread % 32 == 0) handover.staged[box].arrive();
    };
    if (!own) {
      Travel::template stage<Tile::boxes>(sums, place, staged);
    } else if constexpr (sum_is_coded) {
      const auto output = [&](int box) { return box_of(m, a, a.rank, tile, box); };
      Travel::template stage_sum<Tile::boxes>(m, sums, output, place, staged);
    } else {
#pragma unroll
      for (int box = 0; box < Tile::boxes; ++box) {
        round_box<T>(sums, 64 * box, place(box));
        staged(box);
      }
    }
  }

  __device__ void run() const {
    const Products multiplier{m, ring, index};
    Position<Tile> at;
    u32 staged_tiles = 0, tiles = 0, own_tiles = 0;
    WalkByOwner<Tile, N> walk{m, a, first};
    for (walk.next(Tile::turn(index)); walk.more(); walk.next(Tile::turns)) {
      Sums sums;
      if constexpr (is_scaled<Scales>) {
        u32 row, column;
        walk.locate(row, column);
        ScaledProducts<Products, Tile, Scales>{multiplier, m, row, column}.multiply(at, sums);
      } else if constexpr (Tile::leaves > 1)
        LeafTree<Products, Tile>{multiplier}.multiply(at, sums);
      else
        turns.multiply(multiplier, at, sums, tiles++);
      WarpgroupTile tile;
      if (!walk.find(Tile::warpgroup(index), tile)) continue;
      if (walk.own()) {
        handover.arrived.wait(own_tiles);
        ++own_tiles;
        Travel::template add_partials<N, Tile>(m, a, tile, sums);
        add_bias_or_epilogue(sums, tile);
      }
      handover.sent.wait(staged_tiles - 1);
      stage(sums, tile, walk.own());
      ++staged_tiles;
    }
  }
};

// The bytes a sender has in flight to each peer. A queue of elements before the links would delay operands.
template <class Travel>
constexpr u32 piece_nbytes = Travel::coded ? Travel::partial_nbytes : 2048;

template <int N, class Tile, Collective Op, class Travel>
struct Sender {
  const MatmulArguments& m;
  const Arguments& a;
  const TensorMap& output;
  const Ring<Tile>& ring;
  const u32 (&first)[max_ranks];  // from deal_tiles
  Handover<Tile>& handover;
  const u32 index;  // of its consumer
  const u32 lane = threadIdx.x % 32;

  // Returns once the box has arrived everywhere.
  __device__ void send_box(const WarpgroupTile& tile, int box, int owner) const {
    const u32 nbytes = owner == a.rank ? Travel::finished_nbytes : Travel::partial_nbytes;
    const char* const from = staged_box<Travel>(ring, index, box);
    if (owner == a.rank && !(Op == all_reduce && Travel::coded))
      tensor_store(output, tile.column + 64 * box, tile.row, from);
#pragma unroll 1
    for (u32 at = 0; at < nbytes; at += piece_nbytes<Travel>) {
      if (owner != a.rank)
        bulk_store(TileExchange<N>{a}.place(owner, a.rank, (tile.box + box) * Travel::places) + at, from + at,
                   piece_nbytes<Travel>);
      else if constexpr (Op == all_reduce)
#pragma unroll
        for (int hop = 1; hop < N; ++hop)
          bulk_store(TileExchange<N>{a, finished}.place((a.rank + hop) % N, a.rank, tile.box + box) + at, from + at,
                     piece_nbytes<Travel>);
      wait_for_bulk_stores();
    }
  }

  // By one thread.
  __device__ void send(const WarpgroupTile& tile, u32 sent, int owner, bool failed) const {
#pragma unroll 1
    for (int box = 0; box < Tile::boxes; ++box) {
      handover.staged[box].wait(sent);
      if (failed) continue;
      if (tile.column + 64 * box < m.n) send_box(tile, box, owner);
    }
    handover.sent.arrive();
  }

  // By all threads, after the first thread has sent the boxes: sets the flags.
  __device__ void announce(const WarpgroupTile& tile, int owner) const {
    if (owner != a.rank) {
      if (lane == 0) TileExchange<N>{a}.announce(owner, tile.box);
    } else if (Op == all_reduce && lane < N && lane != a.rank) {
      TileExchange<N>{a, finished}.announce(lane, tile.box);
    }
  }

  __device__ void run(const Call& call) const {
    const TileExchange<N> exchange{a};
    bool failed = call.aborted || !exchange.wait_until_all_entered(call);
    u32 sent = 0;
    WalkByOwner<Tile, N> walk{m, a, first};
    for (walk.next(Tile::turn(index)); walk.more(); walk.next(Tile::turns)) {
      WarpgroupTile tile;
      if (!walk.find(Tile::warpgroup(index), tile)) continue;
      if (walk.own()) {
        failed = failed || !exchange.wait_for_partials(call, tile.box);
        if (lane == 0) handover.arrived.arrive();
      }
      if (lane == 0) send(tile, sent, walk.owner(), failed);
      __syncwarp();
      if (!failed) announce(tile, walk.owner());
      ++sent;
    }
  }
};

// Warps that copy the peers' finished tiles into the output, a contiguous [m, n].
template <int N, class Tile, class Travel>
struct Gatherer {
  const MatmulArguments& m;
  const Arguments& a;
  const u32 (&first)[max_ranks];  // from deal_tiles
  const u32 lane = threadIdx.x % 32;

  // Warps take warpgroup tiles in the order in which their owners finish them: the first tiles of all peers first.
  __device__ void run(const Call& call, u32& taken) const {
    if (call.aborted || !TileExchange<N>{a}.wait_until_all_entered(call)) return;
    constexpr u32 of_peer = Tile::warpgroups, of_all = (N - 1) * of_peer;  // warpgroup tiles at each index
    const u32 clusters = gridDim.x / Tile::cluster;
    u32 most = 0;
#pragma unroll
    for (int hop = 1; hop < N; ++hop) most = max(most, WalkByOwner<Tile, N>{m, a, first, hop}.tiles());
    while (true) {
      const u32 number = __shfl_sync(0xffffffff, lane == 0 ? add_relaxed_cta(&taken, 1) : 0, 0);
      if (number / of_all * clusters >= most) return;
      WalkByOwner<Tile, N> walk{m, a, first, int(number % of_all / of_peer) + 1};
      walk.next(number / of_all);
      WarpgroupTile tile;
      if (walk.index >= walk.tiles() || !walk.find(number % of_peer, tile)) continue;
      if (!TileExchange<N>{a, finished}.wait_for_finished(call, walk.owner(), tile.box)) return;
      const int owner = walk.owner();
#pragma unroll
      for (int box = 0; box < Tile::boxes; ++box)
        if (tile.column + 64 * box < m.n)
          Travel::write(m, box_of(m, a, owner, tile, box),
                        TileExchange<N>{a, finished}.place(a.rank, owner, tile.box + box));
    }
  }
};

// The first warpgroup: a sender for each consumer, then the producer. With all_reduce all gather in the end.
template <class Operand, int N, class Tile, OperandLayout W, Collective Op, class Travel>
DEVICE void run_helper(const Ring<Tile>& ring, SummedSharedStorage<Tile>& shared, const TensorMap& a_map,
                       const TensorMap& w_map, const TensorMap& output_map, const MatmulArguments& m,
                       const Arguments& a) {
  const u32 warp = same_in_warp(threadIdx.x / 32);
  if (warp == 0) {
    const Call call = begin_call_in_warp(a);
    if (!call.aborted && blockIdx.x == 0) enter<N>(a, call);
    if (threadIdx.x == 0) {
      shared.call = call;
      shared.call_known.arrive();
    }
    __syncwarp();
  }
  if (warp == Tile::consumers) {
    if (elected()) {
      fence_async_proxy_global();  // the kernel before may have written A
      Producer<Tile, W, Operand>{m, a_map, w_map, ring}.run(WalkByOwner<Tile, N>{m, a, shared.first});
    }
    __syncwarp();
  }
  shared.call_known.wait(0);
  if (warp < Tile::consumers)
    Sender<N, Tile, Op, Travel>{m, a, output_map, ring, shared.first, shared.handover[warp], warp}.run(shared.call);
  if (Op == all_reduce) Gatherer<N, Tile, Travel>{m, a, shared.first}.run(shared.call, shared.taken);
}

// Registers of a thread of two consumers. Gatherers leave fewer of them, unless nodes of a tree need more.
template <Collective Op, class Tile>
constexpr int consumer_registers = Op == reduce_scatter                                       ? 232
                                   : Tile::leaves > 1 && Tile::nodes * Tile::columns > 256 ? 224
                                                                                           : 208;

template <class T, int N, class Tile, OperandLayout W, Collective Op, class Expression, class Travel, class Scales>
DEVICE void multiply_and_sum(const TensorMap& a_map, const TensorMap& w_map, const TensorMap& output_map,
                             const typename Scales::Arguments& m, const Arguments& a) {
  constexpr int registers = consumer_registers<Op, Tile>;
  const Ring<Tile> ring;
  auto& shared = static_shared<SummedSharedStorage<Tile>>();
  if (threadIdx.x == 0) {
    prefetch(a_map);
    prefetch(w_map);
    prefetch(output_map);
    for (int i = 0; i < Tile::consumers; ++i) shared.handover[i].init();
    shared.turns.init();
    shared.call_known.init(1);
    shared.taken = 0;
    ring.init();
  }
  deal_tiles<Tile, N>(m, a, shared.first);
  if constexpr (Tile::cluster > 1) __syncthreads();  // publishes `first` and `taken`, as (23) in ptx.cuh demands
  ring.share();
  wait_for_previous_kernel(a);
  const u32 warpgroup = same_in_warp(threadIdx.x / 128);
  if (warpgroup > 0) {
    if constexpr (Tile::consumers == 2) grow_registers<registers>();
    const u32 index = warpgroup - 1;
    Consumer<T, N, Tile, W, Op, Expression, Travel, Scales>{
        m, a, ring, shared.first, shared.handover[index], shared.turns, index}
        .run();
  } else {
    if constexpr (Tile::consumers == 2) shrink_registers<504 - 2 * registers>();
    using Operand = typename Scales::template Operand<T>;
    run_helper<Operand, N, Tile, W, Op, Travel>(ring, shared, a_map, w_map, output_map, m, a);
  }
  end_call(a, shared.call);
}

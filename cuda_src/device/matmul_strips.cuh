// What the warps of a matmul's block do whose result is summed over ranks strip by strip, this rank's own rows last: the
// consumers of matmul_pipeline.cuh, a warp beside each that sends what it finishes, and perhaps one that gathers. What
// travels is in strips.cuh.
#pragma once
#include "epilogue.cuh"
#include "strips_as_elements.cuh"
#include "timeline.cuh"

// What a consumer tells its sender and the next consumer, and is told. Phase k is that of its strip k; of `arrived`, of its
// rank's own strip k; of `queued`, of its tile k.
template <class Tile>
struct Handover {
  Mbarrier staged[Tile::boxes];  // a box is in shared memory
  Mbarrier sent;                 // all have been read, and may be overwritten
  Mbarrier arrived;              // the peers' parts are in the scratch
  Mbarrier queued;               // all products of a tile are

  __device__ void init() {
    for (int i = 0; i < Tile::boxes; ++i) staged[i].init(4);
    sent.init(1);
    arrived.init(1);
    queued.init(4);
  }
};

template <class Tile>
struct Shared {
  Handover<Tile> handover[Tile::consumers];
  Mbarrier begun;  // phase 0: `call` is known
  Call call;
  u32 taken;  // of the peers' strips, by the warps that gather
};

template <class Tile>
__device__ __forceinline__ char* staged_box(const Ring<Tile>& ring, u32 consumer, int box) {
  static_assert(Tile::staged == Tile::boxes);
  return ring.staging + (consumer * Tile::boxes + box) * box_nbytes;
}

// Whether each rank also sends what it sums to all others.
enum Ending { scattered, gathered };

// `Travel`: how strips travel, AsElements or AsCodes.
template <class T, int N, class Tile, Layout W, Ending E, class Expression, class Travel>
struct Consumer {
  static constexpr bool sum_is_coded = E == gathered && Travel::coded;
  const MatmulArguments& m;
  const Arguments& a;
  const Ring<Tile>& ring;
  Handover<Tile> (&handovers)[Tile::consumers];
  const u32 index;  // of the warpgroup among the consumers
  Handover<Tile>& handover = handovers[index];
  const u32 thread = threadIdx.x % 128;
  using Sums = float[Tile::columns / 2];

  // What is done to a sum before it is rounded: the bias is added, or the epilogue applied.
  __device__ void finish(Sums& sums, const Strip& strip) const {
    if constexpr (sum_is_coded)
      return;  // the bias is added to what the codes of the sum stand for
    else if constexpr (is_identity<Expression>)
      add_bias<T>(m, strip.column, sums);
    else
      apply_to_rows<Expression>(a.epilogue, strip.row, u32(a.count[a.rank]), strip.column, m.n, sums);
  }

  // Consumers that alternate wait for their turn: else one could take what is loaded for the other for its own, for places
  // are told by parity (9).
  __device__ void multiply(const Multiplier<T, Tile, W>& multiplier, Position<Tile>& at, Sums& sums, u32 tile) const {
    if constexpr (Tile::turns == 1) {
      multiplier.multiply(at, sums);
    } else {
      const Handover<Tile>& other = handovers[1 - index];
      if (index + tile > 0) at.skip((m.k + tile_depth - 1) / tile_depth);
      while (!other.queued.try_wait(index + tile - 1)) continue;
      const u32 last = multiplier.queue(at, sums);
      if (thread % 32 == 0) handover.queued.arrive();
      multiplier.finish(sums, last);
    }
  }

  // Box by box, for the sender.
  __device__ void stage(const Sums& sums, const Strip& strip, bool own) const {
    const auto place = [&](int box) { return staged_box(ring, index, box); };
    const auto staged = [&](int box) {
      fence_async_proxy_shared();
      __syncwarp();
      if (thread % 32 == 0) handover.staged[box].arrive();
    };
    if (!own) {
      Travel::template stage<Tile::boxes>(sums, place, staged);
    } else if constexpr (sum_is_coded) {
      const auto output = [&](int box) { return box_of(m, a, a.rank, strip, box); };
      Travel::template finish<Tile::boxes>(m, sums, output, place, staged);
    } else {
#pragma unroll
      for (int box = 0; box < Tile::boxes; ++box) {
        round_box<T>(sums, box, place(box));
        staged(box);
      }
    }
  }

  __device__ void run(Track<Tile::recorded>& track) const {
    const Multiplier<T, Tile, W> multiplier{m, ring, index};
    Position<Tile> at;
    u32 tiles = 0, strips = 0, own_strips = 0;
    WalkByOwner<Tile, N> walk{m, a};
    for (walk.next(Tile::turn(index)); walk.more(); walk.next(Tile::turns)) {
      Sums sums;
      multiply(multiplier, at, sums, tiles++);
      track.mark(multiplying);
      Strip strip;
      if (!walk.find(Tile::strip(index), strip)) continue;
      if (walk.own()) {
        while (!handover.arrived.try_wait(own_strips)) continue;
        track.mark(waiting);
        ++own_strips;
        Travel::template add_parts<N, Tile>(m, a, strip, sums);
        finish(sums, strip);
        track.mark(adding);
      }
      while (!handover.sent.try_wait(strips - 1)) continue;
      track.mark(waiting);
      stage(sums, strip, walk.own());
      track.mark(staging);
      ++strips;
    }
  }
};

// How much a sender has on its way to each peer: of elements a part of a box, since what queued up before the links would
// hold up the loads of operands, too; of codes, which do not fill the links, all of a box.
template <class Travel>
constexpr u32 piece_nbytes = Travel::coded ? Travel::nbytes : 2048;

// A warp.
template <int N, class Tile, Ending E, class Travel>
struct Sender {
  const MatmulArguments& m;
  const Arguments& a;
  const TensorMap& output;
  const Ring<Tile>& ring;
  Handover<Tile>& handover;
  const u32 index;  // of its consumer
  const u32 lane = threadIdx.x % 32;

  // Returns once it is wherever it goes.
  __device__ void send_box(const Strip& strip, int box, int owner) const {
    const char* const from = staged_box(ring, index, box);
    if (owner == a.rank && !(E == gathered && Travel::coded))
      tensor_store(output, strip.column + 64 * box, strip.row, from);
#pragma unroll 1
    for (u32 at = 0; at < Travel::nbytes; at += piece_nbytes<Travel>) {
      if (owner != a.rank)
        bulk_store(Strips<N>{a}.place(owner, a.rank, strip.box + box) + at, from + at, piece_nbytes<Travel>);
      else if constexpr (E == gathered)
#pragma unroll
        for (int hop = 1; hop < N; ++hop)
          bulk_store(Strips<N>{a, finished}.place((a.rank + hop) % N, a.rank, strip.box + box) + at, from + at,
                     piece_nbytes<Travel>);
      wait_for_bulk_stores();
    }
  }

  // By one thread, with the strip's boxes as they come.
  __device__ void send(const Strip& strip, u32 strips, int owner, bool failed, Track<Tile::recorded>& track) const {
#pragma unroll 1
    for (int box = 0; box < Tile::boxes; ++box) {
      while (!handover.staged[box].try_wait(strips)) continue;
      if (box == 0) track.mark(waiting);
      if (!failed && strip.column + 64 * box < m.n) send_box(strip, box, owner);
    }
    handover.sent.arrive();
    track.mark(sending);
  }

  // By all threads, once the first has sent.
  __device__ void announce(const Strip& strip, int owner) const {
    if (owner != a.rank) {
      if (lane == 0) Strips<N>{a}.announce(owner, strip.box);
    } else if (E == gathered && lane < N && lane != a.rank) {
      Strips<N>{a, finished}.announce(lane, strip.box);
    }
  }

  __device__ void run(const Call& call, Track<Tile::recorded>& track) const {
    const Strips<N> strips_of_all{a};
    bool failed = call.aborted || !strips_of_all.wait_until_all_entered(call);
    u32 strips = 0;
    WalkByOwner<Tile, N> walk{m, a};
    for (walk.next(Tile::turn(index)); walk.more(); walk.next(Tile::turns)) {
      Strip strip;
      if (!walk.find(Tile::strip(index), strip)) continue;
      if (walk.own()) {
        failed = failed || !strips_of_all.wait_for_parts(call, strip.box);
        if (lane == 0) handover.arrived.arrive();
      }
      if (lane == 0) send(strip, strips, walk.owner(), failed, track);
      __syncwarp();
      if (!failed) announce(strip, walk.owner());
      ++strips;
    }
  }
};

// Warps that write what other ranks have finished into the output, [m, n] without gaps.
template <int N, class Tile, class Travel>
struct Gatherer {
  const MatmulArguments& m;
  const Arguments& a;
  const u32 lane = threadIdx.x % 32;

  __device__ void copy(const Strip& strip, int owner) const {
#pragma unroll
    for (int box = 0; box < Tile::boxes; ++box)
      if (strip.column + 64 * box < m.n)
        Travel::write(m, box_of(m, a, owner, strip, box), Strips<N>{a, finished}.place(a.rank, owner, strip.box + box));
  }

  __device__ u32 most_tiles() const {
    u32 most = 0;
#pragma unroll
    for (int hop = 1; hop < N; ++hop) most = max(most, WalkByOwner<Tile, N>{m, a, hop}.tiles());
    return most;
  }

  // Warps take strips in turn, in the order in which their owners finish them: the first tiles of all peers first.
  __device__ void run(const Call& call, u32& taken, Track<Tile::recorded>& track) const {
    if (call.aborted || !Strips<N>{a}.wait_until_all_entered(call)) return;
    constexpr u32 strips_a_tile = Tile::strips, strips_a_turn = (N - 1) * strips_a_tile;
    const u32 most = most_tiles();
    while (true) {
      const u32 number = __shfl_sync(0xffffffff, lane == 0 ? add_relaxed_cta(&taken, 1) : 0, 0);
      const u32 index = (blockIdx.x + number / strips_a_turn * gridDim.x) / Tile::cluster;
      if (index >= most) return;
      const WalkByOwner<Tile, N> walk{m, a, int(number % strips_a_turn / strips_a_tile) + 1, index};
      Strip strip;
      if (index >= walk.tiles() || !walk.find(number % strips_a_tile, strip)) continue;
      if (!Strips<N>{a, finished}.wait_for_strip(call, walk.owner(), strip.box)) return;
      track.mark(waiting);
      copy(strip, walk.owner());
      track.mark(gathering);
    }
  }
};

// By warp 0.
template <int N>
__device__ __forceinline__ Call begin(const Arguments& a) {
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return call;
  advance_epoch_in_warp(a, call);
  if (blockIdx.x == 0) Strips<N>{a}.enter(call);
  return call;
}

// What the warps of the first warpgroup do, who multiply nothing: a sender for each consumer, and one that loads. Who has
// nothing else to do, or not any more, gathers.
template <int N, class Tile, Layout W, Ending E, class Travel>
__device__ __forceinline__ void run_helper(const Ring<Tile>& ring, Shared<Tile>& shared, const TensorMap& a_map,
                                           const TensorMap& w_map, const TensorMap& output_map,
                                           const MatmulArguments& m, const Arguments& a) {
  const u32 warp = same_in_warp(threadIdx.x / 32);
  if (warp == 0) {
    const Call call = begin<N>(a);
    if (threadIdx.x == 0) {
      shared.call = call;
      shared.begun.arrive();
    }
    __syncwarp();
  }
  if (warp == Tile::consumers) {
    if (elected()) {
      fence_async_proxy_global();  // the kernel before may have written A
      Producer<Tile, W>{m, a_map, w_map, ring}.run(WalkByOwner<Tile, N>{m, a});
    }
    __syncwarp();
  }
  while (!shared.begun.try_wait(0)) continue;
  Track<Tile::recorded> track(m, 2 + warp, threadIdx.x % 32 == 0);
  if (warp < Tile::consumers)
    Sender<N, Tile, E, Travel>{m, a, output_map, ring, shared.handover[warp], warp}.run(shared.call, track);
  if (E == gathered) Gatherer<N, Tile, Travel>{m, a}.run(shared.call, shared.taken, track);
}

// The body of the kernels.
template <class T, int N, class Tile, Layout W, Ending E, class Expression, class Travel>
__device__ __forceinline__ void multiply_and_sum(const TensorMap& a_map, const TensorMap& w_map,
                                                 const TensorMap& output_map, const MatmulArguments& m,
                                                 const Arguments& a) {
  const Ring<Tile> ring;
  auto& shared = static_shared<Shared<Tile>>();
  if (threadIdx.x == 0) {
    prefetch(a_map);
    prefetch(w_map);
    prefetch(output_map);
    for (int i = 0; i < Tile::consumers; ++i) shared.handover[i].init();
    shared.begun.init(1);
    shared.taken = 0;
    ring.init();
  }
  ring.share();
  wait_for_previous_kernel();
  const u32 warpgroup = same_in_warp(threadIdx.x / 128);
  if (warpgroup > 0) {
    if constexpr (Tile::consumers == 2) grow_registers<E == gathered ? 208 : 232>();
    Track<Tile::recorded> track(m, warpgroup - 1, threadIdx.x % 128 == 0);
    Consumer<T, N, Tile, W, E, Expression, Travel>{m, a, ring, shared.handover, warpgroup - 1}.run(track);
  } else {
    if constexpr (Tile::consumers == 2) shrink_registers<E == gathered ? 88 : 40>();
    run_helper<N, Tile, W, E, Travel>(ring, shared, a_map, w_map, output_map, m, a);
  }
  __syncthreads();
  end_call(a, shared.call);
}

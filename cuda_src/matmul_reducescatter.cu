// matmul_reducescatter: this rank's rows of the sum over all ranks of A * W^T, plus a bias; operands as in matmul.cu.
//
//   a block computes tiles as in matmul.cu, the rows of the next rank first, its own rank's last; for each consumer:
//     rows of peer p   sums --round--> boxes in shared memory --TMA--> scratch[p].boxes[this rank], then the flag
//     own rows         sums, rounded, + scratch[this rank].boxes[p] of all p, in fp32 and in rank order, + bias
//                           --round--> boxes in shared memory --TMA--> output
//
// No SM is spent on the links: a warp beside the consumers sends a tile while they compute the next, for which shared
// memory has room for a whole tile, and it waits for the peers' parts while the consumers still compute theirs. The bits
// are those of a matmul whose result is then reduce-scattered, and the bias added before the sum is rounded. Ordering
// between ranks: (10) in strips.cuh.
#include "device/matmul_pipeline.cuh"
#include "device/strips.cuh"

// What a consumer and its sender tell each other. Phase k is that of their strip k; of `arrived`, of their own strip k.
template <class Tile>
struct Handover {
  Mbarrier staged[Tile::boxes];  // a box is in shared memory
  Mbarrier sent;                 // all may be overwritten
  Mbarrier arrived;              // the peers' parts are in the scratch

  __device__ void init() {
    for (int i = 0; i < Tile::boxes; ++i) staged[i].init(4);
    sent.init(1);
    arrived.init(1);
  }
};

template <class Tile>
struct Shared {
  Handover<Tile> handover[Tile::consumers];
  Mbarrier begun;  // phase 0: `call` is known
  Call call;
};

template <class Tile>
__device__ __forceinline__ char* staged_box(const Ring<Tile>& ring, u32 consumer, int box) {
  static_assert(Tile::staged == Tile::boxes);
  return ring.staging + (consumer * Tile::boxes + box) * box_nbytes;
}

template <class T, int N, class Tile, Layout W>
struct Consumer {
  const MatmulArguments& m;
  const Arguments& a;
  const Ring<Tile>& ring;
  Handover<Tile>& handover;
  const u32 index;  // of the warpgroup among the consumers
  const u32 thread = threadIdx.x % 128;
  using Sums = float[Tile::columns / 2];

  // Sums 8 * i .. 8 * i + 7 of this thread: a quarter of what it has of a box.
  __device__ static Pack rounded(const Sums& sums, int i) {
    Pack p;
#pragma unroll
    for (int w = 0; w < 4; ++w) p.word[w] = T::round(sums + 8 * i + 2 * w);
    return p;
  }

  // In the order of registers: on the peer the same thread will read what this one writes.
  __device__ void stage_for_peer(const Sums& sums, int box) const {
    Pack* const to = reinterpret_cast<Pack*>(staged_box(ring, index, box)) + thread;
#pragma unroll
    for (int i = 0; i < 4; ++i) to[128 * i] = rounded(sums, 4 * box + i);
  }

  // Rounds the sums and adds up what all ranks have, box by box.
  __device__ void add_parts(Sums& sums, const Strip& strip) const {
    constexpr int U = N <= 4 ? 4 : 2;  // packs of each rank that a thread has in flight
    const Pack* from[N];
#pragma unroll
    for (int r = 0; r < N; ++r)
      from[r] = reinterpret_cast<const Pack*>(Strips<N>{a}.place(a.rank, r, strip.box)) + thread;
#pragma unroll
    for (int i = 0; i < 4 * Tile::boxes; i += U) {
      if (strip.column + i / 4 * 64 >= m.n) break;
      Pack part[U][N];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < N; ++r) part[u][r] = r == a.rank ? rounded(sums, i + u) : from[r][128 * (i + u)];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          float total[2];
          add_in_rank_order<T, N>(part[u], w, total);
          sums[8 * (i + u) + 2 * w] = total[0];
          sums[8 * (i + u) + 2 * w + 1] = total[1];
        }
    }
  }

  __device__ void run() const {
    const Multiplier<T, Tile, W> multiplier{m, ring, index};
    Position<Tile> at;
    u32 strips = 0, own_strips = 0;
    for (WalkByOwner<Tile, N> walk{m, a}; walk.more(); walk.next()) {
      Sums sums;
      multiplier.multiply(at, sums);
      Strip strip;
      if (!walk.find(index, strip)) continue;
      if (walk.own()) {
        while (!handover.arrived.try_wait(own_strips)) continue;
        ++own_strips;
        add_parts(sums, strip);
        add_bias<T>(m, strip.column, sums);
      }
      while (!handover.sent.try_wait(strips - 1)) continue;
#pragma unroll
      for (int box = 0; box < Tile::boxes; ++box) {
        if (walk.own())
          round_box<T>(sums, box, staged_box(ring, index, box));
        else
          stage_for_peer(sums, box);
        fence_async_proxy_shared();
        __syncwarp();
        if (thread % 32 == 0) handover.staged[box].arrive();
      }
      ++strips;
    }
  }
};

// A warp.
template <int N, class Tile>
struct Sender {
  const MatmulArguments& m;
  const Arguments& a;
  const TensorMap& output;
  const Ring<Tile>& ring;
  Handover<Tile>& handover;
  const u32 index;  // of its consumer
  const bool first = threadIdx.x % 32 == 0;

  // By one thread, with the strip's boxes as they come; returns once they have been sent.
  __device__ void send(const Strip& strip, u32 strips, int owner, bool failed) const {
#pragma unroll
    for (int box = 0; box < Tile::boxes; ++box) {
      while (!handover.staged[box].try_wait(strips)) continue;
      const u32 column = strip.column + 64 * box;
      if (failed || column >= m.n) continue;
      const char* const from = staged_box(ring, index, box);
      if (owner == a.rank)
        tensor_store(output, column, strip.row, from);
      else
        bulk_store(Strips<N>{a}.place(owner, a.rank, strip.box + box), from, box_nbytes);
    }
    wait_for_bulk_stores();
    handover.sent.arrive();
    if (!failed && owner != a.rank) Strips<N>{a}.announce(owner, strip.box);
  }

  __device__ void run(const Call& call) const {
    const Strips<N> strips_of_all{a};
    bool failed = call.aborted || !strips_of_all.wait_until_all_entered(call);
    u32 strips = 0;
    for (WalkByOwner<Tile, N> walk{m, a}; walk.more(); walk.next()) {
      Strip strip;
      if (!walk.find(index, strip)) continue;
      if (walk.own()) {
        failed = failed || !strips_of_all.wait_for_parts(call, strip.box);
        if (first) handover.arrived.arrive();
      }
      if (first) send(strip, strips, walk.owner(), failed);
      __syncwarp();
      ++strips;
    }
  }
};

// By warp 0.
__device__ __forceinline__ void begin(const Arguments& a, Call& call) {
  call = begin_call(a);
  read_epoch(a, call);
  if (!call.aborted) advance_epoch_in_warp(a, call);
}

template <class T, int N, class Tile, Layout W>
__global__ void __launch_bounds__(128 + 128 * Tile::consumers, 1)
    matmul_reducescatter(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap w_map,
                         const __grid_constant__ TensorMap output_map, const __grid_constant__ MatmulArguments m,
                         const __grid_constant__ Arguments a) {
  const Ring<Tile> ring;
  auto& shared = static_shared<Shared<Tile>>();
  if (threadIdx.x == 0) {
    prefetch(a_map);
    prefetch(w_map);
    prefetch(output_map);
    for (int i = 0; i < Tile::consumers; ++i) shared.handover[i].init();
    shared.begun.init(1);
    ring.init();
  }
  if constexpr (Tile::cluster == 1)
    __syncthreads();
  else
    sync_cluster_mbarriers();
  wait_for_previous_kernel();
  const u32 warpgroup = same_in_warp(threadIdx.x / 128), warp = same_in_warp(threadIdx.x / 32);
  if (warpgroup > 0) {
    if constexpr (Tile::consumers == 2) grow_registers<232>();
    Consumer<T, N, Tile, W>{m, a, ring, shared.handover[warpgroup - 1], warpgroup - 1}.run();
  } else {
    if constexpr (Tile::consumers == 2) shrink_registers<40>();
    if (warp == 0) {
      Call call;
      begin(a, call);
      if (blockIdx.x == 0 && !call.aborted) Strips<N>{a}.enter(call);
      if (threadIdx.x == 0) {
        shared.call = call;
        shared.begun.arrive();
      }
      __syncwarp();
    }
    if (warp < Tile::consumers) {
      while (!shared.begun.try_wait(0)) continue;
      Sender<N, Tile>{m, a, output_map, ring, shared.handover[warp], warp}.run(shared.call);
    } else if (warp == Tile::consumers && elected()) {
      fence_async_proxy_global();  // the kernel before may have written A
      Producer<Tile, W>{m, a_map, w_map, ring}.run(WalkByOwner<Tile, N>{m, a});
    }
  }
  __syncthreads();
  end_call(a, shared.call);
}

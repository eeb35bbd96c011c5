// two_shot_tma: reduce-scatter and all-gather by bulk copies (TMA), for a handful of blocks.
//
//   chunk k of a channel on rank r, each line by warps of its own, each at its own chunk:
//     scatter   input piece p  ---> shared ---> scratch[p].scattered[k % depth][r]   on every peer; signal `scattered`
//     reduce    scratch[r].scattered[k % depth][p] + own piece -> sum -> output, shared
//     push      shared sum              ---> scratch[p].reduced[k % depth][r]        on every peer; signal `reduced`
//     gather    scratch[r].reduced[k % depth][p] -> output, piece p
//
// One thread of a channel keeps the links busy with kilobytes at a time, so a few blocks fill them and leave the other
// SMs to a matmul. The next kernel is not launched early, since it would hold SMs while it waits. Wins beside a matmul.
#include "device/pack.cuh"
#include "device/ptx/tma.cuh"
#include "device/sync/signal_pad.cuh"

// A block is `channels` channels, and channel c only meets channel c of its peers. A chunk is N pieces of a.chunk
// packs, piece p owned by rank p. TMA_CHANNELS, TMA_DEPTH and TMA_THREADS in graphar/plan/scratch.py.
//
// (15) Chunk k reuses the slots of chunk k - `tma_depth`.
//     - Scattered: `scatter` waits until this channel's `gather` has done chunk k - `tma_depth`. By then this rank has
//       seen that chunk reduced by every peer, and their slots are free.
//     - Reduced: a peer's slot is free once its chunk k has arrived here, and no sum of chunk k exists before that.
//     - Between calls: a rank whose call has ended has seen all of it reduced by every peer. It has a sum of the next
//       call once it has heard from all peers in that call, and by (13) their gathering in this call is over then.
constexpr int channels = 4;      // in a block
constexpr int tma_depth = 3;     // chunks of a channel that have slots
constexpr int reduce_warps = 2;  // in a channel
constexpr int threads = 32 * channels * (3 + reduce_warps);

enum Shot { scattered, reduced };
constexpr int max_channels = pad_rows / 2;  // a row for each shot

// Mbarriers between the warps of a channel.
struct Progress {
  Mbarrier loaded;               // phase k: the pieces of chunk k are in shared memory
  Mbarrier summed;               // phase k: the sum of chunk k is in shared memory
  Mbarrier pushed;               // phase k: the sum of chunk k may be overwritten
  Mbarrier gathered[tma_depth];  // phase k / tma_depth of [k % tma_depth]: chunk k is done

  __device__ void init() {
    loaded.init(1);
    summed.init(reduce_warps);
    pushed.init(1);
    for (int i = 0; i < tma_depth; ++i) gathered[i].init(1);
  }
};

template <class T, int N>
struct TwoShotTma {
  const Arguments& a;
  const Call& call;
  const u32 channel, base;  // index among the channels of all blocks; chunks done before this call
  Pack* const stages;       // of this channel: N of a.capacity packs; a piece for each peer, then the sum
  Progress& progress;
  const Tensor<T> input{a.input, a.numel}, output{a.output, a.numel};
  const u64 packs = pack_count<T>(a.numel);
  const u32 lane = threadIdx.x % 32, chunks = count_chunks();

  // Piece `owner` of chunk k, and how many packs it has.
  __device__ u64 piece(u32 k, int owner) const {
    return ((u64(k) * gridDim.x * channels + channel) * N + owner) * a.chunk;
  }
  __device__ u32 size(u64 at) const { return at < packs ? min(u64(a.chunk), packs - at) : 0; }
  // How many of the packs bulk copies can read from the input.
  __device__ u32 whole(u64 at) const { return at < input.whole ? min(u64(a.chunk), input.whole - at) : 0; }

  __device__ u32 count_chunks() const {
    const u64 before = piece(0, 0), in_all_channels = u64(gridDim.x) * channels * N * a.chunk;
    return before >= packs ? 0 : (packs - before + in_all_channels - 1) / in_all_channels;
  }

  __device__ Pack* slot(Shot shot, int on, u32 k, int from) const {
    const u64 index = ((shot * max_channels + channel) * tma_depth + k % tma_depth) * N + from;
    return after_signal_pad(a, on) + index * a.capacity;
  }

  __device__ int peer(int hop) const { return (a.rank + hop) % N; }
  __device__ Pack* stage(int hop) const { return stages + (hop - 1) * a.capacity; }
  __device__ Pack* sum_stage() const { return stages + (N - 1) * a.capacity; }
  __device__ RowSignals<true> signals(Shot shot) const { return {shot * max_channels + channel, base}; }

  // Waits for another warp of this channel. If a wait for a peer expires, `a.abort` is set, and this wait ends too.
  __device__ bool wait(const Mbarrier& barrier, u32 phase) const {
    bool ended;
    while (!(ended = barrier.try_wait(phase)) && load_relaxed_gpu(a.abort) == 0) continue;
    return __all_sync(0xffffffff, ended);
  }

  // Loads the pieces of chunk k to the stages: whole aligned packs by bulk copies, other packs by the lanes.
  __device__ void load(u32 k) const {
    if (lane == 0) {
      u32 expected = 0;
      for (int hop = 1; hop < N; ++hop) expected += whole(piece(k, peer(hop)));
      progress.loaded.arrive_and_expect(expected * sizeof(Pack));
    }
    for (int hop = 1; hop < N; ++hop) {
      const u64 at = piece(k, peer(hop));
      const u32 count = whole(at);
      if (lane == 0 && count) bulk_load(stage(hop), input.base + at * input.E, count * sizeof(Pack), progress.loaded);
      for (u32 j = count + lane; j < size(at); j += 32) stage(hop)[j] = input.load(at + j);
    }
    fence_async_proxy_shared();
    __syncwarp();
  }

  __device__ void scatter() const {
    fence_async_proxy_shared();  // the mbarriers are new
    fence_async_proxy_global();  // and the kernel before may have written the input
    if (chunks > 0) load(0);
    for (u32 k = 0; k < chunks; ++k) {
      progress.loaded.wait(k);
      if (k >= tma_depth && !wait(progress.gathered[k % tma_depth], k / tma_depth - 1)) break;
      if (lane == 0) {
        fence_async_proxy_global();
        for (int hop = 1; hop < N; ++hop)
          if (const u32 count = size(piece(k, peer(hop))))
            bulk_store(slot(scattered, peer(hop), k, a.rank), stage(hop), count * sizeof(Pack));
        wait_for_bulk_stores();
      }
      __syncwarp();
      if (k + 1 < chunks) load(k + 1);
      signals(scattered).template send<N>(a, call, k + 1);
    }
  }

  __device__ void reduce(u32 warp) const {
    constexpr int U = N <= 4 ? 8 / N : 1;  // packs of each rank that a thread has in flight
    constexpr u32 stride = 32 * reduce_warps;
    for (u32 k = 0; k < chunks; ++k) {
      if (!signals(scattered).template wait<N>(a, call, k + 1)) break;
      if (k > 0 && !wait(progress.pushed, k - 1)) break;
      const u64 at = piece(k, a.rank);
      const auto store_sum = [&](u32 j, const Pack(&part)[N]) {
        const Pack sum = sum_in_rank_order<T, N>(part);
        sum_stage()[j] = sum;
        output.store(at + j, sum);
      };
      const Pack* from[N];
      for (int r = 0; r < N; ++r)
        from[r] = r == a.rank ? reinterpret_cast<const Pack*>(input.base) + at : slot(scattered, a.rank, k, r);
      for (u32 j = warp * 32 + lane; j < whole(at); j += U * stride) {
        Pack part[U][N];
        for (int u = 0; u < U; ++u)
          for (int r = 0; r < N; ++r)
            if (j + u * stride < whole(at)) part[u][r] = from[r][j + u * stride];
        for (int u = 0; u < U; ++u)
          if (j + u * stride < whole(at)) store_sum(j + u * stride, part[u]);
      }
      // The packs that bulk copies cannot load: all of a misaligned input, or else its last elements.
      for (u32 j = whole(at) + warp * 32 + lane; j < size(at); j += stride) {
        const Pack mine = input.load(at + j);
        Pack part[N];
        for (int r = 0; r < N; ++r) part[r] = r == a.rank ? mine : from[r][j];
        store_sum(j, part);
      }
      fence_async_proxy_shared();
      __syncwarp();
      if (lane == 0) progress.summed.arrive();
    }
  }

  __device__ void push() const {
    for (u32 k = 0; k < chunks; ++k) {
      if (!wait(progress.summed, k)) break;
      if (lane == 0) {
        fence_async_proxy_global();
        if (const u32 count = size(piece(k, a.rank)))
          for (int hop = 1; hop < N; ++hop)
            bulk_store(slot(reduced, peer(hop), k, a.rank), sum_stage(), count * sizeof(Pack));
        wait_for_bulk_stores();
        progress.pushed.arrive();
      }
      signals(reduced).template send<N>(a, call, k + 1);
    }
  }

  __device__ void gather() const {
    constexpr int U = 8;  // packs that a thread has in flight
    for (u32 k = 0; k < chunks; ++k) {
      // Where a rank never came, `reduced` is missing from all ranks. The first wait names the absent one.
      if (!signals(scattered).template wait<N>(a, call, k + 1)) break;
      if (!signals(reduced).template wait<N>(a, call, k + 1)) break;
      for (int hop = 1; hop < N; ++hop) {
        const Pack* from = slot(reduced, a.rank, k, peer(hop));
        const u64 at = piece(k, peer(hop));
        const u32 count = size(at);
        for (u32 j = lane; j < count; j += 32 * U) {
          Pack part[U];
          for (int u = 0; u < U; ++u)
            if (j + u * 32 < count) part[u] = from[j + u * 32];
          for (int u = 0; u < U; ++u)
            if (j + u * 32 < count) output.store(at + j + u * 32, part[u]);
        }
      }
      __syncwarp();
      if (lane == 0) progress.gathered[k % tma_depth].arrive();
    }
  }
};

template <class T, int N>
__global__ void __launch_bounds__(threads) two_shot_tma(const __grid_constant__ Arguments a) {
  Pack* const stages = dynamic_shared();
  auto& progress = static_shared<Progress[channels]>();
  wait_for_previous_kernel(a);
  Call call = begin_call(a);
  read_epoch(a, call);
  // All or none: another block may give up meanwhile, and warps wait for each other.
  if (__syncthreads_or(call.aborted)) return end_aborted_call(a, call);
  const u32 warp = threadIdx.x / 32, of_block = warp % channels, role = warp / channels;
  const u32 channel = blockIdx.x * channels + of_block;
  const u32 base = load_relaxed_gpu(&a.counters->steps[channel]);
  if (threadIdx.x < channels) progress[threadIdx.x].init();
  advance_epoch(a, call);  // its barrier comes before any use of an mbarrier
  const TwoShotTma<T, N> body{a, call, channel, base, stages + of_block * N * a.capacity, progress[of_block]};
  if (role == 0) body.scatter();
  if (role == 1) body.push();
  if (role == 2) body.gather();
  if (role >= 3) body.reduce(role - 3);
  if (role == 0 && body.lane == 0) store_relaxed_gpu(&a.counters->steps[channel], base + body.chunks);
  end_call(a, call);
}

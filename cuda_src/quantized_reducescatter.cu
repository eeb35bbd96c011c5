// quantized_reducescatter: every rank sends each part of its input, coded, to the part's owner, who sums them.
//
//   step k of block b on rank r:
//     1. part p of input, chunk k -> codes ---> scratch[p].slot[b][k % depth][r]        on every rank p
//     2. signal every peer: step k is sent
//     3. wait until every peer has sent step k - 1
//     4. slot[b][(k-1) % depth] -> values -> sum -> output, chunk k - 1
//
// The first half of a two-shot with a codec on the wire, tile by tile (wire.cuh). Each part is a message of its own,
// whose tiles begin at its first element: parts may differ in size, be empty, and begin anywhere. All blocks of all
// ranks take as many steps as the largest part needs. The sum is rounded to the dtype and to nothing else. Flags
// announce a chunk, so any codec will do. The scratch has a fixed size.
//
// Steps are numbered on from call to call, and a slot's place depends on block, step and source alone: the argument
// that none is overwritten too early is allgather_push's. What a rank sends itself is ordered by its own barriers.
#include "device/signal_pad.cuh"
#include "device/wire_signalled.cuh"

constexpr u32 depth = 4;

template <class T, int N, class C>
struct QuantizedReducescatter {
  const Arguments& a;
  const u32 call, first_step;
  u32 share;   // tiles of each part that a block handles
  u32 chunks;  // in which it does
  u32 length;  // tiles in a chunk
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;

  __device__ QuantizedReducescatter(const Arguments& arguments, u32 epoch, u32 step)
      : a(arguments), call(epoch), first_step(step) {
    u32 most = 0;
#pragma unroll
    for (int r = 0; r < N; ++r) most = max(most, tile_count(a.count[r]));
    share = (most + gridDim.x - 1) / gridDim.x;
    chunks = (share + a.chunk - 1) / a.chunk;
    length = (share + chunks - 1) / chunks;
  }

  // Where chunk k of this block begins in every part, and how many tiles it has of the part of `owner`.
  __device__ u32 begin(u32 k) const { return blockIdx.x * share + k * length; }
  __device__ u32 count(u32 k, int owner) const {
    const u32 end = min(min(begin(k) + length, (blockIdx.x + 1) * share), tile_count(a.count[owner]));
    return end > begin(k) ? end - begin(k) : 0;
  }

  // The tiles of the parts before: the numbers by which tiles have their random bits go on from part to part.
  __device__ u64 tiles_before(int owner) const {
    u64 tiles = 0;
#pragma unroll
    for (int r = 0; r < N - 1; ++r) tiles += r < owner ? tile_count(a.count[r]) : 0;
    return tiles;
  }

  __device__ Wire<C> slot(int on, u32 k, int from) const {
    const u32 index = (blockIdx.x * depth + (first_step + k) % depth) * N + from;
    return {reinterpret_cast<char*>(after_signal_pad(a, on) + u64(index) * a.capacity), length};
  }

  // Each warp takes the next tile for the next peer, so that all links are busy; this rank itself last.
  __device__ void scatter(u32 k) const {
    for (u32 i = warp; i < N * length; i += warps) {
      const int owner = (a.rank + 1 + i % N) % N;
      const u32 j = i / N;
      if (j >= count(k, owner)) continue;
      const Tensor<T> part = part_of<T>(a.input, a, owner);
      const u32 tile = begin(k) + j;
      send_tile(slot(owner, k, a.rank), j, part, tile, tiles_before(owner) + tile, {a.seed, call, a.rank});
    }
  }

  __device__ void reduce(u32 k) const {
    const Tensor<T> output(a.output, a.count[a.rank]);
    for (u32 j = warp; j < count(k, a.rank); j += warps) {
      float total[rows][run];
      sum_of_slots<C, N>([&](int r) { return slot(a.rank, k, r); }, j, total);
      const u32 tile = begin(k) + j;
      const bool whole = is_whole(output, tile);
#pragma unroll
      for (int row = 0; row < rows; ++row) store_row(output, tile, whole, row, total[row]);
    }
  }
};

template <class T, int N, class C>
__global__ void __launch_bounds__(512, 1) quantized_reducescatter(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_call(a, call);
  const Signals signals(a);
  advance_epoch(a, call);
  const QuantizedReducescatter<T, N, C> body(a, call.epoch, signals.first_step());

  for (u32 k = 0; k <= body.chunks; ++k) {
    if (k < body.chunks) {
      body.scatter(k);
      signals.send<N>(a, k + 1);
    }
    if (k == 0) continue;
    if (!signals.wait<N>(a, call, k)) break;
    body.reduce(k - 1);
  }
  signals.end(a, body.chunks);
  end_call(a, call);
}

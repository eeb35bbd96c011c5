// two_shot_lossless: two_shot_pipelined with bf16 tiles packed without loss (lossless.cuh): three quarters of the bytes.
//
//   step k of block b on rank r:
//     1. input chunk k, piece p -> codes ---> scratch[p].scatter[k % depth][b][r]      on every peer p
//     2. wait until every peer has finished step k - 1
//     3. scatter[(k-1) % depth][b] -> values, + own piece of chunk k - 1 -> sum -> output
//        sum -> codes                    ---> scratch[p].gather[(k-1) % depth][b][r]   on every peer p
//     4. signal every peer: step k is finished
//     5. gather[(k-2) % depth][b][p] -> values -> output, piece p of chunk k - 2
//
// Steps, waits and slots are those of two_shot_pipelined.cu, and so is the argument that none is overwritten too early; a
// piece is a.chunk tiles at most. The bits are those of every other exact algorithm; how long it takes depends on the
// data: exponents that are far apart take more bytes. Wins at large sizes, if the arithmetic hides behind the links.
#include "device/lossless.cuh"
#include "device/signal_pad.cuh"
#include "device/tile_chunks.cuh"

constexpr u32 depth = 3;

template <class T, int N>
struct TwoShotLossless {
  const Arguments& a;
  const Tensor<T> input, output;
  const TileChunks<N> chunks;
  const u32 warp = threadIdx.x / 32, warps = blockDim.x / 32;

  __device__ explicit TwoShotLossless(const Arguments& arguments)
      : a(arguments),
        input(a.input, a.numel),
        output(a.output, a.numel),
        chunks(a) {}

  // Phase 0 is the reduce-scatter, 1 the all-gather.
  __device__ LosslessSlot slot(int phase, int on, u32 k, int from) const {
    const u64 index = ((u64(blockIdx.x) * 2 + phase) * depth + k % depth) * N + from;
    return {reinterpret_cast<char*>(after_signal_pad(a, on) + index * a.capacity), chunks.length};
  }

  // Tile j of chunk k of another owner, each warp the next tile for the next peer, so that all links are busy.
  template <class Visit>
  __device__ void for_each_other_owner(u32 k, Visit visit) const {
    for (u32 i = warp; i < (N - 1) * chunks.length; i += warps) {
      const int owner = (a.rank + 1 + i % (N - 1)) % N;
      const u32 j = i / (N - 1);
      if (j < chunks.count(k, owner)) visit(owner, j);
    }
  }

  __device__ void scatter(u32 k) const {
    for_each_other_owner(k, [&](int owner, u32 j) {
      const Tile<T> mine = load_tile(input, chunks.begin(k, owner) + j);
      send<1>([&](int) { return slot(0, owner, k, a.rank); }, j, mine, encode_lossless(mine));
    });
  }

  __device__ void reduce(u32 k) const {
    for (u32 j = warp; j < chunks.count(k, a.rank); j += warps) {
      const u32 tile = chunks.begin(k, a.rank) + j;
      const Tile<T> sum = sum_of(load_tile(input, tile), k, j);
      send<N - 1>([&](int i) { return slot(1, (a.rank + 1 + i) % N, k, a.rank); }, j, sum, encode_lossless(sum));
      store_tile(output, tile, sum);
    }
  }

  // In rank order, in fp32, rounded once.
  __device__ Tile<T> sum_of(const Tile<T>& mine, u32 k, u32 j) const {
    constexpr int batch = 3;  // peers' parts under way at once
    float total[rows][run];
#pragma unroll
    for (int first = 0; first < N; first += batch) {
      LosslessCodes part[batch];
#pragma unroll
      for (int r = first; r < first + batch && r < N; ++r)
        if (r != a.rank) part[r - first] = receive(slot(0, a.rank, k, r), j);
#pragma unroll
      for (int r = first; r < first + batch && r < N; ++r)
        add(total, r == a.rank ? mine : decode(slot(0, a.rank, k, r), j, part[r - first]), r == 0);
    }
    Tile<T> sum;
#pragma unroll
    for (int j = 0; j < rows; ++j)
#pragma unroll
      for (int w = 0; w < 4; ++w) sum.word[j][w] = T::round(total[j] + 2 * w);
    return sum;
  }

  static __device__ __forceinline__ void add(float (&total)[rows][run], const Tile<T>& t, bool is_first) {
#pragma unroll
    for (int j = 0; j < rows; ++j) {
      float v[run];
      t.unpack(j, v);
#pragma unroll
      for (int e = 0; e < run; ++e) total[j][e] = is_first ? v[e] : __fadd_rn(total[j][e], v[e]);
    }
  }

  __device__ void gather(u32 k) const {
    for_each_other_owner(k, [&](int owner, u32 j) {
      const LosslessSlot from = slot(1, a.rank, k, owner);
      store_tile(output, chunks.begin(k, owner) + j, decode(from, j, receive(from, j)));
    });
  }
};

template <class T, int N>
__global__ void __launch_bounds__(512, 1) two_shot_lossless(const __grid_constant__ Arguments a) {
  release_next_kernel();
  wait_for_previous_kernel();
  Call call = begin_call(a);
  read_epoch(a, call);
  if (call.aborted) return end_call(a, call);
  const Signals signals(a);
  advance_epoch(a, call);
  const TwoShotLossless<T, N> body(a);
  const u32 chunks = body.chunks.number;

  for (u32 k = 0; k < chunks + 2; ++k) {
    if (k < chunks) body.scatter(k);
    if (!signals.wait<N>(a, call, k)) break;
    if (k >= 1 && k <= chunks) body.reduce(k - 1);
    signals.send<N>(a, k + 1);
    if (k >= 2) body.gather(k - 2);
  }
  signals.end(a, chunks + 2);
  end_call(a, call);
}

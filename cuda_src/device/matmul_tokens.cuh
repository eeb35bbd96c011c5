// A matmul of few rows, tokens, whose time is that of its weights. The roles of the operands are swapped: wgmma's 64
// rows are 64 rows of W, columns of the result, and its columns are the tokens, so that few products are wasted on rows
// that are not there. The ring between loader and warpgroup is the one of (9), in wgmma.cuh.
#pragma once
#include "call.cuh"
#include "matmul_pipeline.cuh"

// What a block computes at a time: `rows` of W, for up to `Tokens` of A. A cluster's blocks have neighbouring rows and
// load the tokens together, for that much less comes through L2.
template <int Tokens, int Stages, int Cluster>
struct TokenTile {
  static_assert(Tokens % (8 * Cluster) == 0, "blocks of a cluster share tokens in eights");
  static constexpr int rows = 64, columns = Tokens, stages = Stages, cluster = Cluster;
  static constexpr int strips = 1, consumers = 1, staged = 1;
  static constexpr u32 a_nbytes = box_nbytes, w_nbytes = Tokens * row_nbytes, place_nbytes = a_nbytes + w_nbytes;

  __device__ static constexpr u32 strip(u32) { return 0; }
};

// The first columns of the result that a block computes, tile by tile; as many tiles in all blocks of a cluster.
template <class Tile>
struct TokenWalk {
  const MatmulArguments& m;
  u32 column = blockIdx.x * Tile::rows;

  __device__ bool more() const { return column / (Tile::cluster * Tile::rows) * (Tile::cluster * Tile::rows) < m.n; }
  __device__ void next() { column += gridDim.x * Tile::rows; }
};

template <class Tile, Layout W>
struct TokenLoader {
  const MatmulArguments& m;
  const TensorMap& w_map;
  const TensorMap& a_map;
  const Ring<Tile>& ring;
  // Tokens that each block of the cluster loads for all of them, in eights: `box_tokens` in graphar/matmul_tokens.py.
  const u32 share = (m.m + 8 * Tile::cluster - 1) / (8 * Tile::cluster) * 8;

  __device__ void load(u32 place, u32 column, u32 k) const {
    Mbarrier& filled = ring.filled[place];
    filled.arrive_and_expect(Tile::a_nbytes + Tile::cluster * share * row_nbytes);
    if constexpr (W == by_rows)
      tensor_load(ring.a(place), w_map, k, column, filled);
    else
      tensor_load(ring.a(place), w_map, column, k, filled);
    if constexpr (Tile::cluster == 1) {
      tensor_load(ring.w(place), a_map, k, 0, filled);
    } else {
      const u32 first = block_in_cluster() * share;
      tensor_load(ring.w(place) + first * row_nbytes, a_map, k, first, filled, (1 << Tile::cluster) - 1);
    }
  }

  __device__ void wait_for_emptied(const Position<Tile>& at) const {
    while (!ring.emptied[at.place].try_wait(at.use - 1)) continue;
  }

  // By one thread. The next kernel may come once memory has nothing more to do for this one.
  __device__ void run() const {
    Position<Tile> at;
    for (TokenWalk<Tile> walk{m}; walk.more(); walk.next())
      for (u32 k = 0; k < m.k; k += tile_depth, at.next()) {
        wait_for_emptied(at);
        load(at.place, walk.column, k);
      }
    release_next_kernel();
    // The other blocks' warps arrive at mbarriers of this one, which must be there as long.
    if constexpr (Tile::cluster > 1)
      for (int i = 0; i < Tile::stages; ++i, at.next()) wait_for_emptied(at);
  }
};

// Rounds the sums, by a warpgroup, into a box with a row of 64 columns for each token, swizzled as boxes are.
template <class T, int Count>
__device__ __forceinline__ void round_tokens(const float (&sums)[Count], char* box) {
  const u32 lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
#pragma unroll
  for (int i = 0; i < Count; i += 4) {
    const u32 token = 2 * i + lane % 8, words[2] = {T::round(sums + i), T::round(sums + i + 2)};
    store_transposed_matrices(box + token * row_nbytes + (chunk ^ token % 8) * 16, words);
  }
}

// Eight columns of a token in a tile whose first column is `column`: chunk `index` of its box, token by token.
struct TokenPack {
  u32 token, chunk, column;

  __device__ TokenPack(u32 index, u32 column) : token(index / 8), chunk(index % 8), column(column + chunk * 8) {}

  __device__ u32 in_result(const MatmulArguments& m) const { return token * (m.n / 8) + column / 8; }

  // The rank that sums it, where ranks share that: every N-th token of each 64 columns.
  template <int N>
  __device__ u32 owner() const {
    return (token + column / 64) % N;
  }

  __device__ const Pack& in_box(const char* box) const {
    return *reinterpret_cast<const Pack*>(box + token * row_nbytes + (chunk ^ token % 8) * 16);
  }
};

// Calls `visit` with each of the packs of the block's tiles that the result has, by all threads; until it says false.
template <class Tile, class Visit>
__device__ __forceinline__ bool visit_tokens(const MatmulArguments& m, const Visit& visit) {
  for (TokenWalk<Tile> walk{m}; walk.more(); walk.next())
    for (u32 i = threadIdx.x; i < 8 * m.m; i += blockDim.x) {
      const TokenPack pack(i, walk.column);
      if (pack.column < m.n && !visit(pack)) return false;
    }
  return true;
}

// Adds the bias, if there is one, to the sums of a pack.
template <class T>
struct TokenBias {
  float of[8];
  const bool there;

  __device__ __forceinline__ TokenBias(const MatmulArguments& m, u32 column) : there(m.bias != nullptr) {
    if (!there) return;
    const Pack pack = Tensor<T>(m.bias, m.n).load(column / 8);
#pragma unroll
    for (int w = 0; w < 4; ++w) T::unpack(pack.word[w], of + 2 * w);
  }
  __device__ __forceinline__ float operator()(int e, float v) const { return there ? v + of[e] : v; }
};

// By the warpgroup. Its first warp has the call for all threads of the block.
template <class T, class Tile, Layout W, class Send>
__device__ __forceinline__ void multiply_and_send(const Ring<Tile>& ring, const MatmulArguments& m, const Arguments& a,
                                                  Call& call, const Send& send) {
  if (same_in_warp(threadIdx.x / 32) == 0) {
    Call read = begin_call(a);
    read_epoch(a, read);
    if (!read.aborted) advance_epoch_in_warp(a, read);
    if (threadIdx.x == 0) call = read;
  }
  const Multiplier<T, Tile, by_rows, W> multiplier{m, ring, 0};
  Position<Tile> at;
  for (TokenWalk<Tile> walk{m}; walk.more(); walk.next()) {
    float sums[Tile::columns / 2];
    multiplier.multiply(at, sums);
    sync_warpgroup(1);  // the box of the tile before has been read, and the call is known
    round_tokens<T>(sums, ring.staging);
    sync_warpgroup(1);
    if (call.aborted) continue;
    const u32 parity = call.epoch & 1;
    for (u32 i = threadIdx.x; i < 8 * m.m; i += 128) {
      const TokenPack pack(i, walk.column);
      if (pack.column < m.n) send(parity, pack, pack.in_box(ring.staging));
    }
  }
}

// All that a block does before it waits for a peer: `send(parity, at, pack)` has each pack of its tiles, unless the
// call is aborted. The next kernel is let in once the last weights are under way. Returns the call.
template <class T, class Tile, Layout W, class Send>
__device__ __forceinline__ const Call& multiply_tokens(const TensorMap& w_map, const TensorMap& a_map,
                                                       const MatmulArguments& m, const Arguments& a, const Send& send) {
  const Ring<Tile> ring;
  Call& call = static_shared<Call>();
  if (threadIdx.x == 0) {
    prefetch(w_map);
    prefetch(a_map);
    ring.init();
  }
  ring.share();
  wait_for_previous_kernel();
  const u32 warp = same_in_warp(threadIdx.x / 32);
  if (warp < 4) {
    multiply_and_send<T, Tile, W>(ring, m, a, call, send);
  } else if (warp == 4 && elected()) {
    fence_async_proxy_global();  // the kernel before may have written A, or W
    TokenLoader<Tile, W>{m, w_map, a_map, ring}.run();
  }
  __syncthreads();
  return call;
}

// A skinny matmul: at most 64 rows of A, so its time is the time to load the weights.
//
//   loader, one thread   W, A --TMA--> ring (pipeline.cuh); W early, if it is constant: (26) in kernel_order.cuh
//   warpgroup            ring --wgmma--> fp32 sums --round--> a box in shared memory -> packs of 8 columns ---> ranks
//   then all threads     receive and sum
//
// Or K is cut into leaves (leaf_tree.cuh): a pack has 4 columns in fp32, and ranks' packs are added as a tree.
// The operands are swapped: wgmma's 64 rows are 64 rows of W, which are columns of the result, and wgmma's columns are
// the rows of A. So few products are wasted on rows outside A.
#pragma once
#include "device/matmul/leaf_tree.cuh"
#include "device/matmul/scaled_products.cuh"
#include "device/sync/call.cuh"
#include "device/sync/sentinel.cuh"

// What a block computes at a time: 64 columns of the result, `rows` of W, for up to `MaxRows` rows of A. Blocks of a
// cluster have neighbouring columns and load the rows of A together. With `Partials` the box holds sums in fp32.
template <int MaxRows, int Stages, int Cluster, int Leaves = 1, bool Partials = false>
struct SkinnyTile {
  static_assert(MaxRows % (8 * Cluster) == 0, "blocks of a cluster share the rows of A in eights");
  static constexpr int rows = 64, columns = MaxRows, stages = Stages, cluster = Cluster, blocks = Cluster;
  static constexpr int warpgroups = 1, consumers = 1, row_blocks = 1, turns = 1, staged = Partials ? 2 : 1;
  static constexpr int leaves = Leaves, own_leaves = Leaves;
  static constexpr bool partials = Partials, spills = false, swapped = true;
  static constexpr int pack_columns = Partials ? 4 : 8;  // of a pack on its way to the rank that sums it
  static constexpr u32 a_nbytes = box_nbytes, w_nbytes = MaxRows * row_nbytes, place_nbytes = a_nbytes + w_nbytes;

  __device__ static constexpr u32 warpgroup(u32) { return 0; }
};

// The first columns of the tiles of a block. All blocks of a cluster have as many tiles.
template <class Tile>
struct SkinnyWalk {
  const MatmulArguments& m;
  u32 column = blockIdx.x * Tile::rows;

  __device__ bool more() const { return column / (Tile::cluster * Tile::rows) * (Tile::cluster * Tile::rows) < m.n; }
  __device__ void next() { column += gridDim.x * Tile::rows; }
};

// The steps of a block, each 128 bytes of K of a tile, which take the places of the ring in turn.
template <class Tile, class T>
struct SkinnySteps {
  const MatmulArguments& m;
  SkinnyWalk<Tile> walk{m};
  u32 k = 0;
  Position<Tile> at{};

  __device__ bool more() const { return walk.more(); }
  __device__ void next() {
    at.next();
    k += depth_of<T>;
    if (k < m.k) return;
    k = 0;
    walk.next();
  }
};

// Places of the ring that take constant W early. With all, a norm and a skinny matmul took 1.9 us longer (H200).
constexpr u32 early_places = 5;

template <class Tile, OperandLayout W, class T>
struct SkinnyLoader {
  using Steps = SkinnySteps<Tile, T>;
  const MatmulArguments& m;
  const TensorMap& w_map;
  const TensorMap& a_map;
  const Ring<Tile>& ring;
  // Rows of A that each block loads for the whole cluster, in eights: the height of the boxes of `a_map`.
  const u32 share = (m.m + 8 * Tile::cluster - 1) / (8 * Tile::cluster) * 8;

  // Has the place wait for A as well.
  __device__ void load_w(const Steps& step) const {
    const u32 place = step.at.place;
    Mbarrier& filled = ring.filled[place];
    filled.arrive_and_expect(Tile::a_nbytes + Tile::cluster * share * row_nbytes);
    const u32 column = step.walk.column;
    tensor_load(ring.a(place), w_map, W == by_rows ? step.k : column, W == by_rows ? column : step.k, filled);
  }

  __device__ void load_a(const Steps& step) const {
    const u32 place = step.at.place, first = Tile::cluster > 1 ? block_in_cluster() * share : 0;
    load_for_cluster<Tile::cluster>(ring.w(place) + first * row_nbytes, a_map, step.k, first, ring.filled[place]);
  }

  // Whether a step's W, if it is constant, is loaded before the kernel before has ended.
  __device__ static bool is_early(const Steps& step) { return step.at.use == 0 && step.at.place < early_places; }

  // By one thread, before it waits for the kernel before: loads constant W into the first places of the ring.
  __device__ void load_constant_w() const {
    for (Steps step{m}; step.more() && is_early(step); step.next()) load_w(step);
  }

  // By the same thread, after that wait.
  __device__ void run() const {
    Steps step{m};
    for (; step.more(); step.next()) {
      ring.wait_for_emptied(step.at);
      if (!m.constant_weight || !is_early(step)) load_w(step);
      load_a(step);
    }
    ring.wait_for_cluster(step.at);
  }
};

// By a warpgroup: rounds the sums into a swizzled box that has a row of 64 columns for each row of A.
template <class T, int Count>
DEVICE void round_transposed(const float (&sums)[Count], char* box) {
  const u32 lane = threadIdx.x % 32, chunk = threadIdx.x / 32 % 4 * 2 + lane / 8 % 2;
  for (int i = 0; i < Count; i += 4) {
    const u32 row = 2 * i + lane % 8, words[2] = {T::round(sums + i), T::round(sums + i + 2)};
    store_transposed_matrices(box + row * row_nbytes + (chunk ^ row % 8) * 16, words);
  }
}

// By a warpgroup: the same in fp32. Chunks of 16 bytes are swizzled, as a warp stores to four rows at a time.
template <int Count>
DEVICE void write_transposed(const float (&sums)[Count], char* box) {
  const u32 lane = threadIdx.x % 32, column = threadIdx.x / 32 % 4 * 16 + lane / 4;
  for (int i = 0; i < Count; ++i) {
    const u32 row = i / 4 * 8 + lane % 4 * 2 + i % 2, x = column + i / 2 % 2 * 8;
    *reinterpret_cast<float*>(box + row * 256 + (x / 4 ^ row / 2 % 4 * 2) * 16 + x % 4 * 4) = sums[i];
  }
}

// Chunk `index` of a tile's box: `Columns` columns of a row of the result. The tile's first column is `column`.
template <int Columns>
struct ResultPack {
  static constexpr u32 in_row = 64 / Columns;
  u32 row, chunk, column;

  __device__ ResultPack(u32 index, u32 column)
      : row(index / in_row), chunk(index % in_row), column(column + chunk * Columns) {}

  // In a tensor or a slot whose packs have so many columns: the one that holds the first of these.
  template <int PackColumns = Columns>
  __device__ u32 in_result(const MatmulArguments& m) const {
    return row * (m.n / PackColumns) + column / PackColumns;
  }

  // The rank that sums it in a two-shot: every N-th row of each 64 columns.
  template <int N>
  __device__ u32 owner() const {
    return (row + column / 64) % N;
  }

  __device__ const Pack& in_box(const char* box) const {
    const u32 at = Columns == 8 ? chunk ^ row % 8 : chunk ^ row / 2 % 4 * 2;
    return *reinterpret_cast<const Pack*>(box + (row * in_row + at) * sizeof(Pack));
  }
};

// By all threads: visits packs of 8 columns of the block's tiles that lie in the result, until one returns false.
template <class Tile, class Visit>
DEVICE bool visit_packs(const MatmulArguments& m, const Visit& visit) {
  for (SkinnyWalk<Tile> walk{m}; walk.more(); walk.next())
    for (u32 i = threadIdx.x; i < 8 * m.m; i += blockDim.x) {
      const ResultPack<8> pack(i, walk.column);
      if (pack.column < m.n && !visit(pack)) return false;
    }
  return true;
}

template <class T>
struct PackBias {
  float of[8];
  const bool has_bias;

  DEVICE PackBias(const MatmulArguments& m, u32 column) : has_bias(m.bias != nullptr) {
    if (!has_bias) return;
    const Pack pack = Tensor<T>(m.bias, m.n).load(column / 8);
    for (int w = 0; w < 4; ++w) T::unpack(pack.word[w], of + 2 * w);
  }
  DEVICE float operator()(int e, float v) const { return has_bias ? v + of[e] : v; }
};

// By the warpgroup. Its first warp reads the call for all threads of the block.
template <class T, class Tile, OperandLayout W, class Result, class Scales, class Send>
DEVICE void multiply_and_send(const Ring<Tile>& ring, const typename Scales::Arguments& m, const Arguments& a,
                              Call& call, const Send& send) {
  if (same_in_warp(threadIdx.x / 32) == 0) {
    const Call read = begin_call_in_warp(a);
    if (threadIdx.x == 0) call = read;
  }
  const Multiplier<T, Tile, by_rows, W> multiplier{m, ring, 0};
  Position<Tile> at;
  for (SkinnyWalk<Tile> walk{m}; walk.more(); walk.next()) {
    float sums[Tile::columns / 2];
    if constexpr (is_scaled<Scales>)
      ScaledProducts<Multiplier<T, Tile, by_rows, W>, Tile, Scales>{multiplier, m, walk.column, 0}.multiply(at, sums);
    else if constexpr (Tile::leaves > 1)
      LeafTree<decltype(multiplier), Tile>{multiplier}.multiply(at, sums);
    else
      multiplier.multiply(at, sums);
    sync_warpgroup(1);  // the box of the tile before has been read, and the call is known
    if constexpr (Tile::partials)
      write_transposed(sums, ring.staging);
    else
      round_transposed<Result>(sums, ring.staging);
    sync_warpgroup(1);
    if (call.aborted) continue;
    const u32 parity = call.epoch & 1;
    using Sent = ResultPack<Tile::pack_columns>;
    for (u32 i = threadIdx.x; i < Sent::in_row * m.m; i += 128) {
      const Sent pack(i, walk.column);
      if (pack.column < m.n) send(parity, pack, pack.in_box(ring.staging));
    }
  }
}

// What a block does before it waits for peers: computes tiles, and calls `send(parity, at, pack)` unless it is aborted.
template <class T, class Tile, OperandLayout W, class Result, class Scales, class Send>
DEVICE const Call& multiply_skinny(const TensorMap& w_map, const TensorMap& a_map, const typename Scales::Arguments& m,
                                   const Arguments& a, const Send& send) {
  const Ring<Tile> ring;
  Call& call = static_shared<Call>();
  if (threadIdx.x == 0) {
    prefetch(w_map);
    prefetch(a_map);
    ring.init();
  }
  ring.share();
  const u32 warp = same_in_warp(threadIdx.x / 32);
  const SkinnyLoader<Tile, W, T> loader{m, w_map, a_map, ring};
  if (m.constant_weight && warp == 4 && elected()) loader.load_constant_w();  // (26)
  wait_for_previous_kernel(a);
  if (warp < 4) {
    multiply_and_send<T, Tile, W, Result, Scales>(ring, m, a, call, send);
  } else if (warp == 4 && elected()) {
    fence_async_proxy_global();  // the kernel before may have written A, or W
    loader.run();
  }
  __syncthreads();
  return call;
}

// Receives a pack of the result from every rank, at the places of this call's slots, and adds them: rounded packs in
// the order of ranks, partials as a tree. Then adds the bias, and rounds. False when the wait expired.
template <class T, int N, class Tile>
DEVICE bool receive_sum(const MatmulArguments& m, const Arguments& a, const Call& call, u32 slots,
                        const ResultPack<8>& at, Pack& sum) {
  const PackBias<T> bias(m, at.column);
  const u32 first = slots + at.in_result<Tile::pack_columns>(m);
  if constexpr (!Tile::partials) {
    Pack part[N];
    if (!receive(a, call, 0, first, part)) return false;
    sum = sum_in_rank_order<T, N>(part, bias);
  } else {
    const u32 place[2] = {first, first + 1};
    Pack part[2][N];
    if (!receive(a, call, 0, place, part)) return false;
    for (int half = 0; half < 2; ++half) {
      const auto of_half = [&](int e, float v) { return bias(4 * half + e, v); };
      const HalfPack rounded = sum_in_order<fp32, N, TreeOrder, T>(part[half], of_half);
      sum.word[2 * half] = rounded.word[0];
      sum.word[2 * half + 1] = rounded.word[1];
    }
  }
  return true;
}

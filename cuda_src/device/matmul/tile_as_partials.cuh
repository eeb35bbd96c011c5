// Warpgroup tiles (warpgroup_tile.cuh) whose partial sums travel in fp32, and are added as a tree (leaf_tree.cuh).
//
//   partial   a box in the order of registers, in two places: 16 KB
//   finished  a box of rounded elements, as in tile_as_elements.cuh
#pragma once
#include "device/matmul/tile_as_elements.cuh"

template <class T>
struct AsPartials : AsElements<T> {
  static constexpr u32 places = 2;  // of a partial box
  static constexpr u32 partial_nbytes = places * box_nbytes;

  // Sums 4 * i .. 4 * i + 3 of a thread, an eighth of its sums in a box.
  template <int Count>
  __device__ static Pack pack_of(const float (&sums)[Count], int i) {
    Pack p;
#pragma unroll
    for (int w = 0; w < 4; ++w) p.word[w] = word_of_sum(sums[4 * i + w]);
    return p;
  }

  // By a consumer's threads: puts each partial box to `place(box)`, then calls `staged(box)`.
  template <int Boxes, int Count, class Place, class Staged>
  __device__ static void stage(const float (&sums)[Count], const Place& place, const Staged& staged) {
#pragma unroll
    for (int box = 0; box < Boxes; ++box) {
      Pack* const to = reinterpret_cast<Pack*>(place(box)) + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < 8; ++i) to[128 * i] = pack_of(sums, 8 * box + i);
      staged(box);
    }
  }

  // Adds the sums of all ranks as a tree, box by box.
  template <int N, class Tile>
  __device__ static void add_partials(const MatmulArguments& m, const Arguments& a, const WarpgroupTile& tile,
                                      float (&sums)[Tile::columns / 2]) {
    constexpr int U = N <= 4 ? 4 : 2;  // packs of each rank that a thread has in flight
    const Pack* from[N];
#pragma unroll
    for (int r = 0; r < N; ++r)
      from[r] =
          reinterpret_cast<const Pack*>(TileExchange<N>{a}.place(a.rank, r, tile.box * places)) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 8 * Tile::boxes; i += U) {
      if (tile.column + i / 8 * 64 >= m.n) break;
      Pack part[U][N];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < N; ++r) part[u][r] = r == a.rank ? pack_of(sums, i + u) : from[r][128 * (i + u)];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int w = 0; w < 4; ++w) TreeOrder::add<fp32, N>(part[u], w, sums + 4 * (i + u) + w);
    }
  }

  // Consumers that add leaves leave a gathering warp few registers.
  __device__ static void write(const MatmulArguments& m, const Box& box, const char* place) {
    AsElements<T>::template write<4>(m, box, place);
  }
};

// Warpgroup tiles (warpgroup_tile.cuh) that travel as elements.
//
//   partial   a box in the order of registers: a consumer's thread writes what the same thread of its owner's reads. In
//             fp32, to be added as a tree (leaf_tree.cuh), it takes two places
//   finished  a box as the copy engine stores it into the output: rows of 128 bytes, swizzled
#pragma once
#include "device/matmul/pipeline.cuh"
#include "device/matmul/warpgroup_tile.cuh"

constexpr u32 fp32_places = 2;  // of a partial box in fp32: MATMUL_PARTIAL_PLACES in graphar/plan/scratch.py

// Finished sums are of type T. Partial ones are rounded to `Sent`, and added in an order.
template <class T, class Sent = T, class Order = RankOrder>
struct AsElements {
  static constexpr bool coded = false;
  static constexpr u32 places = elements_per_word<Sent> == 1 ? fp32_places : 1;  // of a partial box
  static constexpr u32 partial_nbytes = places * box_nbytes, finished_nbytes = box_nbytes;  // of a box on its way
  static constexpr int packs = 4 * places;  // of a thread, in a box
  static constexpr int numel = elements_per_pack<Sent>;

  template <int Count>
  __device__ static Pack pack_of(const float (&sums)[Count], int i) {
    Pack p;
    for (int w = 0; w < 4; ++w) {
      const float* const from = sums + numel * i + elements_per_word<Sent> * w;
      if constexpr (elements_per_word<Sent> == 1)
        p.word[w] = word_of_sum(*from);
      else
        p.word[w] = Sent::round(from);
    }
    return p;
  }

  // By a consumer's threads: puts each partial box to `place(box)`, then calls `staged(box)`.
  template <int Boxes, int Count, class Place, class Staged>
  __device__ static void stage(const float (&sums)[Count], const Place& place, const Staged& staged) {
#pragma unroll
    for (int box = 0; box < Boxes; ++box) {
      Pack* const to = reinterpret_cast<Pack*>(place(box)) + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < packs; ++i) to[128 * i] = pack_of(sums, packs * box + i);
      staged(box);
    }
  }

  // Rounds the sums and adds those of all ranks, box by box.
  template <int N, class Tile>
  __device__ static void add_partials(const MatmulArguments& m, const Arguments& a, const WarpgroupTile& tile,
                                      float (&sums)[Tile::columns / 2]) {
    constexpr int U = N <= 4 && Tile::columns < 256 ? 4 : 2;  // packs of each rank that a thread has in flight
    const Pack* from[N];
#pragma unroll
    for (int r = 0; r < N; ++r)
      from[r] =
          reinterpret_cast<const Pack*>(TileExchange<N>{a}.place(a.rank, r, tile.box * places)) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < packs * Tile::boxes; i += U) {
      if (tile.column + i / packs * 64 >= m.n) break;
      Pack part[U][N];
#pragma unroll
      for (int u = 0; u < U; ++u)
#pragma unroll
        for (int r = 0; r < N; ++r) part[u][r] = r == a.rank ? pack_of(sums, i + u) : from[r][128 * (i + u)];
#pragma unroll
      for (int u = 0; u < U; ++u)
        for (int w = 0; w < 4; ++w) {
          float total[numel / 4];
          Order::template add<Sent, N>(part[u], w, total);
          for (int e = 0; e < numel / 4; ++e) sums[numel * (i + u) + numel / 4 * w + e] = total[e];
        }
    }
  }

  // By a warp: copies a finished box to the output, U chunks of every fourth row at once: as many as registers allow.
  __device__ static void write(const MatmulArguments& m, const Box& box, const char* place) {
    constexpr int U = 8 / places;
    const u32 lane = threadIdx.x % 32, column = lane % 8 * 8, pitch = m.n / 8;
    const Pack* const from = reinterpret_cast<const Pack*>(place);
    Pack* const to = reinterpret_cast<Pack*>(box.output) + column / 8;
    const u32 rows = column < box.columns ? box.rows : 0;
#pragma unroll 1
    for (u32 first = lane / 8; first < 64; first += 4 * U) {
      Pack chunk[U];
#pragma unroll
      for (u32 u = 0; u < U; ++u) {
        const u32 row = first + 4 * u;
        chunk[u] = from[row * 8 + (lane % 8 ^ row % 8)];
      }
#pragma unroll
      for (u32 u = 0; u < U; ++u)
        if (first + 4 * u < rows) to[u64(first + 4 * u) * pitch] = chunk[u];
    }
  }
};

// Partial sums that travel in fp32, and are added as a tree.
template <class T>
using AsPartials = AsElements<T, fp32, TreeOrder>;

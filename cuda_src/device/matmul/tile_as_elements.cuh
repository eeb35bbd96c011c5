// Warpgroup tiles (warpgroup_tile.cuh) that travel as elements.
//
//   partial   a box in the order of registers: a consumer's thread writes what the same thread of its owner's reads
//   finished  a box as the copy engine stores it into the output: rows of 128 bytes, swizzled
#pragma once
#include "device/matmul/pipeline.cuh"
#include "device/matmul/warpgroup_tile.cuh"

template <class T>
struct AsElements {
  static constexpr bool coded = false;
  static constexpr u32 places = 1;  // of a partial box
  static constexpr u32 partial_nbytes = box_nbytes, finished_nbytes = box_nbytes;  // of a box on its way

  // Sums 8 * i .. 8 * i + 7 of a thread, a quarter of its sums in a box.
  template <int Count>
  __device__ static Pack rounded(const float (&sums)[Count], int i) {
    Pack p;
#pragma unroll
    for (int w = 0; w < 4; ++w) p.word[w] = T::round(sums + 8 * i + 2 * w);
    return p;
  }

  // By a consumer's threads: puts each partial box to `place(box)`, then calls `staged(box)`.
  template <int Boxes, int Count, class Place, class Staged>
  __device__ static void stage(const float (&sums)[Count], const Place& place, const Staged& staged) {
#pragma unroll
    for (int box = 0; box < Boxes; ++box) {
      Pack* const to = reinterpret_cast<Pack*>(place(box)) + threadIdx.x % 128;
#pragma unroll
      for (int i = 0; i < 4; ++i) to[128 * i] = rounded(sums, 4 * box + i);
      staged(box);
    }
  }

  // Rounds the sums and adds the rounded sums of all ranks, in rank order, box by box.
  template <int N, class Tile>
  __device__ static void add_partials(const MatmulArguments& m, const Arguments& a, const WarpgroupTile& tile,
                                      float (&sums)[Tile::columns / 2]) {
    constexpr int U = N <= 4 && Tile::columns < 256 ? 4 : 2;  // packs of each rank that a thread has in flight
    const Pack* from[N];
#pragma unroll
    for (int r = 0; r < N; ++r)
      from[r] = reinterpret_cast<const Pack*>(TileExchange<N>{a}.place(a.rank, r, tile.box)) + threadIdx.x % 128;
#pragma unroll
    for (int i = 0; i < 4 * Tile::boxes; i += U) {
      if (tile.column + i / 4 * 64 >= m.n) break;
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

  // By a warp: copies a finished box from `place` into the output. A thread moves one chunk of every fourth row, and
  // has U of them in flight.
  template <int U = 8>
  __device__ static void write(const MatmulArguments& m, const Box& box, const char* place) {
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

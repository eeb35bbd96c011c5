// Tiles whose leaves the blocks of a cluster split (sm_90a only), so that few tiles with a long K keep more SMs busy.
//
//   block b of `split`   its adjacent leaves --wgmma--> a node of the tree (leaf_tree.cuh), in registers
//                        part p of its node --st.async--> place b of block p
//                        part b of all nodes, in its places --add as the rest of the tree, bias, round--> C
//
// A part has all rows of a warpgroup tile and 1 / split of its columns, in the order of registers in the same threads.
//
// (27) Tile u of a cluster is phase u of two mbarriers of each consumer: `received` (one arrival, and the bytes of the
//      other blocks' parts) and `freed` (an arrival of each of its warps in all blocks).
//      - A store for tile u waits for `freed` u - 1, where phase -1 of a new mbarrier counts as ended. A consumer waits
//        for `received` u before it reads the places, and its warps arrive at `freed` u of all blocks afterwards. So no
//        place is overwritten before it was read.
//      - Parities suffice, as in (9): `received` u + 1 needs stores after `freed` u, thus after every wait for
//        `received` u has returned. `freed` u + 1 needs arrivals of this consumer, thus after its wait for `freed` u.
//      - Arrivals at `freed` follow a fence, since asynchronous stores are copies to (5). They come with the next tile,
//        and there are none after the last one. Every block waits for all that others send it. So nothing is under way
//        to a block that ends, and no barrier of the cluster is needed.
#pragma once
#include "device/matmul/pipeline.cuh"

// By a consumer warpgroup: its rows of a tile. Results and bias are elements of type Result.
template <class Tile, class Result>
struct NodeExchange {
  static constexpr int split = Tile::split, count = Tile::columns / 2 / split;  // sums of a thread in a part
  static constexpr int packs = count / 4;
  static_assert(count % 4 == 0);
  const MatmulArguments& a;
  const Ring<Tile>& ring;
  const u32 index;  // of the warpgroup among the consumers
  const u32 block = split > 1 ? block_in_cluster() : 0;

  // By one thread, before Ring::init, whose fence tells copies of these mbarriers, too.
  __device__ static void init(const Ring<Tile>& ring) {
    if constexpr (split > 1)
      for (int i = 0; i < Tile::consumers; ++i) {
        received(ring, i).init(1);
        freed(ring, i).init(4 * split);
      }
  }

  // Before the products of tile `number`: the places of the tile before may be overwritten.
  DEVICE void free_places(u32 number) const {
    if (number == 0) return;
    const u32 lane = threadIdx.x % 32;
    fence_async_proxy_shared();
    __syncwarp();
    if (lane < split) freed(ring, index).release_to(lane);
  }

  // Stores tile `number` of the cluster, whose first row and column in C are given. `sums` are this block's node.
  DEVICE void store(const SumsOf<Tile>& sums, u32 row, u32 column, u32 number) const {
    Mbarrier& mine = received(ring, index);
    if (threadIdx.x % 128 == 0) mine.arrive_and_expect((split - 1) * packs * 128 * sizeof(Pack));
    freed(ring, index).wait_for_cluster(number - 1);
#pragma unroll
    for (int from = 0; from < split; ++from)
      if (block == from) send(sums, from);
    mine.wait_for_cluster(number);
    float part[count];
    add_nodes(part);
    const u32 first = column + block * (Tile::columns / split);
    add_bias<Result>(a, first, part);
    store_part(part, row + 64 * Tile::warpgroup(index), first);
  }

 private:
  __device__ static Mbarrier& received(const Ring<Tile>& ring, u32 index) { return ring.emptied[Tile::stages + index]; }
  __device__ static Mbarrier& freed(const Ring<Tile>& ring, u32 index) {
    return ring.emptied[Tile::stages + Tile::consumers + index];
  }

  // Pack i of this thread in the place of the part that block `from` sends.
  DEVICE Pack* place(u32 from, int i) const {
    return reinterpret_cast<Pack*>(ring.staging + index * Tile::staged * box_nbytes) + (from * packs + i) * 128 +
           threadIdx.x % 128;
  }

  // Sends the parts of block `from`, this one. Each block begins with another receiver.
  DEVICE void send(const SumsOf<Tile>& sums, int from) const {
    for (int hop = 0; hop < split; ++hop) {
      const int to = from ^ hop;
      for (int i = 0; i < packs; ++i) {
        Pack pack;
        for (int w = 0; w < 4; ++w) pack.word[w] = __float_as_uint(sums[to * count + 4 * i + w]);
        if (hop == 0)
          *place(from, i) = pack;
        else
          store_async_in_cluster(place(from, i), to, pack, received(ring, index));
      }
    }
  }

  // Adds this block's part of all nodes: neighbours, then their sums, until one is left.
  DEVICE void add_nodes(float (&part)[count]) const {
    for (int i = 0; i < packs; ++i) {
      Pack nodes[split];
      for (int from = 0; from < split; ++from) nodes[from] = *place(from, i);
      for (int w = 0; w < 4; ++w) {
        float sums[split];
        for (int from = 0; from < split; ++from) sums[from] = __uint_as_float(nodes[from].word[w]);
        for (int width = 1; width < split; width *= 2)
          for (int left = 0; left < split; left += 2 * width) sums[left] = sums[left] + sums[left + width];
        part[4 * i + w] = sums[0];
      }
    }
  }

  // Rows of C begin at multiples of 16 bytes and have a multiple of 8 elements, so pairs of columns are whole.
  DEVICE void store_part(const float (&part)[count], u32 row, u32 column) const {
    const u32 lane = threadIdx.x % 32;
    row += threadIdx.x / 32 % 4 * 16 + lane / 4;
    column += lane % 4 * 2;
    for (int i = 0; i < count; i += 2) {
      const u32 y = row + i / 2 % 2 * 8, x = column + i / 4 * 8;
      if (y >= a.m || x >= a.n) continue;
      auto* const to = static_cast<typename Result::Storage*>(a.c) + u64(y) * a.c_leading + x;
      if constexpr (sizeof(typename Result::Storage) < sizeof(float))
        *reinterpret_cast<u32*>(to) = Result::round(part + i);
      else
        *reinterpret_cast<u64*>(to) = u64(__float_as_uint(part[i + 1])) << 32 | __float_as_uint(part[i]);
    }
  }
};

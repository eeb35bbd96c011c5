// A product whose K is cut into leaves, added in fp32 as a binary tree (sm_90a only). graphar/numerics/leaf_tree.py
// specifies the order. A rank's leaves are adjacent, and their sum is a node of the tree of all ranks.
//
//   leaf      0    1    2    3    4    5    6    7
//   adds           0    -    2,1  -    4    -    6,5,3     to its own sums: the nodes whose last leaf is the one named
//
// The next leaf's products run while nodes are added. If registers do not hold all nodes, one waits in the staging.
//
// The blocks of a cluster may split the leaves of a tile, so that few tiles with a long K keep more SMs busy. Each adds
// its adjacent leaves in this way.
//
//   block b of `split`   its adjacent leaves --wgmma--> a node of the tree, in registers
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

template <class Multiplier, class Tile>
struct LeafTree {
  static constexpr int leaves = Tile::own_leaves, count = Tile::columns / 2;
  static_assert((leaves & (leaves - 1)) == 0 && Tile::turns == 1);
  using Sums = SumsOf<Tile>;
  using Nodes = Sums[leaves];  // by their last leaf
  const Multiplier& multiplier;
  Pack* const staging =
      reinterpret_cast<Pack*>(multiplier.ring.staging + multiplier.index * Tile::staged * box_nbytes) +
      threadIdx.x % 128;

  DEVICE void multiply(Position<Tile>& at, Sums& sums) const {
    const auto operands = multiplier.first_operands();
    Nodes nodes;
    u32 before = 0;
#pragma unroll
    for (int leaf = 0; leaf < leaves; ++leaf) {
      const bool spills = Tile::spills && leaf == leaves / 2;
      if (spills) {
        multiplier.finish(nodes[leaf - 1], before);
        add_to(nodes, leaf - 1);
        save(nodes[leaf - 1]);
      }
      multiplier.queue_place(operands, at, nodes[leaf], 0);
      if (leaf > 0 && !spills) {
        wait_for_all_but_last_products(nodes[leaf - 1]);
        multiplier.release(before);
        add_to(nodes, leaf - 1);
      }
      before = at.place;
      at.next();
      for (u32 k = tile_depth; k < multiplier.a.k / Tile::leaves; k += tile_depth, at.next()) {
        multiplier.queue_place(operands, at, nodes[leaf], k);
        wait_for_all_but_last_products();
        multiplier.release(before);
        before = at.place;
      }
    }
    multiplier.finish(nodes[leaves - 1], before);
    add_to(nodes, leaves - 1);
#pragma unroll
    for (int i = 0; i < count; ++i) sums[i] = nodes[leaves - 1][i];
  }

 private:
  // Adds to a complete leaf the nodes that end before it: as many as its number ends in ones, in binary.
  DEVICE void add_to(Nodes& nodes, int leaf) const {
    for (int width = 1; width & leaf; width *= 2) {
      if (Tile::spills && width == leaves / 2) {
        add_saved(nodes[leaf]);
      } else {
#pragma unroll
        for (int i = 0; i < count; ++i) nodes[leaf][i] = nodes[leaf - width][i] + nodes[leaf][i];
      }
    }
  }

  // Once the last tile's boxes have left the staging. A thread reads what it saved itself, before the next box.
  DEVICE void save(const Sums& sums) const {
    if (threadIdx.x % 128 == 0) wait_for_bulk_sources<0>();
    sync_warpgroup(1 + multiplier.index);
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      Pack pack;
      for (int w = 0; w < 4; ++w) pack.word[w] = __float_as_uint(sums[i + w]);
      staging[i / 4 * 128] = pack;
    }
  }

  DEVICE void add_saved(Sums& sums) const {
#pragma unroll
    for (int i = 0; i < count; i += 4) {
      const Pack pack = staging[i / 4 * 128];
      for (int w = 0; w < 4; ++w) sums[i + w] = __uint_as_float(pack.word[w]) + sums[i + w];
    }
  }
};

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

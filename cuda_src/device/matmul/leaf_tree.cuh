// A product whose K is cut into leaves, added in fp32 as a binary tree (sm_90a only). graphar/numerics/leaf_tree.py
// specifies the order. A rank's leaves are adjacent, and their sum is a node of the tree of all ranks.
//
//   leaf      0    1    2    3    4    5    6    7
//   adds           0    -    2,1  -    4    -    6,5,3     to its own sums: the nodes whose last leaf is the one named
//
// If the blocks of a cluster split the leaves, each adds its adjacent ones in this way (node_exchange.cuh).
// The next leaf's products run while nodes are added. If registers do not hold all nodes, one waits in the staging.
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

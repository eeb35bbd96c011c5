"""Mistakes in the matmul of one rank, alone: its tiles, its leaves, and leaves that the blocks of a cluster split."""

from __future__ import annotations

from graphar.plan.tiles import MatmulTile
from tests.host.products import FP32, RandomData, alone

WAIT_AND_RELEASE = "wait_for_all_but_last_products();\n      if (k > 0) release(before);"
LAST_WAIT_AND_RELEASE = "wait_for_products(sums);\n    release(last);"
IN_CLUSTERS, ALTERNATING = MatmulTile(64, 192, 2, cluster=2), MatmulTile(128, 64, 3, alternating=True)
WIDE, TREE, SPILLING = MatmulTile(192, 160, 2), MatmulTile(64, 64, 2, leaves=8), MatmulTile(64, 128, 2, leaves=8)
OF_ONE_BOX = MatmulTile(128, 64, 2)
SOON_SAVED = MatmulTile(64, 256, 2, leaves=2)  # the boxes of the tile before may still be on their way
FIRST_PRODUCTS = "multiplier.queue_place(operands, at, nodes[leaf], 0);"
SAVED_SUM = "sums[i + w] = __uint_as_float(pack.word[w]) + sums[i + w];"
OF_PAIRS = MatmulTile(64, 64, 2, leaves=8, split=4)  # a block adds two leaves
OF_ONE = MatmulTile(64, 64, 2, leaves=4, split=4)
OF_TWO_CONSUMERS = MatmulTile(128, 64, 2, leaves=2, split=2)
READ = "nodes[from] = *place(from, i);"
NODES_OF_A_TREE = """        for (int width = 1; width < split; width *= 2)
          for (int left = 0; left < split; left += 2 * width) sums[left] = sums[left] + sums[left + width];
"""
PART_OF_K = "block_in_cluster() * (a.k / Tile::split)"
WAIT_FOR_NODES = "mine.wait_for_cluster(number);"
WAIT_FOR_PLACES = "freed(ring, index).wait_for_cluster(number - 1);"

# Random data tell an order of additions. Integers tell everything else.
MISTAKES = {
    alone(IN_CLUSTERS): {
        "a place given back before its products are complete": (
            WAIT_AND_RELEASE,
            "if (k > 0) release(before);\n      wait_for_all_but_last_products();",
        ),
        "the last place given back before its products are complete": (
            LAST_WAIT_AND_RELEASE,
            "release(last);\n    wait_for_products(sums);",
        ),
        "sums read before the last products are complete": ("    wait_for_products(sums);\n", "    (void)sums;\n"),
        "a load that does not wait for the place": ("emptied[at.place].wait(at.use - 1);", "(void)at;"),
        "products that do not wait for the load": ("ring.filled[at.place].wait(at.use);", ""),
        "sums that go on from the tile before": ("k + step == 0", "0 * k + at.use + at.place + step == 0"),
        "a staged box written before the one before was read": (
            "if (leader && box > 0) wait_for_bulk_sources<Tile::staged - 1>();",
            "",
        ),
        "a box sent before all threads have written it": (
            "      fence_async_proxy_shared();\n      sync_warpgroup(barrier);\n",
            "      fence_async_proxy_shared();\n",
        ),
        "products that follow an access to their sums without a fence": ("    fence_sums();\n", ""),
    },
    alone(IN_CLUSTERS, sanitizer="thread"): {
        "a box sent without a fence": ("      fence_async_proxy_shared();\n      sync", "      sync"),
        "mbarriers made without a fence": ("    }\n    fence_async_proxy_shared();", "    }"),
        "a kernel that ends before its stores": ("    if (leader) wait_for_bulk_stores();\n", ""),
    },
    alone(OF_ONE_BOX): {
        "a tile staged before the one before was read": ("if (leader && box == 0) wait_for_bulk_sources<0>();", "")
    },
    alone(WIDE): {
        "a last box that is stored beyond its tile": (
            "tensor_store(c, column + first,",
            "tensor_store(c, column + 64 * box,",
        )
    },
    alone(ALTERNATING): {
        "consumers that alternate and do not wait for each other": ("queued[1 - index].wait(index + number - 1);", ""),
        "a consumer that does not step over the other's operands": (
            "if (index + number > 0) at.skip(",
            "if (index > 0) at.skip(",
        ),
        "the first rows for all rows of a consumer": (
            "advance(rows, place + block * box_nbytes + step * a_step)",
            "advance(rows, place + step * a_step)",
        ),
    },
    alone(TREE, result=FP32, data=RandomData): {
        "leaves added one after another": ("width & leaf;", "width == 1 && leaf > 0;"),
        "the halves of the leaves interleaved": (
            "int width = 1; width & leaf; width *= 2",
            "int width = leaves / 2; width & leaf; width /= 2",
        ),
        "a first leaf that is a step too long": (
            "k < multiplier.a.k / Tile::leaves;",
            "k < multiplier.a.k / Tile::leaves + (leaf == 0) * tile_depth - (leaf == 1) * tile_depth;",
        ),
        "a leaf that goes on from the one before": (
            FIRST_PRODUCTS,
            """if (leaf > 0) {
          wait_for_products(nodes[leaf - 1]);
          for (int i = 0; i < count; ++i) nodes[leaf][i] = nodes[leaf - 1][i], nodes[leaf - 1][i] = 0;
        }
        multiplier.queue_place(operands, at, nodes[leaf], leaf);""",
        ),
    },
    alone(SPILLING, result=FP32, data=RandomData): {
        "a sum that waits in shared memory rounded to bf16": (
            SAVED_SUM,
            "sums[i + w] = __uint_as_float(pack.word[w] & 0xffff0000u) + sums[i + w];",
        )
    },
    alone(TREE): {
        "a leaf added before its products are complete": ("wait_for_all_but_last_products(nodes[leaf - 1]);", ""),
        "a place given back before the products of a leaf are complete": (
            "wait_for_all_but_last_products(nodes[leaf - 1]);\n        multiplier.release(before);",
            "multiplier.release(before);\n        wait_for_all_but_last_products(nodes[leaf - 1]);",
        ),
        "a leaf that begins with the sums of the tile before": (FIRST_PRODUCTS, FIRST_PRODUCTS.replace("0", "1")),
    },
    alone(SPILLING): {
        "a sum saved before its products are complete": (
            "multiplier.finish(nodes[leaf - 1], before);",
            "multiplier.release(before);",
        ),
        "a box over a saved sum that was not read": (
            "if (box == 0 || box >= Tile::staged) {",
            "if (box >= Tile::staged) {",
        ),
        "a saved sum that is not added": (SAVED_SUM, "sums[i + w] += 0 * pack.word[w];"),
    },
    alone(SOON_SAVED): {
        "a sum saved over boxes that were not read": ("if (threadIdx.x % 128 == 0) wait_for_bulk_sources<0>();", ""),
        "a sum saved before the first thread has waited for the boxes": (
            "    sync_warpgroup(1 + multiplier.index);\n",
            "",
        ),
    },
    alone(MatmulTile(128, 128, 2, leaves=8)): {
        "the sum of one consumer saved over that of another": (
            "multiplier.ring.staging + multiplier.index * Tile::staged * box_nbytes",
            "multiplier.ring.staging",
        ),
        "boxes of the next consumer over a saved sum": (
            "(index * Tile::staged + box % Tile::staged) * box_nbytes",
            "(index + box % Tile::staged) * box_nbytes",
        ),
    },
    alone(OF_PAIRS, result=FP32, data=RandomData): {
        "the nodes of two blocks swapped": (READ, "nodes[from] = *place(from == 1 ? 2 : from == 2 ? 1 : from, i);"),
        "nodes added in the order of blocks": (
            NODES_OF_A_TREE,
            "        for (int from = 1; from < split; ++from) sums[0] = sums[0] + sums[from];\n",
        ),
        "blocks with the leaves of the next one": (PART_OF_K, "(block_in_cluster() + 1) % 4 * (a.k / Tile::split)"),
        "a first leaf that is a step too long": (
            "k < multiplier.a.k / Tile::leaves;",
            "k < multiplier.a.k / Tile::leaves + (leaf == 0) * tile_depth - (leaf == 1) * tile_depth;",
        ),
        "a node rounded to bf16": (READ, f"{{ {READ} for (u32& word : nodes[from].word) word &= 0xffff0000u; }}"),
    },
    alone(OF_ONE): {
        "nodes read before they have come": (WAIT_FOR_NODES, ""),
        "nodes over those of the tile before": (WAIT_FOR_PLACES, "(void)number;"),
        "all of K for every block": (PART_OF_K, "0 * (a.k / Tile::split)"),
        "the bias of another block's columns": (
            "add_bias<Result>(a, first, part);",
            "add_bias<Result>(a, column, part);",
        ),
        "rows below the last one": ("y >= a.m || x >= a.n", "x >= a.n"),
        "columns beyond the last one": ("y >= a.m || x >= a.n", "y >= a.m"),
    },
    alone(OF_ONE, sanitizer="thread"): {
        "a wait for nodes that sees the block's own stores alone": (
            WAIT_FOR_NODES,
            WAIT_FOR_NODES.replace("_for_cluster", ""),
        ),
        "a wait for places that sees the block's own reads alone": (
            WAIT_FOR_PLACES,
            WAIT_FOR_PLACES.replace("_for_cluster", ""),
        ),
        "places that are freed without a release": ("release_to(lane)", "arrive_at(lane)"),
        "places that are freed without a fence": ("    fence_async_proxy_shared();\n    __sync", "    __sync"),
        "places that are freed before all lanes have read them": (
            "    __syncwarp();\n    if (lane < split)",
            "    if (lane < split)",
        ),
    },
    alone(OF_TWO_CONSUMERS): {
        "the nodes of one consumer over those of another": (
            "ring.staging + index * Tile::staged * box_nbytes) + (from",
            "ring.staging) + (from",
        )
    },
}

"""Negative controls of tiles whose leaves the blocks of a cluster split; test_matmul.py runs what is right."""

from __future__ import annotations

import pytest
import torch

from graphar.plan.tiles import MatmulTile
from tests.host.build import known
from tests.host.test_matmul import FILES, RandomData, notices

pytestmark = pytest.mark.host

OF_PAIRS = MatmulTile(64, 64, 2, leaves=8, split=4)  # a block adds two leaves
OF_ONE = MatmulTile(64, 64, 2, leaves=4, split=4)
OF_TWO_CONSUMERS = MatmulTile(128, 64, 2, leaves=2, split=2)
READ = "nodes[from] = *place(from, i);"
TREE = """        for (int width = 1; width < split; width *= 2)
#pragma unroll
          for (int left = 0; left < split; left += 2 * width) sums[left] = sums[left] + sums[left + width];
"""
PART_OF_K = "block_in_cluster() * (a.k / Tile::split)"
WAIT_FOR_NODES = "while (!mine.try_wait_for_cluster(number)) continue;"
WAIT_FOR_PLACES = "while (!freed(ring, index).try_wait_for_cluster(number - 1)) continue;"
# Random data tell an order of additions. Integers tell everything else.
MUTANTS_OF_ORDER = {
    "the nodes of two blocks swapped": (READ, "nodes[from] = *place(from == 1 ? 2 : from == 2 ? 1 : from, i);"),
    "nodes added in the order of blocks": (
        TREE,
        "        for (int from = 1; from < split; ++from) sums[0] = sums[0] + sums[from];\n",
    ),
    "blocks with the leaves of the next one": (PART_OF_K, "(block_in_cluster() + 1) % 4 * (a.k / Tile::split)"),
    "a first leaf that is a step too long": (
        "k < multiplier.a.k / Tile::leaves;",
        "k < multiplier.a.k / Tile::leaves + (leaf == 0) * tile_depth - (leaf == 1) * tile_depth;",
    ),
    "a node rounded to bf16": (READ, f"{{ {READ} for (u32& word : nodes[from].word) word &= 0xffff0000u; }}"),
}
MUTANTS = {
    "nodes read before they have come": (OF_ONE, WAIT_FOR_NODES, "", "plain"),
    "nodes over those of the tile before": (OF_ONE, WAIT_FOR_PLACES, "(void)number;", "plain"),
    "a wait for nodes that sees the block's own stores alone": (
        OF_ONE,
        WAIT_FOR_NODES,
        WAIT_FOR_NODES.replace("_for_cluster", ""),
        "thread",
    ),
    "a wait for places that sees the block's own reads alone": (
        OF_ONE,
        WAIT_FOR_PLACES,
        WAIT_FOR_PLACES.replace("_for_cluster", ""),
        "thread",
    ),
    "places that are freed without a release": (OF_ONE, "release_to(lane)", "arrive_at(lane)", "thread"),
    "places that are freed without a fence": (
        OF_ONE,
        "    fence_async_proxy_shared();\n    __sync",
        "    __sync",
        "thread",
    ),
    "places that are freed before all lanes have read them": (
        OF_ONE,
        "    __syncwarp();\n    if (lane < split)",
        "    if (lane < split)",
        "thread",
    ),
    "all of K for every block": (OF_ONE, PART_OF_K, "0 * (a.k / Tile::split)", "plain"),
    "the bias of another block's columns": (
        OF_ONE,
        "add_bias<Result>(a, first, part);",
        "add_bias<Result>(a, column, part);",
        "plain",
    ),
    "rows below the last one": (OF_ONE, "y >= a.m || x >= a.n", "x >= a.n", "plain"),
    "columns beyond the last one": (OF_ONE, "y >= a.m || x >= a.n", "y >= a.m", "plain"),
    "the nodes of one consumer over those of another": (
        OF_TWO_CONSUMERS,
        "ring.staging + index * Tile::staged * box_nbytes) + (from",
        "ring.staging) + (from",
        "plain",
    ),
}


known(FILES, MUTANTS_OF_ORDER, MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS_OF_ORDER)
def test_another_order_of_additions_is_noticed(mistake):
    old, new = MUTANTS_OF_ORDER[mistake]

    assert notices(OF_PAIRS, old, new, result=torch.float32, seeds=3, largest=0.5, data=RandomData)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    tile, old, new, sanitizer = MUTANTS[mistake]

    assert notices(tile, old, new, sanitizer)

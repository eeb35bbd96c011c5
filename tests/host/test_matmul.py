"""The matmul, executed on the host: exact results of integers, and the specified bits of other data.

Bulk loads and stores of boxes, products and barriers are modelled as PTX documents them, and operand descriptors are
decoded. tests/matmul/test_matmul_gpu.py tests what needs a GPU.
"""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from graphar.numerics import leaf_tree
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import MATMUL_TYPES, Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import Scratch
from graphar.plan.tiles import MatmulTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import Call, KernelFailure, Simulation
from tests.host.build import build, known
from tests.host.matmul_operands import packed, wrong_elements

pytestmark = pytest.mark.host

# Small tiles, with the fewest stages that are possible and with one more.
TILES = (
    MatmulTile(64, 64, 2),
    MatmulTile(64, 128, 3, cluster=2),
    MatmulTile(128, 64, 2, cluster=2),
    MatmulTile(128, 192, 2, cluster=2),
    MatmulTile(192, 160, 2),
    MatmulTile(128, 64, 3, alternating=True),
)
# K in several leaves. The sum of the first half waits in shared memory in the one of 160 columns and in the last one.
LEAF_TILES = (
    MatmulTile(64, 64, 2, leaves=2),
    MatmulTile(128, 64, 3, cluster=2, leaves=4),
    MatmulTile(64, 64, 2, leaves=8),
    MatmulTile(64, 160, 2, leaves=4),
    MatmulTile(128, 96, 2, leaves=8),
    MatmulTile(128, 128, 2, leaves=8),
)
# Leaves that the blocks of a cluster split: one or several a block.
SPLIT_TILES = (
    MatmulTile(64, 64, 2, leaves=2, split=2),
    MatmulTile(128, 64, 3, leaves=4, split=4),
    MatmulTile(64, 64, 2, leaves=8, split=8),
    MatmulTile(64, 128, 2, leaves=8, split=4),
    MatmulTile(128, 96, 2, leaves=8, split=4),
    MatmulTile(128, 128, 2, leaves=8, split=2),
)
# Dtype, tile, layout of the weight, dtype of the result.
ROUNDED = [(dtype, tile, layout, dtype) for dtype in MATMUL_TYPES for tile in TILES for layout in tile.layouts]
OF_LEAVES = [
    (dtype, tile, layout, result)
    for dtype, tile in itertools.product(MATMUL_TYPES, (*LEAF_TILES, *SPLIT_TILES))
    for layout, result in itertools.product(tile.layouts, (dtype, torch.float32))
]
IN_FP32 = [(torch.bfloat16, tile, "by_rows", torch.float32) for tile in TILES]
# With a bias in fp16.
IN_FP16 = [(torch.bfloat16, tile, "by_rows", torch.float16) for tile in (TILES[0], SPLIT_TILES[0])]
KINDS = (*ROUNDED, *OF_LEAVES, *IN_FP32, *IN_FP16)
SEEDS = {"plain": 6, "thread": 1, "address": 2}
OF_ANY_KIND = Algorithm.ONE_SHOT_PUSH  # any: Simulation requires one
MOST_SEEDS = 30  # until a mistake is noticed


def program_of(kinds, sanitizer, mutation=None):
    names = [", ".join([TYPE_NAMES[kind[0]], str(kind[1]), kind[2], TYPE_NAMES[kind[3]]]) for kind in kinds]
    return build(tuple(KernelSource("one_matmul.cu", f"one_matmul<{name}>") for name in names), sanitizer, mutation)


class Integers:
    """Operands whose product is exact, in whatever order it is added. It is not rounded yet, and so are those below."""

    @staticmethod
    def operand(shape, generator):
        return torch.randint(-8, 9, shape, generator=generator)

    @staticmethod
    def product(a, w, bias, leaves):
        return a.double() @ w.double().t() + bias.double()


class RandomData:
    """Operands whose product has the bits of its order: of K, or of the tree of its leaves."""

    @staticmethod
    def operand(shape, generator):
        return torch.randn(shape, generator=generator)

    @staticmethod
    def product(a, w, bias, leaves):
        return leaf_tree.partial(a, w, leaf_tree.LEAVES // leaves) + bias


def wrong_bytes(program, index: int, kind, seed: int, largest: float = 1.0, data=Integers, **of_call) -> int:
    """How many elements and guards are wrong after one matmul. The seed decides its size; ``largest`` scales it."""
    dtype, tile, layout, result = kind
    choices = random.Random(f"{kind} {seed}")
    height = tile.rows * tile.cluster
    m, n = (choices.randint(1, int(most * largest)) for most in (2.5 * height, 2 * tile.columns + 70))
    n = -(-n // STORE_COLUMNS) * STORE_COLUMNS
    k, rows = choices.randint(1, int(300 * largest)), -(-m // height)
    if tile.leaves > 1:
        k = leaf_tree.LEAF_UNIT * tile.leaves * choices.randint(1, 2)
    generator = torch.Generator().manual_seed(seed)
    a, w, bias = (data.operand(shape, generator) for shape in ((m, k), (n, k), (1, n)))
    a, w, bias = a.to(dtype), w.to(dtype), bias.to(dtype if result == torch.float32 else result)
    with_bias = result != torch.float32 and choices.random() < 0.5
    every_tile = (0, rows * -(-n // tile.columns))
    x = packed([m, n, k, choices.randrange(rows), choices.randint(1, rows), with_bias, *every_tile], a, w, bias, layout)
    nbytes = m * n * result.itemsize
    # ThreadSanitizer has room for so many threads.
    most = 3 if tile.split == 1 else max(1, 2048 // (tile.blocks * tile.threads))
    shape = Config(OF_ANY_KIND, tile.blocks * choices.randint(1, most), tile.threads)
    simulation = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0, tile.shared_nbytes + 2048), index, seed)

    (outcome,) = simulation.run([Call(0, shape, [x], (len(x),), (nbytes,), cluster=tile.blocks, **of_call)])

    expected = data.product(a, w, bias if with_bias else torch.zeros_like(bias), tile.leaves).to(result)
    return wrong_elements(outcome.results[0], expected) + outcome.broken_guards


every_tile = pytest.mark.parametrize("tile", [*TILES, *LEAF_TILES, *SPLIT_TILES], ids=str)


@pytest.mark.parametrize("sanitizer", SEEDS)
@every_tile
def test_integers_give_the_exact_result(tile, sanitizer, whole):
    kinds = [kind for kind in KINDS if kind[1] == tile and (sanitizer == "plain" or kind[0] is torch.bfloat16)]
    kinds = kinds if whole or sanitizer == "plain" else kinds[:1]  # what orders accesses does not depend on the others
    program = program_of(kinds, sanitizer)

    for seed in range(SEEDS[sanitizer] if whole else min(SEEDS[sanitizer], 2)):
        for index, kind in enumerate(kinds):
            assert wrong_bytes(program, index, kind, seed, 1.0 if sanitizer == "plain" else 0.5) == 0, (kind, seed)


@every_tile
def test_random_data_are_added_in_the_order_of_the_specification(tile):
    kinds = [kind for kind in KINDS if kind[1] == tile]
    program = program_of(kinds, "plain")

    for index, kind in enumerate(kinds):
        assert wrong_bytes(program, index, kind, 0, data=RandomData) == 0, kind


def tiles_of_two_grids(tile, mutation=None) -> list:
    """Which of 2 x 3 tiles are right after a grid has computed the first four, and one the last two."""
    m, n, k = 2 * tile.rows, 3 * tile.columns, leaf_tree.LEAF_UNIT * tile.leaves
    generator = torch.Generator().manual_seed(3)
    a, w = (Integers.operand((length, k), generator).bfloat16() for length in (m, n))
    bias = torch.zeros(1, n, dtype=a.dtype)
    expected = Integers.product(a, w, bias, tile.leaves).float()
    program = program_of([(torch.bfloat16, tile, "by_rows", torch.float32)], "plain", mutation)
    simulation = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0, tile.shared_nbytes + 2048), 0, 0)
    shape, right = Config(OF_ANY_KIND, 2 * tile.blocks, tile.threads), []
    for first, end in ((0, 4), (4, 6)):
        x = packed([m, n, k, 1, 1, False, first, end], a, w, bias, "by_rows")

        (outcome,) = simulation.run([Call(0, shape, [x], (len(x),), (4 * m * n,), cluster=tile.blocks)])

        is_right = outcome.results[0].view(torch.float32).view(m, n) == expected
        right.append(is_right.view(2, tile.rows, 3, tile.columns).all(dim=3).all(dim=1).tolist())
    return right


# The walk begins at the second row.
OF_TWO_GRIDS = [[[True, False, False], [True, True, True]], [[False, True, True], [False, False, False]]]


@pytest.mark.parametrize("tile", [LEAF_TILES[0], SPLIT_TILES[0]], ids=str)
def test_a_grid_computes_a_part_of_the_tiles(tile):
    assert tiles_of_two_grids(tile) == OF_TWO_GRIDS


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("(Tile::leaves > 1 ? a.first_tile : 0) + ", ""),
        ("if (Tile::leaves > 1 && number >= a.end_tile) return false;", ""),
        ("    number += tiles * (gridDim.x / Tile::blocks);\n", ""),
    ],
    ids=[
        "a grid that begins with the first tile",
        "a grid that goes on to the last tile",
        "tiles that are not counted",
    ],
)
def test_a_grid_that_computes_other_tiles_is_noticed(old, new):
    mutation = Mutation("device/matmul/tiles.cuh", old, new)

    assert tiles_of_two_grids(LEAF_TILES[0], mutation) != OF_TWO_GRIDS


def test_a_kernel_without_its_wait_for_the_one_before_is_noticed():
    kinds = [kind for kind in KINDS if kind[1] == TILES[0]]
    program = program_of(kinds, "plain")

    assert any(wrong_bytes(program, 0, kinds[0], seed, waits=False) for seed in range(4))


# ---- negative controls: what is wrong, the text that makes it so, and the sanitizer that notices ---------------------

FILES = tuple(
    [f"device/matmul/{name}.cuh" for name in ("ring", "pipeline", "tile_store", "leaf_tree", "node_exchange")]
)
WAIT_AND_RELEASE = "wait_for_all_but_last_products();\n      if (k > 0) release(before);"
LAST_WAIT_AND_RELEASE = "wait_for_products(sums);\n    release(last);"
MUTANTS = {
    "a place given back before its products are complete": (
        WAIT_AND_RELEASE,
        "if (k > 0) release(before);\n      wait_for_all_but_last_products();",
        "plain",
    ),
    "the last place given back before its products are complete": (
        LAST_WAIT_AND_RELEASE,
        "release(last);\n    wait_for_products(sums);",
        "plain",
    ),
    "sums read before the last products are complete": ("    wait_for_products(sums);\n", "    (void)sums;\n", "plain"),
    "a load that does not wait for the place": (
        "while (!emptied[at.place].try_wait(at.use - 1)) continue;",
        "(void)at;",
        "plain",
    ),
    "products that do not wait for the load": (
        "while (!ring.filled[at.place].try_wait(at.use)) continue;",
        "",
        "plain",
    ),
    "sums that go on from the tile before": ("k + step == 0", "0 * k + at.use + at.place + step == 0", "plain"),
    "a staged box written before the one before was read": (
        "if (leader && box > 0) wait_for_bulk_sources<Tile::staged - 1>();",
        "",
        "plain",
    ),
    "a box sent before all threads have written it": (
        "      fence_async_proxy_shared();\n      sync_warpgroup(barrier);\n",
        "      fence_async_proxy_shared();\n",
        "plain",
    ),
    "a box sent without a fence": ("      fence_async_proxy_shared();\n      sync", "      sync", "thread"),
    "mbarriers made without a fence": ("    }\n    fence_async_proxy_shared();", "    }", "thread"),
    "products that follow an access to their sums without a fence": ("    fence_sums();\n", "", "plain"),
    "a kernel that ends before its stores": ("    if (leader) wait_for_bulk_stores();\n", "", "thread"),
}


def _file_of(text: str) -> str:
    """Which of the kernel's files has the text."""
    (file,) = [name for name in FILES if text in (source_directory() / name).read_text()]
    return file


def is_noticed(program, kind, seed: int, largest: float, data=Integers) -> bool:
    try:
        return wrong_bytes(program, 0, kind, seed, largest, data) > 0
    except KernelFailure:
        return True


WIDE, ALTERNATING = MatmulTile(192, 160, 2), MatmulTile(128, 64, 3, alternating=True)
OF_ONE_BOX = MatmulTile(128, 64, 2)
MUTANTS_OF_OTHER_TILES = {
    "a tile staged before the one before was read": (
        OF_ONE_BOX,
        "if (leader && box == 0) wait_for_bulk_sources<0>();",
        "",
    ),
    "a last box that is stored beyond its tile": (
        WIDE,
        "tensor_store(c, column + first,",
        "tensor_store(c, column + 64 * box,",
    ),
    "consumers that alternate and do not wait for each other": (
        ALTERNATING,
        "while (!queued[1 - index].try_wait(index + number - 1)) continue;",
        "",
    ),
    "a consumer that does not step over the other's operands": (
        ALTERNATING,
        "if (index + number > 0) at.skip(",
        "if (index > 0) at.skip(",
    ),
    "the first rows for all rows of a consumer": (
        ALTERNATING,
        "advance(rows, place + block * box_nbytes + step * a_step)",
        "advance(rows, place + step * a_step)",
    ),
}


def notices(tile, old, new, sanitizer="plain", result=torch.bfloat16, seeds=MOST_SEEDS, largest=1.0, data=Integers):
    """Whether a run with one of the seeds is wrong once ``new`` stands in place of ``old``."""
    kind = (torch.bfloat16, tile, "by_rows", result)
    program = program_of([kind], sanitizer, Mutation(_file_of(old), old, new))
    return any(is_noticed(program, kind, seed, largest, data) for seed in range(seeds))


@pytest.mark.parametrize("mistake", MUTANTS_OF_OTHER_TILES)
def test_a_mistake_of_other_tiles_is_noticed(mistake):
    assert notices(*MUTANTS_OF_OTHER_TILES[mistake])


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    *texts, sanitizer = MUTANTS[mistake]
    tile, largest = MatmulTile(64, 192, 2, cluster=2), 1.0 if sanitizer == "plain" else 0.5

    assert notices(tile, *texts, sanitizer, largest=largest)


# ---- leaves ----

TREE, SPILLING = MatmulTile(64, 64, 2, leaves=8), MatmulTile(64, 128, 2, leaves=8)
SOON_SAVED = MatmulTile(64, 256, 2, leaves=2)  # the boxes of the tile before may still be on their way
FIRST_PRODUCTS = "multiplier.queue_place(operands, at, nodes[leaf], 0);"
SAVED_SUM = "sums[i + w] = __uint_as_float(pack.word[w]) + sums[i + w];"
# Random data tell an order of additions. Integers tell everything else.
MUTANTS_OF_ORDER = {
    "leaves added one after another": (TREE, "width & leaf;", "width == 1 && leaf > 0;"),
    "the halves of the leaves interleaved": (
        TREE,
        "int width = 1; width & leaf; width *= 2",
        "int width = leaves / 2; width & leaf; width /= 2",
    ),
    "a first leaf that is a step too long": (
        TREE,
        "k < multiplier.a.k / Tile::leaves;",
        "k < multiplier.a.k / Tile::leaves + (leaf == 0) * tile_depth - (leaf == 1) * tile_depth;",
    ),
    "a leaf that goes on from the one before": (
        TREE,
        FIRST_PRODUCTS,
        """if (leaf > 0) {
          wait_for_products(nodes[leaf - 1]);
          for (int i = 0; i < count; ++i) nodes[leaf][i] = nodes[leaf - 1][i], nodes[leaf - 1][i] = 0;
        }
        multiplier.queue_place(operands, at, nodes[leaf], leaf);""",
    ),
    "a sum that waits in shared memory rounded to bf16": (
        SPILLING,
        SAVED_SUM,
        "sums[i + w] = __uint_as_float(pack.word[w] & 0xffff0000u) + sums[i + w];",
    ),
}
MUTANTS_OF_LEAVES = {
    "a leaf added before its products are complete": (TREE, "wait_for_all_but_last_products(nodes[leaf - 1]);", ""),
    "a place given back before the products of a leaf are complete": (
        TREE,
        "wait_for_all_but_last_products(nodes[leaf - 1]);\n        multiplier.release(before);",
        "multiplier.release(before);\n        wait_for_all_but_last_products(nodes[leaf - 1]);",
    ),
    "a leaf that begins with the sums of the tile before": (TREE, FIRST_PRODUCTS, FIRST_PRODUCTS.replace("0", "1")),
    "a sum saved before its products are complete": (
        SPILLING,
        "multiplier.finish(nodes[leaf - 1], before);",
        "multiplier.release(before);",
    ),
    "a sum saved over boxes that were not read": (
        SOON_SAVED,
        "if (threadIdx.x % 128 == 0) wait_for_bulk_sources<0>();",
        "",
    ),
    "a sum saved before the first thread has waited for the boxes": (
        SOON_SAVED,
        "    sync_warpgroup(1 + multiplier.index);\n",
        "",
    ),
    "a box over a saved sum that was not read": (
        SPILLING,
        "if (box == 0 || box >= Tile::staged) {",
        "if (box >= Tile::staged) {",
    ),
    "a saved sum that is not added": (SPILLING, SAVED_SUM, "sums[i + w] += 0 * pack.word[w];"),
    "the sum of one consumer saved over that of another": (
        MatmulTile(128, 128, 2, leaves=8),
        "multiplier.ring.staging + multiplier.index * Tile::staged * box_nbytes",
        "multiplier.ring.staging",
    ),
    "boxes of the next consumer over a saved sum": (
        MatmulTile(128, 128, 2, leaves=8),
        "(index * Tile::staged + box % Tile::staged) * box_nbytes",
        "(index + box % Tile::staged) * box_nbytes",
    ),
}


known(FILES, MUTANTS, MUTANTS_OF_OTHER_TILES, MUTANTS_OF_ORDER, MUTANTS_OF_LEAVES)


@pytest.mark.parametrize("mistake", MUTANTS_OF_ORDER)
def test_another_order_of_additions_is_noticed(mistake):
    assert notices(*MUTANTS_OF_ORDER[mistake], result=torch.float32, seeds=3, largest=0.5, data=RandomData)


@pytest.mark.parametrize("mistake", MUTANTS_OF_LEAVES)
def test_a_mistake_in_leaves_is_noticed(mistake):
    assert notices(*MUTANTS_OF_LEAVES[mistake])

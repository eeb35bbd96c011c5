"""The matmul, executed on the host: exact results of integers, and the specified bits of other data.

Bulk loads and stores of boxes, products and barriers are modelled as PTX documents them, and operand descriptors are
decoded. tests/matmul/test_matmul_gpu.py tests what needs a GPU.
"""

from __future__ import annotations

import random

import pytest
import torch

from graphar import reference
from graphar.matmul.gemm import STORE_COLUMNS
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import MATMUL_TYPES, Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import Scratch
from graphar.plan.tiles import MatmulTile
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import source_directory
from tests.host.build import Mutation, build
from tests.host.matmul_operands import packed, wrong_elements
from tests.host.simulate import Call, KernelFailure, Simulation

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
KINDS = tuple([(dtype, tile, layout) for dtype in MATMUL_TYPES for tile in TILES for layout in tile.layouts])
SEEDS = {"plain": 6, "thread": 1, "address": 2}
OF_ANY_KIND = Algorithm.ONE_SHOT_PUSH  # any: Simulation requires one
MOST_SEEDS = 30  # until a mistake is noticed


def program_of(kinds, sanitizer, mutation=None):
    names = [f"one_matmul<{TYPE_NAMES[dtype]}, {tile}, {layout}>" for dtype, tile, layout in kinds]
    return build(tuple(KernelSource("one_matmul.cu", name) for name in names), sanitizer, mutation)


class Integers:
    """Operands whose product is exact, in whatever order it is added."""

    @staticmethod
    def operand(shape, generator):
        return torch.randint(-8, 9, shape, generator=generator)

    @staticmethod
    def product(a, w, bias):
        return (a.double() @ w.double().t() + bias.double()).to(a.dtype)


class RandomData:
    """Operands whose product has the bits of its order."""

    @staticmethod
    def operand(shape, generator):
        return torch.randn(shape, generator=generator)

    @staticmethod
    def product(a, w, bias):
        return reference.linear(a, w, bias[0], tp_invariant=True)


def wrong_bytes(program, index: int, kind, seed: int, largest: float = 1.0, data=Integers, **of_call) -> int:
    """How many elements and guards are wrong after one matmul. The seed decides its size; ``largest`` scales it."""
    dtype, tile, layout = kind
    choices = random.Random(f"{kind} {seed}")
    height = tile.rows * tile.cluster
    m, n = (choices.randint(1, int(most * largest)) for most in (2.5 * height, 2 * tile.columns + 70))
    n = -(-n // STORE_COLUMNS) * STORE_COLUMNS
    k, rows = choices.randint(1, int(300 * largest)), -(-m // height)
    generator = torch.Generator().manual_seed(seed)
    a, w, bias = (data.operand(shape, generator).to(dtype) for shape in ((m, k), (n, k), (1, n)))
    with_bias = choices.random() < 0.5
    x = packed([m, n, k, choices.randrange(rows), choices.randint(1, rows), with_bias], a, w, bias, layout)
    nbytes = m * n * dtype.itemsize
    shape = Config(OF_ANY_KIND, tile.cluster * choices.randint(1, 3), tile.threads)
    simulation = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0, tile.shared_nbytes + 2048), index, seed)

    (outcome,) = simulation.run([Call(0, shape, [x], (len(x),), (nbytes,), cluster=tile.cluster, **of_call)])

    expected = data.product(a, w, bias if with_bias else torch.zeros_like(bias))
    return wrong_elements(outcome.results[0], expected) + outcome.broken_guards


@pytest.mark.parametrize("sanitizer", SEEDS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_integers_give_the_exact_result(tile, sanitizer):
    kinds = [kind for kind in KINDS if kind[1] == tile and (sanitizer == "plain" or kind[0] is torch.bfloat16)]
    program = program_of(kinds, sanitizer)

    for seed in range(SEEDS[sanitizer]):
        for index, kind in enumerate(kinds):
            assert wrong_bytes(program, index, kind, seed, 1.0 if sanitizer == "plain" else 0.5) == 0, (kind, seed)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_random_data_are_added_in_the_order_of_the_specification(tile):
    kinds = [kind for kind in KINDS if kind[1] == tile]
    program = program_of(kinds, "plain")

    for index, kind in enumerate(kinds):
        assert wrong_bytes(program, index, kind, 0, data=RandomData) == 0, kind


def test_a_kernel_without_its_wait_for_the_one_before_is_noticed():
    kinds = [kind for kind in KINDS if kind[1] == TILES[0]]
    program = program_of(kinds, "plain")

    assert any(wrong_bytes(program, 0, kinds[0], seed, waits=False) for seed in range(4))


# ---- negative controls: what is wrong, the text that makes it so, and the sanitizer that notices ---------------------

FILES = ("device/matmul/ring.cuh", "device/matmul/pipeline.cuh", "device/matmul/tile_store.cuh")
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
    "sums that go on from the tile before": ("k + step == 0", "at.use + at.place + step == 0", "plain"),
    "a staged box written before the one before was read": (
        "if (leader && box > 0) wait_for_bulk_sources<Tile::staged - 1>();",
        "",
        "plain",
    ),
    "a tile staged before the one before was read": (
        "if (leader && box == 0) wait_for_bulk_sources<0>();",
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
    "products that follow an access to their sums without a fence": ("      fence_sums();\n", "", "plain"),
    "a kernel that ends before its stores": ("    if (leader) wait_for_bulk_stores();\n", "", "thread"),
}


def _file_of(text: str) -> str:
    """Which of the kernel's files has the text."""
    (file,) = [name for name in FILES if text in (source_directory() / name).read_text()]
    return file


def is_noticed(program, kind, seed: int, largest: float) -> bool:
    try:
        return wrong_bytes(program, 0, kind, seed, largest) > 0
    except KernelFailure:
        return True


WIDE, ALTERNATING = MatmulTile(192, 160, 2), MatmulTile(128, 64, 3, alternating=True)
MUTANTS_OF_OTHER_TILES = {
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


@pytest.mark.parametrize("mistake", MUTANTS_OF_OTHER_TILES)
def test_a_mistake_of_other_tiles_is_noticed(mistake):
    tile, old, new = MUTANTS_OF_OTHER_TILES[mistake]
    kind = (torch.bfloat16, tile, "by_rows")
    program = program_of([kind], "plain", Mutation(_file_of(old), old, new))

    assert any(is_noticed(program, kind, seed, 1.0) for seed in range(MOST_SEEDS))


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    old, new, sanitizer = MUTANTS[mistake]
    kind = (torch.bfloat16, MatmulTile(64, 192, 2, cluster=2), "by_rows")
    program = program_of([kind], sanitizer, Mutation(_file_of(old), old, new))

    assert any(is_noticed(program, kind, seed, 1.0 if sanitizer == "plain" else 0.5) for seed in range(MOST_SEEDS))

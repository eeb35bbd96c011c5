"""Products of every kind, executed on the host: exact integers, and the specified bits of other data.

The GPU tests of tests/product test what needs a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
from dataclasses import replace

import pytest
import torch

from graphar.numerics.codecs import FP8, Codec
from graphar.numerics.leaf_tree import LEAF_UNIT
from graphar.plan.algorithms import MATMUL_TYPES, Algorithm
from graphar.plan.config import Config
from graphar.plan.tiles import MatmulTile
from graphar.runtime.catalogue import SCALE_FORMATS, SKINNY_KERNELS
from graphar.runtime.compiler import source_directory
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import Call
from tests.changes import included
from tests.host import build, matmul_mistakes, scaled_mistakes, summed_mistakes
from tests.host.build import known, seeds
from tests.host.mutant import notices
from tests.host.products import (
    BF16,
    EPILOGUE,
    FP16,
    FP32,
    GATHER,
    GATHERED_TILES,
    OF_ANY_KIND,
    REDUCE,
    SCATTER,
    SKINNY_TILES,
    SUMMED_TILES,
    EveryNumber,
    Integers,
    Kind,
    Operands,
    Products,
    RandomData,
    alone,
    kinds_of,
    packed,
    partial_skinny_tiles,
    partial_tiles,
)

ONE_SHOT, TWO_SHOT = Algorithm.MATMUL_ONE_SHOT, Algorithm.MATMUL_TWO_SHOT

# Small tiles, with the fewest stages that are possible, and with one more.
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
# Of e4m3. The last ones have one accumulator of blocks.
SCALED_TILES = (
    MatmulTile(64, 64, 2),
    MatmulTile(64, 128, 3, cluster=2),
    MatmulTile(128, 128, 2),
    MatmulTile(128, 192, 2),
    MatmulTile(128, 192, 3, cluster=2),
)
SUMMED_SCALED_TILES = tuple(
    MatmulTile(*size, whole=True) for size in ((64, 64, 2), (64, 128, 2, 2), (128, 64, 2), (128, 128, 2), (128, 192, 2))
)
GATHERED_SCALED_TILES = (MatmulTile(64, 64, 2), MatmulTile(128, 128, 2), MatmulTile(128, 192, 2, cluster=2))


def of_one_rank(tile: MatmulTile) -> tuple[Kind, ...]:
    """All dtypes of operands and results, and layouts, of a tile; of two also a bias of another dtype than operands."""
    found = [
        Kind(tile, layout, dtype=dtype, result=result)
        for dtype, layout in itertools.product(MATMUL_TYPES, tile.layouts)
        for result in ((dtype, FP32) if tile.leaves > 1 else (dtype,))
    ]
    found += [Kind(tile, result=FP32)] if tile.leaves == 1 else []
    return (*found, *([Kind(tile, result=FP16)] if tile in (TILES[0], SPLIT_TILES[0]) else []))


SEEDS = {"plain": 6, "thread": 1, "address": 2}
# Of which the sample has for each tile one. Without a sanitizer, random data of the same kinds and sizes show whatever
# integers do.
SANITIZED = ("thread", "address")
every_tile = pytest.mark.parametrize("tile", [*TILES, *LEAF_TILES, *SPLIT_TILES], ids=str)
every_scaled_tile = pytest.mark.parametrize("tile", SCALED_TILES, ids=str)


def with_sanitizers(tiles):
    """Parameters: each of the tiles with every sanitizer."""
    for at, tile in enumerate(tiles):
        for sanitizer in SEEDS:
            marks = () if sanitizer == SANITIZED[at % 2] else pytest.mark.whole
            yield pytest.param(tile, sanitizer, marks=marks, id=f"{tile}-{sanitizer}")


def sampled(products: Products) -> Products:
    """Without WHOLE few kernels of ranks under ThreadSanitizer, each once: a run takes twenty times as long."""
    if build.WHOLE or products.sanitizer != "thread" or not products.algorithm:
        return products
    few = products.kinds[::5]
    return replace(products, kinds=few, calls=len(few))


def expect_no_faults(products: Products, most_seeds: int) -> None:
    products = sampled(products)
    for seed in seeds(most_seeds, share=3 if 1 < products.world_size < 8 else 6):
        assert products.faults(seed) == [], seed


@pytest.mark.host
@pytest.mark.parametrize(("tile", "sanitizer"), list(with_sanitizers([*TILES, *LEAF_TILES, *SPLIT_TILES])))
def test_integers_give_the_exact_result(tile, sanitizer):
    kinds = of_one_rank(tile)
    kinds = kinds if sanitizer == "plain" else kinds[:1]  # what orders accesses does not depend on the others

    expect_no_faults(Products(None, kinds, 1, sanitizer, calls=len(kinds)), SEEDS[sanitizer])


@pytest.mark.host
@every_tile
def test_random_data_are_added_in_the_order_of_the_specification(tile):
    kinds = of_one_rank(tile)

    expect_no_faults(Products(None, kinds, data=RandomData, calls=len(kinds)), 1)


@pytest.mark.host
@pytest.mark.parametrize(("tile", "sanitizer"), list(with_sanitizers(SCALED_TILES)))
def test_integers_with_scales_give_the_exact_result(tile, sanitizer):
    results = (BF16, FP16, FP32) if sanitizer == "plain" else (BF16,)
    kinds = tuple(Kind(tile, scales=form, result=result) for result in results for form in SCALE_FORMATS)

    expect_no_faults(Products(None, kinds, 1, sanitizer, calls=len(kinds)), SEEDS[sanitizer])


@pytest.mark.host
@every_scaled_tile
def test_random_data_with_scales_have_the_bits_of_the_specification(tile):
    kinds = tuple(Kind(tile, scales=form, result=result) for result in (BF16, FP16, FP32) for form in SCALE_FORMATS)

    expect_no_faults(Products(None, kinds, data=RandomData, calls=len(kinds)), 1)


@pytest.mark.host
@pytest.mark.parametrize("form", SCALE_FORMATS)
def test_every_number_of_e4m3_has_the_bits_of_the_specification(form):
    expect_no_faults(alone(SCALED_TILES[0], form, FP32, data=EveryNumber, calls=1), 1)


@pytest.mark.host
@pytest.mark.parametrize(
    "kind", [Kind(TILES[0]), Kind(SCALED_TILES[0], scales="RowScales")], ids=lambda one: one.scales
)
def test_a_kernel_without_its_wait_for_the_one_before_is_noticed(kind):
    assert any(Products(None, (kind,), calls=1).faults(seed, waits=False) for seed in range(4))


OF_TWO_GRIDS = [[[True, True, True], [True, False, False]], [[False, False, False], [False, True, True]]]


def tiles_of_two_grids(tile, mutation=None) -> list:
    """Which of 2 x 3 tiles are right after a grid has computed the first four, and one the last two."""
    m, n, k = 2 * tile.rows, 3 * tile.columns, LEAF_UNIT * tile.leaves
    generator = torch.Generator().manual_seed(3)
    a, w = (Integers.operand((length, k), generator).bfloat16() for length in (m, n))
    own, products, right = Operands(a, w, torch.zeros(n, dtype=BF16), None), alone(tile, result=FP32), []
    shape, expected = Config(OF_ANY_KIND, 2 * tile.blocks, tile.threads), a.float() @ w.float().t()
    for first, end in ((0, 4), (4, 6)):
        x = packed(own, m, group_rows=1, first_tile=first, end_tile=end)

        (outcome,) = products.run([Call(0, shape, [x], (len(x),), (4 * m * n,), cluster=tile.blocks)], 0, mutation)

        is_right = outcome.results[0].view(FP32).view(m, n) == expected
        right.append(is_right.view(2, tile.rows, 3, tile.columns).all(dim=3).all(dim=1).tolist())
    return right


@pytest.mark.host
@pytest.mark.parametrize("tile", [LEAF_TILES[0], SPLIT_TILES[0]], ids=str)
def test_a_grid_computes_a_part_of_the_tiles(tile):
    assert tiles_of_two_grids(tile) == OF_TWO_GRIDS


GRIDS = "device/matmul/tiles.cuh"
MISTAKES_OF_GRIDS = {
    "a grid that begins with the first tile": (GRIDS, "(Tile::leaves > 1 ? a.first_tile : 0) + ", ""),
    "a grid that goes on to the last tile": (GRIDS, "if (Tile::leaves > 1 && number >= a.end_tile) return false;", ""),
    "tiles that are not counted": (GRIDS, "    number += tiles * (gridDim.x / Tile::blocks);\n", ""),
}


known(Mutation(*one) for one in MISTAKES_OF_GRIDS.values())


@pytest.mark.host
@pytest.mark.parametrize("mistake", MISTAKES_OF_GRIDS)
def test_a_grid_that_computes_other_tiles_is_noticed(mistake):
    assert tiles_of_two_grids(LEAF_TILES[0], Mutation(*MISTAKES_OF_GRIDS[mistake])) != OF_TWO_GRIDS


SUMMED = (SCATTER, REDUCE)
CODED = kinds_of([tile for tile in SUMMED_TILES if tile.columns <= 128])
INT8, INT3, FP8_IN_64 = Codec(8), Codec(3, 64, scale_dtype=torch.float32), Codec(FP8, 64)
every_summed = pytest.mark.parametrize("algorithm", SUMMED)


def runs(algorithms, kinds, most_seeds: dict, then=None):
    """A test's parameters: products, and seeds by sanitizer and ranks. ``kinds``, or a function of the ranks."""
    for algorithm, ((sanitizer, world_size), count) in itertools.product(algorithms, most_seeds.items()):
        these = kinds(world_size) if callable(kinds) else kinds
        made = Products(algorithm, these, world_size, sanitizer, then)
        yield pytest.param(made, count, id=f"{algorithm}-{sanitizer}-{world_size}")


def in_a_row(*given):
    return pytest.mark.parametrize(("products", "most_seeds"), [one for several in given for one in runs(*several)])


@pytest.mark.host
@in_a_row((SUMMED, kinds_of(SUMMED_TILES), {("plain", 2): 4, ("plain", 3): 4, ("plain", 4): 2, ("thread", 2): 1}))
def test_tiles_give_the_sum_of_what_all_ranks_round(products, most_seeds):
    expect_no_faults(products, most_seeds)


@pytest.mark.host
@pytest.mark.promise("A fused matmul has the bits of its specification, whatever the partition and the codec.")
@in_a_row(
    (SUMMED, CODED, {("plain", 2): 4}, INT8),
    (SUMMED, CODED, {("plain", 3): 4, ("thread", 2): 1}, INT3),
    (SUMMED, CODED, {("plain", 5): 2}, FP8_IN_64),
)
def test_codes_give_what_a_matmul_and_a_collective_with_the_codec_do(products, most_seeds):
    expect_no_faults(products, most_seeds)


@pytest.mark.host
@in_a_row(
    (
        SUMMED,
        lambda world_size: kinds_of(partial_tiles(world_size)),
        {("plain", 2): 4, ("plain", 4): 3, ("plain", 8): 2, ("thread", 2): 1},
    )
)
def test_partials_are_added_as_a_tree(products, most_seeds):
    expect_no_faults(products, most_seeds)


SCALED = kinds_of(SUMMED_SCALED_TILES, scales=SCALE_FORMATS)


@pytest.mark.host
@in_a_row(
    (SUMMED, SCALED, {("plain", 2): 4, ("plain", 4): 2, ("plain", 8): 1}),
    ((REDUCE,), SCALED, {("thread", 2): 1}),
    ((SCATTER,), SCALED, {("address", 2): 1}),
)
def test_tiles_with_scales_give_the_sum_of_what_all_ranks_round(products, most_seeds):
    expect_no_faults(products, most_seeds)


@pytest.mark.host
@in_a_row(
    (SKINNY_KERNELS, kinds_of(SKINNY_TILES), {("plain", 2): 3, ("plain", 3): 3}),
    ((ONE_SHOT,), kinds_of(SKINNY_TILES), {("thread", 3): 1}),
    (
        SKINNY_KERNELS,
        lambda world_size: kinds_of(partial_skinny_tiles(world_size)),
        {("plain", 2): 3, ("plain", 4): 2, ("plain", 8): 1, ("thread", 2): 1},
    ),
    (SKINNY_KERNELS, kinds_of(SKINNY_TILES, scales=SCALE_FORMATS), {("plain", 2): 3, ("plain", 4): 2, ("plain", 8): 1}),
    ((ONE_SHOT,), kinds_of(SKINNY_TILES, scales=SCALE_FORMATS), {("thread", 2): 1}),
    ((TWO_SHOT,), kinds_of(SKINNY_TILES, scales=SCALE_FORMATS), {("address", 2): 1}),
)
def test_few_rows_give_the_bits_of_the_specification(products, most_seeds):
    expect_no_faults(products, most_seeds)


@pytest.mark.host
@in_a_row(((GATHER,), kinds_of(GATHERED_TILES), {("plain", 2): 4, ("plain", 3): 4, ("plain", 4): 4, ("thread", 2): 1}))
def test_gathered_rows_are_multiplied_and_returned(products, most_seeds):
    expect_no_faults(products, most_seeds)


OF_GATHERED = kinds_of(GATHERED_SCALED_TILES, scales=SCALE_FORMATS)


@pytest.mark.host
@in_a_row(
    ((GATHER,), OF_GATHERED, {("plain", 2): 4, ("plain", 3): 4, ("plain", 4): 4, ("plain", 8): 4}),
    ((GATHER,), OF_GATHERED, {("thread", 2): 1, ("address", 2): 1}),
)
def test_gathered_rows_are_multiplied_and_returned_with_their_scales(products, most_seeds):
    expect_no_faults(products, most_seeds)


@pytest.mark.host
def test_random_gathered_rows_with_scales_have_the_bits_of_the_specification():
    expect_no_faults(Products(GATHER, OF_GATHERED, 3, data=RandomData, calls=6), 1)


@pytest.mark.host
@every_summed
@pytest.mark.parametrize(
    ("kind", "world_size", "most_seeds"),
    [
        (Kind(SUMMED_TILES[2]), 3, 1),
        (Kind(partial_tiles(4)[2]), 4, 2),
        (Kind(SUMMED_SCALED_TILES[2], scales="RowScales"), 4, 1),
    ],
    ids=["rounded", "partials", "scales"],
)
def test_an_epilogue_is_applied_to_each_sum_in_its_place(algorithm, kind, world_size, most_seeds):
    expect_no_faults(Products(algorithm, (kind,), world_size, then=EPILOGUE), most_seeds)


@pytest.mark.host
@pytest.mark.parametrize("tile", [GATHERED_TILES[0], GATHERED_TILES[-1]], ids=str)
def test_an_epilogue_is_applied_to_each_gathered_element_in_its_place(tile):
    expect_no_faults(Products(GATHER, (Kind(tile),), 3, then=EPILOGUE), 3)


@pytest.mark.host
@pytest.mark.parametrize(
    "products",
    [
        Products(ONE_SHOT, (Kind(SKINNY_TILES[0]),), 3),
        Products(TWO_SHOT, (Kind(SKINNY_TILES[0]),), 3),
        Products(ONE_SHOT, (Kind(SKINNY_TILES[0], scales="RowScales"),), 2),
    ],
    ids=lambda one: f"{one.algorithm}-{one.kinds[0].scales}",
)
def test_a_weight_that_the_kernel_before_writes_is_read_stale_if_it_is_called_constant(products):
    stale = replace(products, keeps_promise=False)

    assert any(notices(functools.partial(stale.faults, seed)) for seed in range(4))


# Calls in a row and seeds until a mistake is noticed: calls of one rank alone leave nothing to later ones.
ALONE, OF_RANKS = (1, 30), (4, 24)
MISTAKES = {
    (products, what): texts
    for module in (matmul_mistakes, scaled_mistakes, summed_mistakes)
    for products, mistakes in module.MISTAKES.items()
    for what, texts in mistakes.items()
}
every_mistake = pytest.mark.parametrize(
    ("products", "what"), MISTAKES, ids=[f"{products.algorithm or 'matmul'}: {what}" for products, what in MISTAKES]
)


def mutation_of(products: Products, what: str) -> Mutation:
    """The mistake, in the file that it names, or in that of the kernel's files which has the text."""
    *named, old, new = MISTAKES[products, what]
    folder = source_directory()
    names = [one.partition("/")[2] for one in included(f"matmul/{products.algorithm or 'matmul'}.cu")]
    found = named or [name for name in names if old in (folder / name).read_text()]
    if len(found) != 1:
        raise ValueError(f"{old!r} stands in {found} of {sorted(names)}")
    return Mutation(found[0], old, new)


def groups() -> list[dict[Mutation, None]]:
    """The mistakes that share a program: those of the same products, and of others that have one of them.

    A mistake whose text stands nowhere is left to its test.
    """
    found = {}
    for products, what in MISTAKES:
        with contextlib.suppress(ValueError):
            found.setdefault(products, {})[mutation_of(products, what)] = None
    joined = []
    for mistakes in found.values():
        apart = [one for one in joined if one.keys().isdisjoint(mistakes)]
        near = [one for one in joined if one not in apart]
        joined = [*apart, functools.reduce(operator.or_, near, mistakes)]
    return joined


for group in groups():
    known(group)


@every_mistake
def test_the_text_of_a_mistake_stands_in_one_of_its_kernels_files(products, what):
    mutation = mutation_of(products, what)

    assert mutation.apply((source_directory() / mutation.file).read_text())


@pytest.mark.host
@every_mistake
def test_a_mistake_is_noticed(products, what):
    (calls, most_seeds), mutation = OF_RANKS if products.algorithm else ALONE, mutation_of(products, what)
    few = replace(products, calls=calls)

    assert any(notices(functools.partial(few.faults, seed, mutation)) for seed in range(most_seeds))

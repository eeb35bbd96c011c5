"""Matmuls whose partials are added as a tree, tile by tile, executed on the host: the bits of the specification."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from graphar import reference
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.leaf_tree import LEAF_UNIT, LEAVES, partial, tree_sum
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import SIGNAL_PAD_NBYTES, Scratch
from graphar.plan.tiles import LAYOUTS, MatmulTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import KernelSource
from graphar.simulator.build import Mutation
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call, KernelFailure, Simulation
from tests.cases import normal
from tests.host.build import build, known
from tests.host.matmul_operands import packed, wrong_elements
from tests.host.test_matmul_tiles import EPILOGUE, MOST_THREADS, REDUCE, SCATTER, draw_blocks, dtype_of, every_algorithm

pytestmark = pytest.mark.host

WORLD_SIZES = (2, 4, 8)
CALLS = 3
CAPACITY = 16  # places in a slot, two for a partial box
SEEDS = {"plain": {2: 4, 4: 3, 8: 2}, "thread": {2: 1}}
LARGE = 2.0**12  # of leaves whose products cancel


def tiles(world_size: int) -> tuple[MatmulTile, ...]:
    """Small tiles, with the fewest stages that are possible."""
    leaves = LEAVES // world_size
    sizes = ((64, 64, 2), (64, 128, 2, 2), (128, 64, 2), (128, 128, 2))
    return tuple(MatmulTile(*size, whole=True, leaves=leaves, partials=True) for size in sizes)


def kinds_of(world_size: int) -> tuple:
    return tuple(itertools.product(tiles(world_size), LAYOUTS))


def program_of(
    algorithm: Algorithm,
    world_size: int,
    sanitizer: str,
    kinds,
    mutation: Mutation | None = None,
    form: Pointwise | None = None,
):
    file, made, element = f"one_{algorithm}", form.generated if form else None, TYPE_NAMES[dtype_of(world_size)]
    more = [made.name if made else "Identity", f"AsPartials<{element}>"]
    names = [f"{file}<{', '.join([element, str(world_size), str(tile), layout, *more])}>" for tile, layout in kinds]
    text = made.text if made else ""
    return build(tuple(KernelSource(f"{file}.cu", name, generated=text) for name in names), sanitizer, mutation)


def draw_operands(choices: random.Random, world_size: int, m: int, n: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A [m, k] and W [n, k] of each rank. The products of two leaves are large, and each other's negatives.

    What is added between them is rounded to their size, so another order of addition gives another result.
    """
    generator = torch.Generator().manual_seed(choices.getrandbits(32))
    length = LEAF_UNIT * choices.choice([1, 1, 2])
    pairs = [tuple(torch.randn(rows, length, generator=generator) for rows in (m, n)) for _ in range(LEAVES)]
    first, second = sorted(choices.sample(range(LEAVES), 2))
    a, w = pairs[first]
    pairs[first], pairs[second] = (a, w * LARGE), (a, w * -LARGE)
    leaves = [torch.cat(one, 1).to(dtype_of(world_size)) for one in zip(*pairs, strict=True)]
    return list(zip(*[one.chunk(world_size, 1) for one in leaves], strict=True))


def draw_call(
    algorithm: Algorithm,
    choices: random.Random,
    world_size: int,
    kinds,
    most_threads: int,
    form: Pointwise | None,
) -> tuple[Call, list[torch.Tensor]]:
    """A call of any kind and size that the scratch has room for, and what each rank must get."""
    dtype = dtype_of(world_size)
    fitting = [i for i, (tile, _) in enumerate(kinds) if world_size * tile.cluster * tile.threads <= most_threads]
    kind = choices.choice(fitting)
    tile, layout = kinds[kind]
    counts = [choices.choice([0, 1, 64, choices.randint(1, 150)]) for _ in range(world_size)]
    counts[choices.randrange(world_size)] = choices.randint(1, 150)
    most_columns = 64 * (CAPACITY // 2 // -(-max(counts) // 64))
    m, n = sum(counts), STORE_COLUMNS * choices.randint(1, most_columns // STORE_COLUMNS)
    bias, with_bias = normal(choices.getrandbits(16), n, dtype), form is None and choices.random() < 0.7
    pairs = draw_operands(choices, world_size, m, n)
    inputs = [
        packed([m, n, a.shape[1], 0, choices.randint(1, 3), with_bias], a, w, bias.view(1, n), layout) for a, w in pairs
    ]
    most_blocks = min(2 * tile.cluster, most_threads // (world_size * tile.threads) // tile.cluster * tile.cluster)
    blocks = draw_blocks(choices, world_size, tile.cluster, most_blocks)
    beside = {"blocks": blocks, "cluster": tile.cluster}
    if form is None:
        whole = reference.fused_matmul_allreduce(
            *zip(*pairs, strict=True), bias if with_bias else None, tp_invariant=True
        )
    else:
        whole = tree_sum([partial(a, w, world_size) for a, w in pairs])
    results = list(whole.split(counts)) if algorithm is SCATTER else [whole] * world_size
    if form:
        tensors = [normal(at, size, dtype) for at, size in enumerate((n, m * n, m))]
        beside |= {"operands": tuple(tensors), "scalars": (0.375,), "columns": n}
        epilogue, given = replace(form, columns=n), EpilogueInputs(tensors, [0.375])
        results = [epilogue.apply(one.reshape(-1), given, 0, one.numel()).view_as(one).to(dtype) for one in results]
    nbytes = tuple(result.nbytes for result in results)
    shape = Config(algorithm, blocks[0], tile.threads)
    return Call(kind, shape, inputs, tuple(counts), nbytes, **beside), results


def scratch_of(algorithm: Algorithm, world_size: int) -> Scratch:
    area = (world_size - 1) * CAPACITY * (4 + 8192)
    nbytes = SIGNAL_PAD_NBYTES + (area if algorithm is SCATTER else 2 * area)
    return Scratch(CAPACITY, nbytes, 0, max(tile.shared_nbytes for tile in tiles(world_size)) + 2048)


def faults(
    algorithm: Algorithm,
    program,
    world_size: int,
    seed: int,
    kinds,
    most_threads: int = MOST_THREADS["plain"],
    form: Pointwise | None = None,
) -> list[str]:
    """Descriptions of all errors after some calls in a row."""
    choices = random.Random(f"partials {world_size} {seed}")
    drawn = [draw_call(algorithm, choices, world_size, kinds, most_threads, form) for _ in range(CALLS)]
    scratch, epoch = scratch_of(algorithm, world_size), first_epoch(seed)
    outcomes = Simulation(program, algorithm, world_size, scratch, 0, seed, epoch).run([call for call, _ in drawn])
    found = []
    for rank, outcome in enumerate(outcomes):
        if outcome.record.kind:
            found.append(f"rank {rank} gave up waiting for rank {outcome.record.peer}")
        if outcome.broken_guards:
            found.append(f"rank {rank} wrote beside tensors or scratch")
        for number, (result, (_, parts)) in enumerate(zip(outcome.results, drawn, strict=True)):
            if parts[rank].numel() and (wrong := wrong_elements(result, parts[rank])):
                found.append(f"rank {rank}, call {number}: {wrong} of {parts[rank].numel()} are wrong")
    return found


@every_algorithm
@pytest.mark.parametrize(("world_size", "sanitizer"), [(2, "plain"), (4, "plain"), (8, "plain"), (2, "thread")])
def test_calls_in_a_row_give_the_bits_of_the_specification(algorithm, world_size, sanitizer):
    kinds = kinds_of(world_size)
    program = program_of(algorithm, world_size, sanitizer, kinds)

    for seed in range(SEEDS[sanitizer][world_size]):
        assert faults(algorithm, program, world_size, seed, kinds, MOST_THREADS[sanitizer]) == [], seed


@every_algorithm
def test_an_epilogue_is_done_to_each_sum_before_it_is_rounded(algorithm):
    kinds = kinds_of(4)[4:5]
    program = program_of(algorithm, 4, "plain", kinds, form=EPILOGUE)

    for seed in range(2):
        assert faults(algorithm, program, 4, seed, kinds, form=EPILOGUE) == [], seed


# ---- negative controls ----------------------------------------------------------------------------------------------

TILES, PARTIALS = "device/matmul/fused_tiles.cuh", "device/matmul/tile_as_partials.cuh"
NBYTES = "owner == a.rank ? Travel::finished_nbytes : Travel::partial_nbytes;"
MUTANTS = {
    "the order of ranks in place of the tree": (
        "device/pack.cuh",
        "total[0] = sum_of_tree<N>(part, w);",
        "add_in_rank_order<T, N>(part, w, total);",
    ),
    "leaves that are added one after another": (
        TILES,
        "if constexpr (Tile::leaves > 1)",
        "if constexpr (Tile::leaves > 8)",
    ),
    "a partial that is rounded to bf16": (
        PARTIALS,
        "= word_of_sum(sums[4 * i + w]);",
        "= word_of_sum(sums[4 * i + w]) & 0xffff0000u;",
    ),
    "a bias that is added before the sum": (
        TILES,
        "        Travel::template add_partials<N, Tile>(m, a, tile, sums);\n        finish(sums, tile);\n",
        "        finish(sums, tile);\n        Travel::template add_partials<N, Tile>(m, a, tile, sums);\n",
    ),
    "places that are counted as boxes of elements": (TILES, "(tile.box + box) * Travel::places)", "tile.box + box)"),
    "places that are read as boxes of elements": (
        PARTIALS,
        "place(a.rank, r, tile.box * places)",
        "place(a.rank, r, tile.box)",
    ),
    "boxes that are staged in half their room": (
        TILES,
        "(consumer * Tile::boxes + box) * Travel::places * box_nbytes",
        "(consumer * Tile::boxes + box) * box_nbytes",
    ),
    "half a partial box that is not sent": (TILES, NBYTES, "Travel::finished_nbytes;"),
    "a finished box with as many bytes as a partial one": (TILES, NBYTES, "Travel::partial_nbytes;"),
}


known([], MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    kinds = kinds_of(4)[6:7]
    program = program_of(REDUCE, 4, "plain", kinds, Mutation(*MUTANTS[mistake]))

    def is_noticed(seed: int) -> bool:
        try:
            return bool(faults(REDUCE, program, 4, seed, kinds))
        except KernelFailure:
            return True

    assert any(is_noticed(seed) for seed in range(8))

"""Matmuls of e4m3 operands that are summed over ranks, tile by tile, executed on the host: the specification's bits."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.fp8_products import BLOCK, product
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import SIGNAL_PAD_NBYTES, Scratch
from graphar.plan.tiles import MatmulTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import SCALE_FORMATS, KernelSource
from graphar.simulator.build import Mutation
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call, Simulation
from tests.cases import normal
from tests.host.build import build, known
from tests.host.matmul_operands import aligned_rows, wrong_elements
from tests.host.mutant import notices
from tests.host.test_matmul_scaled import RandomData, scales_of, stored
from tests.host.test_matmul_tiles import EPILOGUE, MOST_THREADS, REDUCE, SCATTER, draw_blocks, dtype_of, every_algorithm

pytestmark = pytest.mark.host

CALLS = 3
CAPACITY = 12  # boxes in a slot
# Small tiles, with the fewest stages that are possible. The last one has an accumulator of one block.
TILES = tuple(
    MatmulTile(*size, whole=True) for size in ((64, 64, 2), (64, 128, 2, 2), (128, 64, 2), (128, 128, 2), (128, 192, 2))
)
KINDS = tuple(itertools.product(TILES, SCALE_FORMATS))
SEEDS = {("plain", 2): 4, ("plain", 4): 2, ("plain", 8): 1, ("thread", 2): 1, ("address", 2): 1}
RUNS = [
    *((algorithm, *run) for algorithm in (SCATTER, REDUCE) for run in SEEDS if run[0] == "plain"),
    (REDUCE, "thread", 2),
    (SCATTER, "address", 2),
]


def program_of(
    algorithm: Algorithm,
    world_size: int,
    sanitizer: str,
    kinds,
    mutation: Mutation | None = None,
    form: Pointwise | None = None,
):
    file, made, element = f"one_scaled_{algorithm}", form.generated if form else None, TYPE_NAMES[dtype_of(world_size)]
    more = f", {made.name}" if made else ""
    names = [f"{file}<{element}, {world_size}, {tile}, {scales}{more}>" for tile, scales in kinds]
    text = made.text if made else ""
    return build(tuple(KernelSource(f"{file}.cu", name, generated=text) for name in names), sanitizer, mutation)


def drawn_operands(choices: random.Random, form: str, m: int, n: int):
    """A rank's operands and their scales. K differs between ranks, and may end within a block."""
    k, generator = choices.randint(1, 3 * BLOCK + 40), torch.Generator().manual_seed(choices.getrandbits(32))
    a, w = (RandomData.operand((count, k), generator) for count in (m, n))
    return a, w, scales_of(form, m, n, k, RandomData, choices, generator)


def packed(a, w, bias, scales, group_rows: int, with_bias: bool) -> torch.Tensor:
    """The bytes of a rank's operands, as programs/one_scaled_matmul_tiles.hpp takes them."""
    in_memory = [stored(scales.a), stored(scales.w)]
    # A column that a scale has but once has no stride.
    strides = [s for one in (scales.a, scales.w) for s in (one.stride(0), one.stride(1) * scales.in_blocks)]
    sizes = [len(a), len(w), a.shape[1], 0, group_rows, with_bias, len(in_memory[0]), *strides, 0]
    parts = [torch.tensor(sizes), *map(aligned_rows, (a, w, bias)), *in_memory]
    return torch.cat([one.view(torch.uint8) for one in parts])


def draw_call(
    algorithm: Algorithm, choices: random.Random, world_size: int, kinds, most_threads: int, form: Pointwise | None
) -> tuple[Call, list[torch.Tensor]]:
    """A call of any kind and size that the scratch has room for, and what each rank must get."""
    dtype = dtype_of(world_size)
    fitting = [i for i, (tile, _) in enumerate(kinds) if world_size * tile.cluster * tile.threads <= most_threads]
    kind = choices.choice(fitting)
    tile, of = kinds[kind]
    counts = [choices.choice([0, 1, 64, choices.randint(1, 150)]) for _ in range(world_size)]
    counts[choices.randrange(world_size)] = choices.randint(1, 150)
    most_columns = 64 * (CAPACITY // -(-max(counts) // 64))
    m, n = sum(counts), STORE_COLUMNS * choices.randint(1, most_columns // STORE_COLUMNS)
    bias, with_bias = normal(choices.getrandbits(16), n, dtype), form is None and choices.random() < 0.7
    drawn = [drawn_operands(choices, of, m, n) for _ in range(world_size)]
    whole = torch.full((m, n), -0.0)
    for a, w, scales in drawn:
        whole += product(a, w, scales).to(dtype).float()
    whole += bias.float() if with_bias else 0
    group_rows = choices.randint(1, 3)
    inputs = [packed(a, w, bias.view(1, n), scales, group_rows, with_bias) for a, w, scales in drawn]
    most_blocks = min(2 * tile.cluster, most_threads // (world_size * tile.threads) // tile.cluster * tile.cluster)
    blocks = draw_blocks(choices, world_size, tile.cluster, most_blocks)
    beside = {"blocks": blocks, "cluster": tile.cluster}
    results = list(whole.split(counts)) if algorithm is SCATTER else [whole] * world_size
    if form:
        tensors = [normal(at, size, dtype) for at, size in enumerate((n, m * n, m))]
        beside |= {"operands": tuple(tensors), "scalars": (0.375,), "columns": n}
        epilogue, given = replace(form, columns=n), EpilogueInputs(tensors, [0.375])
        results = [epilogue.apply(one.reshape(-1), given, 0, one.numel()).view_as(one) for one in results]
    results = [one.to(dtype) for one in results]
    shape = Config(algorithm, blocks[0], tile.threads)
    return Call(kind, shape, inputs, tuple(counts), tuple(one.nbytes for one in results), **beside), results


def scratch_of(algorithm: Algorithm, world_size: int) -> Scratch:
    area = (world_size - 1) * CAPACITY * (4 + 8192)
    nbytes = SIGNAL_PAD_NBYTES + (area if algorithm is SCATTER else 2 * area)
    return Scratch(CAPACITY, nbytes, 0, max(tile.shared_nbytes for tile in TILES) + 2048)


def faults(
    algorithm: Algorithm, program, world_size: int, seed: int, kinds, sanitizer: str = "plain", form=None
) -> list[str]:
    """Descriptions of all errors after some calls in a row."""
    choices, most_threads = random.Random(f"scaled {world_size} {seed}"), MOST_THREADS.get(sanitizer, 1 << 13)
    drawn = [draw_call(algorithm, choices, world_size, kinds, most_threads, form) for _ in range(CALLS)]
    scratch, epoch, found = scratch_of(algorithm, world_size), first_epoch(seed), []
    simulation = Simulation(program, algorithm, world_size, scratch, 0, seed, epoch)
    for rank, outcome in enumerate(simulation.run([call for call, _ in drawn])):
        if outcome.record.kind:
            found.append(f"rank {rank} gave up waiting for rank {outcome.record.peer}")
        if outcome.broken_guards:
            found.append(f"rank {rank} wrote beside tensors or scratch")
        for number, (result, (_, parts)) in enumerate(zip(outcome.results, drawn, strict=True)):
            if parts[rank].numel() and (wrong := wrong_elements(result, parts[rank])):
                found.append(f"rank {rank}, call {number}: {wrong} of {parts[rank].numel()} are wrong")
    return found


@pytest.mark.parametrize(("algorithm", "sanitizer", "world_size"), RUNS)
def test_calls_in_a_row_give_the_bits_of_the_specification(algorithm, sanitizer, world_size):
    program = program_of(algorithm, world_size, sanitizer, KINDS)

    for seed in range(SEEDS[sanitizer, world_size]):
        assert faults(algorithm, program, world_size, seed, KINDS, sanitizer) == [], seed


@every_algorithm
def test_an_epilogue_is_done_to_each_sum_before_it_is_rounded(algorithm):
    kinds = KINDS[4:5]
    program = program_of(algorithm, 4, "plain", kinds, form=EPILOGUE)

    assert faults(algorithm, program, 4, 0, kinds, form=EPILOGUE) == []


# ---- negative controls: what is wrong, in which format, and the text that makes it so -------------------------------

FILE, SCALED = "device/matmul/fused_tiles.cuh", "device/matmul/scaled_products.cuh"
ROWS, BLOCKS = SCALE_FORMATS
FOUND, IN_PART = "        walk.locate(row, column);\n", "        walk.locate_in_part(row, column);\n"
LOADED = "      load_next(0);\n      load_next(1);\n"
MUTANTS = {
    "scales of rows that are counted from the owner's first": (
        ROWS,
        FILE,
        FOUND,
        FOUND.replace("locate", "locate_in_part"),
    ),
    "scales of blocks of rows that are counted from the owner's first": (
        BLOCKS,
        FILE,
        FOUND,
        FOUND.replace("locate", "locate_in_part"),
    ),
    "scales of the tile's first columns": (ROWS, FILE, FOUND, FOUND + "        column = 0;\n"),
    "scales of blocks of the first columns": (BLOCKS, FILE, FOUND, FOUND + "        column = 0;\n"),
    "own rows without scales": (
        ROWS,
        SCALED,
        "    scales.multiply(totals);\n",
        "    if (row < u32(a.m) / 2) scales.multiply(totals);\n",
    ),
    "scales that multiply a rounded partial": (
        ROWS,
        SCALED,
        "__fmul_rn(__fmul_rn(total, of_row[half]), scale)",
        "__fmul_rn(__fmul_rn(__uint_as_float(__float_as_uint(total) & 0xffff0000u), of_row[half]), scale)",
    ),
    "scales of the block before": (
        BLOCKS,
        SCALED,
        LOADED,
        LOADED.replace("load_next(0);", "load_next(0);\n      next -= stride;"),
    ),
}


known([], MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    scales, *change = MUTANTS[mistake]
    kinds = ((TILES[2], scales),)
    program = program_of(REDUCE, 4, "plain", kinds, Mutation(*change))

    assert any(notices(lambda seed=seed: faults(REDUCE, program, 4, seed, kinds)) for seed in range(8))

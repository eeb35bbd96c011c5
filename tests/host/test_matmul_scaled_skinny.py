"""Skinny matmuls of e4m3 operands that end in a sum over ranks, executed on the host: the bits of the specification."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.fp8_products import BLOCK, product
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.tiles import SkinnyTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import SCALE_FORMATS, SKINNY_KERNELS, KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.build import Mutation
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call, Simulation
from tests.host.build import build, known
from tests.host.matmul_operands import aligned_rows, wrong_elements
from tests.host.mutant import notices
from tests.host.test_matmul_scaled import RandomData, scales_of, stored
from tests.host.test_matmul_skinny import CAPACITY, MOST_THREADS, scratch_of
from tests.host.test_matmul_tiles import draw_blocks, dtype_of

pytestmark = pytest.mark.host

CALLS = 4
# With few stages. The last one has registers for the sums of one block, if scales are of blocks.
TILES = (SkinnyTile(8, 2), SkinnyTile(16, 3, cluster=2), SkinnyTile(64, 2, cluster=2))
KINDS = tuple(itertools.product(TILES, SCALE_FORMATS))
FITTING = {2: KINDS, 4: KINDS, 8: KINDS[:4]}
SEEDS = {("plain", 2): 3, ("plain", 4): 2, ("plain", 8): 1, ("thread", 2): 1, ("address", 2): 1}
RUNS = [
    *((algorithm, *run) for algorithm in SKINNY_KERNELS for run in SEEDS if run[0] == "plain"),
    (Algorithm.MATMUL_ONE_SHOT, "thread", 2),
    (Algorithm.MATMUL_TWO_SHOT, "address", 2),
]


def program_of(algorithm, world_size: int, sanitizer: str, kinds, mutation: Mutation | None = None):
    file, element = f"one_scaled_{algorithm}", TYPE_NAMES[dtype_of(world_size)]
    names = [f"{file}<{element}, {world_size}, {tile}, {form}>" for tile, form in kinds]
    return build(tuple(KernelSource(f"{file}.cu", name) for name in names), sanitizer, mutation)


def drawn_operands(choices: random.Random, form: str, m: int, n: int):
    """A rank's operands and their scales. K differs between ranks, and may end within a block."""
    k, generator = choices.randint(1, 3 * BLOCK + 40), torch.Generator().manual_seed(choices.getrandbits(32))
    a, w = (RandomData.operand((count, k), generator) for count in (m, n))
    return a, w, scales_of(form, m, n, k, RandomData, choices, generator)


def packed(a, w, bias, scales, with_bias: bool, constant: bool, keeps_promise: bool) -> torch.Tensor:
    """The bytes of a rank's operands, as programs/one_scaled_skinny.hpp takes them."""
    in_memory = [stored(scales.a), stored(scales.w)]
    # A column that a scale has but once has no stride.
    strides = [s for one in (scales.a, scales.w) for s in (one.stride(0), one.stride(1) * scales.in_blocks)]
    held = constant and keeps_promise
    sizes = [len(a), len(w), a.shape[1], constant, held, with_bias, len(in_memory[0]), *strides, 0]
    parts = [torch.tensor(sizes), *map(aligned_rows, (a, w, bias)), *in_memory]
    return torch.cat([one.view(torch.uint8) for one in parts])


def draw_call(
    algorithm, choices: random.Random, world_size: int, kinds, kind: int, most_threads: int, keeps_promise: bool
):
    """A call of a kind and any size that the scratch has room for, and what every rank must get.

    Some ranks' weights are called constant. With ``keeps_promise`` they are; else the kernel before writes them.
    """
    dtype, (tile, form) = dtype_of(world_size), kinds[kind]
    m = choices.choice([tile.rows, tile.rows, 1, choices.randint(1, tile.rows)])
    n = STORE_COLUMNS * choices.randint(1, min(CAPACITY // m, 30))
    bias, with_bias = torch.arange(n, dtype=dtype).remainder(17).view(1, n), choices.random() < 0.5
    drawn = [drawn_operands(choices, form, m, n) for _ in range(world_size)]
    total = torch.full((m, n), -0.0)
    for a, w, scales in drawn:
        total += product(a, w, scales).to(dtype).float()
    total += bias.float() if with_bias else 0
    inputs = [packed(a, w, bias, scales, with_bias, choices.random() < 0.5, keeps_promise) for a, w, scales in drawn]
    most_blocks = min(2 * tile.cluster, most_threads // (world_size * tile.threads) // tile.cluster * tile.cluster)
    blocks = draw_blocks(choices, world_size, tile.cluster, most_blocks)
    result, shape = total.to(dtype), Config(algorithm, blocks[0], tile.threads)
    beside = {"blocks": blocks, "cluster": tile.cluster}
    return Call(kind, shape, inputs, (result.numel(),), (result.nbytes,) * world_size, **beside), result


def faults(
    algorithm, program, world_size: int, seed: int, kinds, sanitizer: str = "plain", keeps_promise: bool = True
) -> list[str]:
    """Descriptions of all errors after some calls in a row."""
    choices = random.Random(f"scaled skinny {world_size} {seed}")
    most_threads = MOST_THREADS["thread" if sanitizer == "thread" else "plain"]
    drawn = []
    for number in range(seed * CALLS, seed * CALLS + CALLS):  # all kinds in turn
        given = (algorithm, choices, world_size, kinds, number % len(kinds), most_threads, keeps_promise)
        drawn.append(draw_call(*given))
    scratch, epoch, found = scratch_of(algorithm, world_size), first_epoch(seed), []
    simulation = Simulation(program, algorithm, world_size, scratch, 0, seed, epoch)
    for rank, outcome in enumerate(simulation.run([call for call, _ in drawn])):
        if outcome.record.kind:
            found.append(f"rank {rank} gave up waiting for rank {outcome.record.peer}")
        if outcome.broken_guards:
            found.append(f"rank {rank} wrote beside tensors or scratch")
        for number, (result, (_, expected)) in enumerate(zip(outcome.results, drawn, strict=True)):
            if wrong := wrong_elements(result, expected):
                found.append(f"rank {rank}, call {number}: {wrong} of {expected.numel()} are wrong")
    return found


@pytest.mark.parametrize(("algorithm", "sanitizer", "world_size"), RUNS)
def test_calls_in_a_row_give_the_bits_of_the_specification(algorithm, sanitizer, world_size):
    kinds = FITTING[world_size][: 4 if sanitizer == "thread" else None]
    program = program_of(algorithm, world_size, sanitizer, kinds)

    for seed in range(SEEDS[sanitizer, world_size]):
        assert faults(algorithm, program, world_size, seed, kinds, sanitizer) == [], seed


def test_a_weight_that_the_kernel_before_writes_is_read_stale_if_it_is_called_constant():
    algorithm = Algorithm.MATMUL_ONE_SHOT
    program = program_of(algorithm, 2, "plain", KINDS[:1])

    assert any(
        notices(lambda seed=seed: faults(algorithm, program, 2, seed, KINDS[:1], keeps_promise=False))
        for seed in range(4)
    )


# ---- negative controls: what is wrong, in which tile and format, and the text that makes it so -----------------------

FILES = ("device/matmul/skinny_scales.cuh", "device/matmul/skinny.cuh")
ONE, TWO = TILES[2], TILES[0]  # accumulators of blocks, if scales are of blocks
ROWS, BLOCKS = SCALE_FORMATS
QUEUED = "multiplier.queue_place(operands, at, it.sums, 0);"
LAST = "    multiplier.finish(it.sums, it.place);\n    it.scales.add(it.sums, totals);\n"
MULTIPLIED = "__fmul_rn(__fmul_rn(total, scale), of_w[half])"
ADDED = "totals[i] = __fmaf_rn(sums[i], scale, totals[i]);"
MUTANTS = {
    "scales of the row of W eight above": (TWO, ROWS, "+ 8 * half;", "+ 0 * half;"),
    "scales of the first tile's rows of W": (TWO, ROWS, "at = column + threadIdx", "at = 0 * column + threadIdx"),
    "scales of another row of A": (TWO, ROWS, "threadIdx.x % 4 * 2 + pair % 2", "threadIdx.x % 2 * 2 + pair % 2"),
    "the first 32 rows' scales for all": (ONE, ROWS, "of_lane[pair / 8]", "of_lane[0]"),
    "a scale of A in place of one of W": (
        TWO,
        ROWS,
        "m.w_scale[min(at, m.n - 1) * m.w_scale_row]",
        "m.a_scale[min(at, m.m - 1) * m.a_scale_row]",
    ),
    "the scales of A and of W multiplied with each other first": (
        ONE,
        ROWS,
        MULTIPLIED,
        "__fmul_rn(total, __fmul_rn(scale, of_w[half]))",
    ),
    "the scale of W multiplied before that of A": (
        ONE,
        ROWS,
        MULTIPLIED,
        "__fmul_rn(__fmul_rn(total, of_w[half]), scale)",
    ),
    "scales that multiply a rounded partial": (
        TWO,
        ROWS,
        MULTIPLIED,
        MULTIPLIED.replace("total", "__uint_as_float(__float_as_uint(total) & 0xffffe000u)"),
    ),
    "the scales of the block before": (
        TWO,
        BLOCKS,
        "it.scales.load(m, column, block);",
        "it.scales.load(m, column, block ? block - 1 : 0);",
    ),
    "a row of A's first scale for all of K": (
        ONE,
        BLOCKS,
        "+ block * m.a_scale_block",
        "+ (block & 0) * m.a_scale_block",
    ),
    "scales of W in blocks of 64 rows": (TWO, BLOCKS, "/ BlockScales::rows * m.", "/ 64 * m."),
    "a block rounded before it is added": (
        ONE,
        BLOCKS,
        ADDED,
        "totals[i] = __fadd_rn(__fmul_rn(sums[i], scale), totals[i]);",
    ),
    "a block multiplied by one scale after the other": (
        ONE,
        BLOCKS,
        ADDED,
        "totals[i] = __fmaf_rn(__fmul_rn(sums[i], of_row), of_w, scale * 0 + totals[i]);",
    ),
    "promotion left out: blocks that go on from the sums of the one before": (
        ONE,
        BLOCKS,
        QUEUED,
        QUEUED.replace("0)", "block)"),
    ),
    "totals that go on from the tile before": (TWO, ROWS, "totals[i] = 0;", "totals[i] = at.use ? totals[i] : 0;"),
    "a last block left out": (TWO, ROWS, "      if (block < blocks) {", "      if (false) {"),
    "a block added before its products are complete": (
        TWO,
        BLOCKS,
        "    wait_for_all_but_last_products(it.sums);\n",
        "",
    ),
    "a last block added before its products are complete": (
        ONE,
        BLOCKS,
        LAST,
        "".join(reversed(LAST.splitlines(keepends=True))),
    ),
    "steps of as many columns of K as 16-bit operands have": (TWO, ROWS, "k += depth_of<T>;", "k += tile_depth;"),
    "scales read before the kernel before has written them": (
        TWO,
        ROWS,
        "  wait_for_previous_kernel(a);\n",
        "  if (warp >= 4) wait_for_previous_kernel(a);\n",
    ),
}


known(FILES, MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    *kind, old, new = MUTANTS[mistake]
    (file,) = [name for name in FILES if old in (source_directory() / name).read_text()]
    algorithm, kinds = Algorithm.MATMUL_ONE_SHOT, (tuple(kind),)
    program = program_of(algorithm, 2, "plain", kinds, Mutation(file, old, new))

    assert any(notices(lambda seed=seed: faults(algorithm, program, 2, seed, kinds)) for seed in range(12))

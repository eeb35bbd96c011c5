"""Skinny matmuls, of few rows, that end in a sum over ranks, executed on the host: that sum, whatever happens when."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES, SENTINEL, Scratch
from graphar.plan.tiles import LAYOUTS, SkinnyTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import SKINNY_KERNELS, KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.build import Mutation
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call, KernelFailure, Outcome, Simulation
from tests.host.build import build, known
from tests.host.matmul_operands import packed, wrong_elements
from tests.host.test_matmul_tiles import draw_blocks, draw_operands, dtype_of

pytestmark = pytest.mark.host

WORLD_SIZES = (2, 3)
CALLS = 4
CAPACITY = 64 * 24  # packs in a slot
TILES = (SkinnyTile(8, 2), SkinnyTile(16, 3, cluster=2), SkinnyTile(64, 2, cluster=2))  # with few stages
KINDS = tuple(itertools.product(TILES, LAYOUTS))
FITTING = {"plain": KINDS, "thread": KINDS[:4]}  # ThreadSanitizer has 8128 threads: 3 or 4 per CUDA thread
MOST_THREADS = {"plain": 1 << 13, "thread": 2200}  # of all ranks
SEEDS = {"plain": 3, "thread": 1}


def program_of(algorithm, world_size: int, sanitizer: str, kinds, mutation: Mutation | None = None):
    file = f"one_{algorithm}"
    names = [f"{file}<{TYPE_NAMES[dtype_of(world_size)]}, {world_size}, {tile}, {layout}>" for tile, layout in kinds]
    return build(tuple(KernelSource(f"{file}.cu", name) for name in names), sanitizer, mutation)


def draw_call(
    algorithm, choices: random.Random, world_size: int, kinds, most_threads: int, keeps_promise: bool = True
) -> tuple[Call, torch.Tensor]:
    """A call of any kind and size that the scratch has room for, and what every rank must get.

    Some ranks' weights are called constant. With ``keeps_promise`` they are; else the kernel before writes them.
    """
    dtype = dtype_of(world_size)
    kind = choices.randrange(len(kinds))
    tile, layout = kinds[kind]
    m = choices.choice([1, tile.rows, choices.randint(1, tile.rows)])
    n = STORE_COLUMNS * choices.randint(1, min(CAPACITY // m, 30))
    bias, with_bias = torch.arange(n, dtype=dtype).remainder(17).view(1, n), choices.random() < 0.5
    pairs = draw_operands(choices, world_size, m, n)
    total = torch.full((m, n), -0.0)
    for a, w in pairs:
        total += (a.double() @ w.double().t()).to(dtype).float()
    total += bias.float() if with_bias else 0
    constant = [choices.random() < 0.5 for _ in pairs]
    inputs = [
        packed([m, n, a.shape[1], said, said and keeps_promise, with_bias], a, w, bias, layout)
        for (a, w), said in zip(pairs, constant, strict=True)
    ]
    most_blocks = min(2 * tile.cluster, most_threads // (world_size * tile.threads) // tile.cluster * tile.cluster)
    blocks = draw_blocks(choices, world_size, tile.cluster, most_blocks)
    result, shape = total.to(dtype), Config(algorithm, blocks[0], tile.threads)
    beside = {"blocks": blocks, "cluster": tile.cluster}
    return Call(kind, shape, inputs, (result.numel(),), (result.nbytes,) * world_size, **beside), result


def scratch_of(algorithm, world_size: int) -> Scratch:
    shared_nbytes = max(tile.shared_nbytes for tile in TILES) + 2048
    return Scratch(CAPACITY, 2 * world_size * CAPACITY * PACK_NBYTES, SENTINEL, shared_nbytes)


def simulate(algorithm, program, world_size: int, seed: int, calls: list[Call]) -> list[Outcome]:
    scratch, epoch = scratch_of(algorithm, world_size), first_epoch(seed)
    return Simulation(program, algorithm, world_size, scratch, 0, seed, epoch).run(calls)


def faults(
    algorithm, program, world_size: int, seed: int, sanitizer: str, kinds, keeps_promise: bool = True
) -> list[str]:
    """Descriptions of all errors after some calls in a row."""
    choices = random.Random(f"{world_size} {seed}")
    given = (algorithm, choices, world_size, kinds, MOST_THREADS[sanitizer], keeps_promise)
    drawn = [draw_call(*given) for _ in range(CALLS)]
    found = []
    for rank, outcome in enumerate(simulate(algorithm, program, world_size, seed, [call for call, _ in drawn])):
        if outcome.record.kind:
            found.append(f"rank {rank} gave up waiting for rank {outcome.record.peer}")
        if outcome.broken_guards:
            found.append(f"rank {rank} wrote beside tensors or scratch")
        for number, (result, (_, expected)) in enumerate(zip(outcome.results, drawn, strict=True)):
            if wrong := wrong_elements(result, expected):
                found.append(f"rank {rank}, call {number}: {wrong} of {expected.numel()} are wrong")
    return found


@pytest.mark.parametrize(
    ("algorithm", "world_size", "sanitizer"),
    [*itertools.product(SKINNY_KERNELS, WORLD_SIZES, ["plain"]), (Algorithm.MATMUL_ONE_SHOT, 3, "thread")],
)
def test_calls_in_a_row_give_the_sum_of_what_all_ranks_round(algorithm, world_size, sanitizer):
    kinds = FITTING[sanitizer]
    program = program_of(algorithm, world_size, sanitizer, kinds)

    for seed in range(SEEDS[sanitizer]):
        assert faults(algorithm, program, world_size, seed, sanitizer, kinds) == [], seed


@pytest.mark.parametrize("algorithm", SKINNY_KERNELS)
def test_a_weight_that_the_kernel_before_writes_is_read_stale_if_it_is_called_constant(algorithm):
    program = program_of(algorithm, 3, "plain", KINDS[:1])

    assert any(is_noticed(algorithm, program, seed, KINDS[:1], "plain", keeps_promise=False) for seed in range(4))


# ---- negative controls: what is wrong, the text that makes it so, and the sanitizer that notices ---------------------

FILES = ("device/matmul/skinny.cuh", "matmul/matmul_two_shot.cu")
MUTANTS = {
    "packs taken from the box before all of them are there": (
        "    round_transposed<Result>(sums, ring.staging);\n    sync_warpgroup(1);\n",
        "    round_transposed<Result>(sums, ring.staging);\n",
        "plain",
    ),
    "a call used before it is known": (
        "    sync_warpgroup(1);  // the box of the tile before has been read, and the call is known\n",
        "",
        "thread",
    ),
    "rows that a cluster's other block has, loaded twice": (
        "const u32 first = block_in_cluster() * share;",
        "const u32 first = 0;",
        "plain",
    ),
    "A loaded before the kernel before has written it": (
        "  wait_for_previous_kernel(a);\n",
        "  if (warp != 4 || !m.constant_weight) wait_for_previous_kernel(a);\n",
        "plain",
    ),
    "a constant weight loaded twice": (
        "if (!m.constant_weight || !is_early(step)) load_w(step);",
        "load_w(step);",
        "plain",
    ),
    "a constant weight loaded into places that are in use": (
        "step.more() && is_early(step); step.next()) load_w(step);",
        "step.more() && step.at.use < 2; step.next()) load_w(step);",
        "plain",
    ),
    "a place of a constant weight that waits for too few bytes of a cluster's rows": (
        "filled.arrive_and_expect(Tile::a_nbytes + Tile::cluster * share * row_nbytes);",
        "filled.arrive_and_expect(Tile::a_nbytes + (step.at.use ? Tile::cluster : 1) * share * row_nbytes);",
        "plain",
    ),
    "operands read before the kernel before has written them": (
        "    fence_async_proxy_global();  // the kernel before may have written A, or W\n",
        "",
        "thread",
    ),
    "a sum that its owner does not keep": (
        "    output.store(at.in_result(m), sum);\n",
        "",
        "plain",
    ),
}


def is_noticed(algorithm, program, seed: int, kinds, sanitizer: str, keeps_promise: bool = True) -> bool:
    try:
        return bool(faults(algorithm, program, 3, seed, sanitizer, kinds, keeps_promise))
    except KernelFailure:
        return True


known(FILES, MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    old, new, sanitizer = MUTANTS[mistake]
    (file,) = [name for name in FILES if old in (source_directory() / name).read_text()]
    algorithm = Algorithm.MATMUL_TWO_SHOT if "two_shot" in file else Algorithm.MATMUL_ONE_SHOT
    kinds = KINDS[2:3] if "cluster" in mistake else KINDS[:1]
    program = program_of(algorithm, 3, sanitizer, kinds, Mutation(file, old, new))

    assert any(is_noticed(algorithm, program, seed, kinds, sanitizer) for seed in range(12))

"""Skinny matmuls whose partials are added as a tree, executed on the host: the bits of the specification."""

from __future__ import annotations

import itertools
import random

import pytest

from graphar import reference
from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES, SENTINEL, Scratch
from graphar.plan.tiles import LAYOUTS, SkinnyTile
from graphar.product.gemm import STORE_COLUMNS
from graphar.runtime.catalogue import SKINNY_KERNELS
from graphar.simulator.build import Mutation
from graphar.simulator.calls import first_epoch
from graphar.simulator.simulation import Call, KernelFailure, Simulation
from tests.cases import normal
from tests.host.build import known
from tests.host.matmul_operands import packed, wrong_elements
from tests.host.test_matmul_partials import draw_operands
from tests.host.test_matmul_skinny import MOST_THREADS, program_of
from tests.host.test_matmul_tiles import draw_blocks, dtype_of

pytestmark = pytest.mark.host

CALLS = 4
CAPACITY = 64 * 24  # packs in a slot: 4 columns each
SEEDS = {("plain", 2): 3, ("plain", 4): 2, ("plain", 8): 1, ("thread", 2): 1}


def kinds_of(world_size: int, sanitizer: str = "plain") -> tuple:
    """Rounded packs use the same scratch: they are of the first kind."""
    leaves = LEAVES // world_size
    sizes = (8, 2), (16, 3, 2), (64, 2, 2)
    tiles = [SkinnyTile(8, 2), *(SkinnyTile(*size, *([1] * (3 - len(size))), leaves, True) for size in sizes)]
    return tuple(itertools.product(tiles, LAYOUTS))[: 8 if sanitizer == "plain" else 4]


def draw_call(algorithm, choices: random.Random, world_size: int, kinds, most_threads: int):
    """A call of any kind and size that the scratch has room for, and what every rank must get."""
    dtype, kind = dtype_of(world_size), choices.randrange(len(kinds))
    tile, layout = kinds[kind]
    m = choices.choice([1, tile.rows, choices.randint(1, tile.rows)])
    n = STORE_COLUMNS * choices.randint(1, min(CAPACITY // 2 // m, 30))
    bias, with_bias = normal(choices.getrandbits(16), n, dtype), choices.random() < 0.5
    pairs = draw_operands(choices, world_size, m, n)
    if not tile.partials:
        pairs = [(a[:, :64].sign(), w[:, :64].sign()) for a, w in pairs]  # sums that are exact in any order
    inputs = [packed([m, n, a.shape[1], 0, 0, with_bias], a, w, bias.view(1, n), layout) for a, w in pairs]
    most_blocks = min(2 * tile.cluster, most_threads // (world_size * tile.threads) // tile.cluster * tile.cluster)
    blocks = draw_blocks(choices, world_size, tile.cluster, max(most_blocks, tile.cluster))
    a, w = zip(*pairs, strict=True)
    result = reference.fused_matmul_allreduce(a, w, bias if with_bias else None, tp_invariant=tile.partials)
    beside = {"blocks": blocks, "cluster": tile.cluster}
    shape = Config(algorithm, blocks[0], tile.threads)
    return Call(kind, shape, inputs, (result.numel(),), (result.nbytes,) * world_size, **beside), result


def faults(algorithm, program, world_size: int, seed: int, kinds, most_threads: int = MOST_THREADS["plain"]):
    """Descriptions of all errors after some calls in a row."""
    choices = random.Random(f"skinny partials {world_size} {seed}")
    drawn = [draw_call(algorithm, choices, world_size, kinds, most_threads) for _ in range(CALLS)]
    shared_nbytes = max(tile.shared_nbytes for tile, _ in kinds) + 2048
    scratch = Scratch(CAPACITY, 2 * world_size * CAPACITY * PACK_NBYTES, SENTINEL, shared_nbytes)
    simulation = Simulation(program, algorithm, world_size, scratch, 0, seed, first_epoch(seed))
    found = []
    for rank, outcome in enumerate(simulation.run([call for call, _ in drawn])):
        if outcome.record.kind:
            found.append(f"rank {rank} gave up waiting for rank {outcome.record.peer}")
        if outcome.broken_guards:
            found.append(f"rank {rank} wrote beside tensors or scratch")
        for number, (result, (_, expected)) in enumerate(zip(outcome.results, drawn, strict=True)):
            if wrong := wrong_elements(result, expected):
                found.append(f"rank {rank}, call {number}: {wrong} of {expected.numel()} are wrong")
    return found


every_kernel = pytest.mark.parametrize("algorithm", SKINNY_KERNELS, ids=lambda one: one.value)


@every_kernel
@pytest.mark.parametrize(("sanitizer", "world_size"), SEEDS)
def test_calls_in_a_row_give_the_bits_of_the_specification(algorithm, sanitizer, world_size):
    kinds = kinds_of(world_size, sanitizer)
    program = program_of(algorithm, world_size, sanitizer, kinds)

    for seed in range(SEEDS[sanitizer, world_size]):
        assert faults(algorithm, program, world_size, seed, kinds, MOST_THREADS[sanitizer]) == [], seed


# ---- negative controls ----------------------------------------------------------------------------------------------

SKINNY, TWO_SHOT = "device/matmul/skinny.cuh", "matmul/matmul_two_shot.cu"
MUTANTS = {
    "the order of ranks in place of the tree": (
        "device/pack.cuh",
        "total[0] = sum_of_tree<N>(part, w);",
        "add_in_rank_order<T, N>(part, w, total);",
    ),
    "leaves that are added one after another": (
        SKINNY,
        "if constexpr (Tile::leaves > 1)",
        "if constexpr (Tile::leaves > 8)",
    ),
    "a partial that is rounded to bf16": (
        SKINNY,
        "x % 4 * 4) = sums[i];",
        "x % 4 * 4) = __uint_as_float(__float_as_uint(sums[i]) & 0xffff0000u);",
    ),
    "the halves of 8 columns swapped": (
        SKINNY,
        "place[2] = {first, first + 1};",
        "place[2] = {first + 1, first};",
    ),
    "a bias of the first half alone": (SKINNY, "bias(4 * half + e, v)", "bias(e, v)"),
    "a box that is read without its swizzle": (SKINNY, "chunk ^ row / 2 % 4 * 2;", "chunk;"),
    "a sum in the place of a partial that has not come": (
        TWO_SHOT,
        "const u32 place = slots + a.rank * a.capacity + at.in_result<Tile::pack_columns>(m);",
        "const u32 place = slots + a.rank * a.capacity + at.in_result(m);",
    ),
}


def is_noticed(algorithm, program, seed: int, kinds) -> bool:
    try:
        return bool(faults(algorithm, program, 4, seed, kinds))
    except KernelFailure:
        return True


known([], MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    algorithm = Algorithm.MATMUL_TWO_SHOT if MUTANTS[mistake][0] == TWO_SHOT else Algorithm.MATMUL_ONE_SHOT
    kinds = kinds_of(4)[4:5]
    program = program_of(algorithm, 4, "plain", kinds, Mutation(*MUTANTS[mistake]))

    assert any(is_noticed(algorithm, program, seed, kinds) for seed in range(6))

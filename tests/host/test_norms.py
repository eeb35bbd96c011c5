"""All-reduce with residual and norm, executed on the host: the specification's bits, whatever the grid."""

from __future__ import annotations

import random

import pytest
import torch

from graphar import norms, reference
from graphar.algorithms import Algorithm, Shape
from graphar.kernels import NORM_KERNELS, TYPE_NAMES, kernel_source
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import NORM_SLOTS, Mutation, build
from tests.host.cases import scratch_of
from tests.host.simulate import Call, KernelFailure, Simulation

pytestmark = pytest.mark.host

WORLD_SIZES = (2, 3, 4)
CLUSTERS = (1, 2)
CALLS = 6
ROW_PACKS = (1, 8, 33, 64, 130)  # up to three for each slot
ROWS = (1, 2, 5, 13)


def program(algorithm: str, dtypes, sanitizer: str, mutation: Mutation | None = None):
    return build(
        tuple(
            kernel_source(algorithm, dtype, n, str(cluster))
            for dtype in dtypes
            for n in WORLD_SIZES
            for cluster in CLUSTERS
        ),
        sanitizer,
        mutation,
    )


def draw_call(algorithm: Algorithm, world_size: int, dtype: torch.dtype, choices: random.Random):
    """A call, and what every rank must get: the normed rows, and behind them the sums in the input's place."""
    pack, capacity = 16 // dtype.itemsize, scratch_of(algorithm, world_size).capacity
    in_whole = algorithm is Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT
    fitting = [
        (rows, packs)
        for rows in ROWS
        for packs in ROW_PACKS
        if (rows if in_whole else -(-rows // world_size)) * packs <= capacity
    ]
    rows, packs = choices.choice(fitting)
    fill = choices.choice([normal, normal, bit_patterns])
    xs = [fill(rank, rows * packs * pack, dtype).view(rows, -1) for rank in range(world_size)]
    residual, weight = normal(20, xs[0].numel(), dtype).view_as(xs[0]), normal(21, packs * pack, dtype)
    numbers = choices.choice([(1e-6, 0.0), (1e-5, 1.0)])
    normed, summed = reference.allreduce_residual_rmsnorm(xs, residual, weight, *numbers)
    teams = choices.choice([1, 2, 3] if in_whole else [world_size, 4 // world_size * world_size or world_size])
    threads = choices.choice([32, NORM_SLOTS] if packs <= 32 else [NORM_SLOTS])
    cluster = choices.choice(CLUSTERS) if threads > 32 else 1
    call = Call(
        CLUSTERS.index(cluster),
        Shape(algorithm, min(rows, teams) * cluster, threads // cluster),
        [x.reshape(-1) for x in xs],
        (normed.numel(),),
        (normed.nbytes,) * world_size,
        offset=choices.choice([0, dtype.itemsize]),
        feeds_back=True,
        operands=(residual, weight, None),
        scalars=numbers,
        columns=packs * pack,
        cluster=cluster,
    )
    return call, torch.stack([normed, summed])


def simulate(algorithm, world_size, dtypes, dtype, sanitizer, seed, mutation=None):
    choices = random.Random(f"{algorithm} {world_size} {dtype} {seed}")
    algorithm = Algorithm(algorithm)
    drawn = [draw_call(algorithm, world_size, dtype, choices) for _ in range(CALLS)]
    first = (dtypes.index(dtype) * len(WORLD_SIZES) + WORLD_SIZES.index(world_size)) * len(CLUSTERS)
    made = program(algorithm.value, dtypes, sanitizer, mutation)
    needs = scratch_of(algorithm, world_size)
    outcomes = Simulation(made, algorithm, world_size, needs, first, seed).run([call for call, _ in drawn])
    assert [(outcome.record.kind, outcome.broken_guards) for outcome in outcomes] == [(0, 0)] * world_size
    for outcome in outcomes:
        for result, (_, expected) in zip(outcome.results, drawn, strict=True):
            yield same_bits(result.view(dtype), expected.reshape(-1))


def cases():
    for algorithm in NORM_KERNELS:
        for sanitizer in ("plain", "thread", "address"):
            group = pytest.mark.xdist_group(f"norm-{algorithm}-{sanitizer}")
            for world_size in WORLD_SIZES:
                yield pytest.param(algorithm, sanitizer, world_size, marks=group)


@pytest.mark.parametrize(("algorithm", "sanitizer", "world_size"), list(cases()))
def test_every_rank_gets_the_specifications_bits(algorithm, sanitizer, world_size, monkeypatch):
    monkeypatch.setattr(norms, "SLOTS", NORM_SLOTS)
    dtypes = tuple(TYPE_NAMES) if sanitizer == "plain" else (torch.bfloat16,)
    for dtype in dtypes:
        for seed in range(4 if sanitizer == "plain" else 2):
            found = list(simulate(algorithm, world_size, dtypes, dtype, sanitizer, seed))
            assert found == [0] * CALLS * world_size, f"{dtype}, seed {seed}"


MUTANTS = (
    ("a row's squares stand where the next one's do", "turn ^= 1;", ";"),
    (
        "a block does not wait for its cluster",
        "arrive_at_cluster();\n      wait_for_cluster();",
        "arrive_at_cluster();",
    ),
    ("squares are added in another order", "step = 1; step < 32; step *= 2", "step = 16; step > 0; step /= 2"),
)


def is_noticed(mutation: Mutation, sanitizer: str, seed: int) -> bool:
    dtypes = (torch.float32,)
    try:
        return any(simulate("allreduce_rmsnorm_two_shot", 2, dtypes, torch.float32, sanitizer, seed, mutation))
    except KernelFailure:
        return True


@pytest.mark.xdist_group("norm-mutants")
@pytest.mark.parametrize(("what", "old", "new"), MUTANTS, ids=[what for what, *_ in MUTANTS])
def test_a_mistake_is_noticed(what, old, new, monkeypatch):
    monkeypatch.setattr(norms, "SLOTS", NORM_SLOTS)
    mutation = Mutation("device/rms_norm.cuh", old, new)

    assert any(is_noticed(mutation, sanitizer, seed) for seed in range(4) for sanitizer in ("plain", "thread"))

"""All-reduce with residual and norm, executed on the host: the specification's bits, whatever the grid."""

from __future__ import annotations

import random

import pytest
import torch

from graphar import norms, reference
from graphar.algorithms import Algorithm, Shape
from graphar.kernels import NORM_KERNELS, TYPE_NAMES, kernel_source
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import NORM_SLOTS, build
from tests.host.cases import scratch_of
from tests.host.simulate import Call, Simulation

pytestmark = pytest.mark.host

WORLD_SIZES = (2, 3, 4)
CALLS = 6
ROW_PACKS = (1, 8, 33, 64, 130)  # up to three for each slot
ROWS = (1, 2, 5, 13)


def program(algorithm: str, dtypes, sanitizer: str):
    return build(
        tuple(kernel_source(algorithm, dtype, n) for dtype in dtypes for n in WORLD_SIZES),
        sanitizer,
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
    blocks = choices.choice([1, 2, 3]) if in_whole else choices.choice([world_size, 2 * world_size])
    call = Call(
        0,
        Shape(algorithm, min(rows, blocks), choices.choice([32, NORM_SLOTS] if packs <= 32 else [NORM_SLOTS])),
        [x.reshape(-1) for x in xs],
        (normed.numel(),),
        (normed.nbytes,) * world_size,
        offset=choices.choice([0, dtype.itemsize]),
        feeds_back=True,
        operands=(residual, weight, None),
        scalars=numbers,
        columns=packs * pack,
    )
    return call, torch.stack([normed, summed])


def simulate(algorithm, world_size, dtypes, dtype, sanitizer, seed):
    choices = random.Random(f"{algorithm} {world_size} {dtype} {seed}")
    algorithm = Algorithm(algorithm)
    drawn = [draw_call(algorithm, world_size, dtype, choices) for _ in range(CALLS)]
    first = dtypes.index(dtype) * len(WORLD_SIZES) + WORLD_SIZES.index(world_size)
    made = program(algorithm.value, dtypes, sanitizer)
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

"""Norms of sums that lie in parts on the ranks, executed on the host: the specification's bits, whatever the parts."""

from __future__ import annotations

import random

import pytest
import torch

from graphar import norms
from graphar.algorithms import Algorithm, Shape
from graphar.kernels import kernel_source
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import NORM_SLOTS, Mutation, build
from tests.host.cases import scratch_of
from tests.host.simulate import Call, KernelFailure, Simulation

pytestmark = pytest.mark.host

ALGORITHM = Algorithm.ALLGATHER_RMSNORM
WORLD_SIZES = (2, 3)
DTYPES = {2: torch.float16, 3: torch.bfloat16}
CALLS = 6
ROW_PACKS = (1, 8, 33, 64, 130)  # up to three for each slot


def program(sanitizer: str, mutation: Mutation | None = None):
    sources = (kernel_source(ALGORITHM.value, DTYPES[world_size], world_size) for world_size in WORLD_SIZES)
    return build(tuple(sources), sanitizer, mutation)


def draw_call(world_size: int, choices: random.Random) -> tuple[Call, torch.Tensor]:
    """A call of parts of any lengths, and the normed rows that every rank must get."""
    dtype, packs = DTYPES[world_size], choices.choice(ROW_PACKS)
    columns, most = packs * 16 // dtype.itemsize, scratch_of(ALGORITHM, world_size).capacity // packs
    counts = [choices.choice([0, 1, choices.randint(1, min(most, 9))]) for _ in range(world_size)]
    counts[choices.randrange(world_size)] = 1
    fill = choices.choice([normal, normal, bit_patterns])
    total = fill(0, sum(counts) * columns, dtype).view(-1, columns)
    total = torch.where(total.isnan(), torch.tensor(torch.nan, dtype=dtype), total)  # as sums are
    residual, weight = normal(20, total.numel(), dtype).view_as(total), normal(21, columns, dtype)
    numbers = choices.choice([(1e-6, 0.0), (1e-5, 1.0)])
    normed, _ = norms.specification(total, residual, weight, *numbers)
    call = Call(
        0,
        Shape(ALGORITHM, choices.randint(1, min(3, max(counts))), 32 if packs <= 32 else NORM_SLOTS),
        [part.reshape(-1) for part in total.split(counts)],
        tuple(count * columns for count in counts),
        (normed.nbytes,) * world_size,
        offset=choices.choice([0, dtype.itemsize]),
        operands=(residual, weight, torch.zeros_like(total)),
        scalars=numbers,
        columns=columns,
    )
    return call, normed


def wrong_elements(world_size: int, sanitizer: str, seed: int, mutation: Mutation | None = None) -> list[int]:
    """By rank and call."""
    choices = random.Random(f"{world_size} {seed}")
    drawn = [draw_call(world_size, choices) for _ in range(CALLS)]
    needs, first = scratch_of(ALGORITHM, world_size), WORLD_SIZES.index(world_size)
    simulation = Simulation(program(sanitizer, mutation), ALGORITHM, world_size, needs, first, seed)
    outcomes = simulation.run([call for call, _ in drawn])
    assert [(outcome.record.kind, outcome.broken_guards) for outcome in outcomes] == [(0, 0)] * world_size
    return [
        same_bits(result.view(expected.dtype), expected.reshape(-1))
        for outcome in outcomes
        for result, (_, expected) in zip(outcome.results, drawn, strict=True)
    ]


@pytest.fixture(autouse=True)
def few_slots(monkeypatch):
    monkeypatch.setattr(norms, "SLOTS", NORM_SLOTS)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("sanitizer", ["plain", "thread", "address"])
def test_every_rank_gets_the_specifications_bits(sanitizer, world_size):
    for seed in range(4 if sanitizer == "plain" else 1):
        assert wrong_elements(world_size, sanitizer, seed) == [0] * CALLS * world_size, seed


MUTANTS = {
    "a part without rows is not waited for": ("norm.comes = norm.comes && take(0, nothing);", "(void)nothing;"),
    "rows of a part are normed as those of another": (
        "norm.take(first(owner) + row, take);",
        "norm.take(first(a.rank) + row, take);",
    ),
}


def is_noticed(mutation: Mutation, seed: int) -> bool:
    try:
        return any(wrong_elements(3, "plain", seed, mutation))
    except (AssertionError, KernelFailure):
        return True


@pytest.mark.parametrize(("old", "new"), MUTANTS.values(), ids=MUTANTS)
def test_a_mistake_is_noticed(old, new):
    assert any(is_noticed(Mutation(f"{ALGORITHM}.cu", old, new), seed) for seed in range(8))

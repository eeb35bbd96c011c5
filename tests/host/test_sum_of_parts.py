"""The local sum of parts that copy engines have brought, executed on the host: the specification's bits."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch

from graphar import reference
from graphar.numerics.dtypes import TYPE_NAMES, with_canonical_nan
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import Scratch
from graphar.runtime.catalogue import KernelSource
from graphar.simulator.build import Mutation
from graphar.simulator.simulation import Call, Simulation
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import build, known, seeds
from tests.host.mutant import notices

pytestmark = pytest.mark.host

FILE, OF_ANY_KIND = "copies/sum_of_parts.cu", Algorithm.ONE_SHOT_PUSH  # any: Simulation requires one
GAPS = (0, 4)  # bytes: with them parts may lie at any alignment
KINDS = [(dtype, ranks, gap) for dtype in TYPE_NAMES for ranks in (2, 3, 8) for gap in GAPS]
SOURCES = tuple(
    KernelSource("one_sum_of_parts.cu", f"one_sum_of_parts<{TYPE_NAMES[dtype]}, {ranks}, {gap}>")
    for dtype, ranks, gap in KINDS
)
MISTAKES = {
    "the last packs are left out": Mutation(FILE, "i < packs;", "i < whole;"),
    "packs are passed over": Mutation(FILE, "i += depth * stride", "i += (depth + 1) * stride"),
    "whole packs of a part that is not aligned": Mutation(FILE, "whole = min(whole, part.whole)", "whole = whole"),
    "packs beyond the end": Mutation(FILE, "i + (depth - 1) * stride < whole", "i < whole"),
    "a sum without its factor": Mutation(FILE, "if (factor == 1) return sum;", "if (factor != 1) return sum;"),
    "an order of its own": Mutation(FILE, "part[d][r] = from[r]", "part[d][N - 1 - r] = from[r]"),
}
known(MISTAKES.values())


def wrong_elements(sanitizer: str, seed: int, mistake: Mutation | None = None, **of_call) -> int:
    """How many elements and guards are wrong after one call. The seed decides on its kind, size, grid and place."""
    choices = random.Random(seed)
    kernel = choices.randrange(len(KINDS))
    dtype, ranks, gap = KINDS[kernel]
    numel = choices.choice([1, 7, 8, 33, choices.randrange(1, 3000), 4096])
    factor = choices.choice([1.0, 1.0, 1 / ranks])
    parts = [choices.choice([normal, bit_patterns])(rank, numel, dtype) for rank in range(ranks)]
    pad = torch.zeros(gap // dtype.itemsize, dtype=dtype)
    call = Call(
        kernel,
        Config(OF_ANY_KIND, choices.randint(1, 3), choices.choice([32, 64])),
        [torch.cat([piece for part in parts for piece in (part, pad)])],
        (numel,),
        (numel * dtype.itemsize,),
        offset=choices.choice([0, 0, 4, 16]),
        scalars=(factor,),
        **of_call,
    )
    program = build(SOURCES, sanitizer, mistake)

    (outcome,) = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0), 0, seed).run([call])

    expected = reference.allreduce(parts)
    if factor != 1:
        expected = with_canonical_nan(expected * torch.tensor(factor, dtype=torch.float32))
    return same_bits(outcome.results[0].view(dtype), expected.to(dtype)) + outcome.broken_guards


@pytest.mark.parametrize(("sanitizer", "most_seeds"), [("plain", 60), ("thread", 6), ("address", 20)])
def test_it_gives_the_specifications_bits(sanitizer, most_seeds):
    for seed in seeds(most_seeds):
        assert wrong_elements(sanitizer, seed) == 0, seed


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_noticed(mistake):
    assert any(notices(partial(wrong_elements, "address", seed, mistake)) for seed in range(40))


def test_a_kernel_without_its_wait_for_the_one_before_is_noticed():
    assert any(wrong_elements("plain", seed, waits=False) for seed in range(4))

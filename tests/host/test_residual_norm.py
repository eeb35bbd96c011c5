"""Residual and norm of sums that are there, executed on the host: the specification's bits."""

from __future__ import annotations

import random

import pytest
import torch

from graphar.numerics import norms
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.nan import with_canonical_nan
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.scratch import NORM_SHARED_NBYTES, PACK_NBYTES, Scratch
from graphar.runtime.catalogue import residual_norm_source
from tests.cases import bit_patterns, normal, same_bits
from tests.host.build import NORM_SLOTS, Mutation, build
from tests.host.simulate import Call, Simulation

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("few_slots")]

DTYPES = tuple(TYPE_NAMES)
OF_ANY_KIND = Algorithm.ONE_SHOT_PUSH  # any: Simulation requires one
ROW_PACKS = (1, 8, 33, 64, 130)  # up to three for each slot


def wrong_elements(sanitizer: str, seed: int, mutation: Mutation | None = None, **of_call) -> int:
    """How many elements and guards are wrong after one call. The seed decides its size, and whether it is in place."""
    choices = random.Random(seed)
    index, packs = choices.randrange(len(DTYPES)), choices.choice(ROW_PACKS)
    dtype, rows = DTYPES[index], choices.randint(1, 9)
    columns = packs * PACK_NBYTES // dtype.itemsize
    fill = choices.choice([normal, bit_patterns])
    total = with_canonical_nan(fill(0, rows * columns, dtype).view(rows, columns))
    residual, weight = normal(20, total.numel(), dtype).view_as(total), normal(21, columns, dtype)
    numbers = choices.choice([(1e-6, 0.0), (1e-5, 1.0)])
    call = Call(
        0,
        Config(OF_ANY_KIND, choices.randint(1, min(3, rows)), 32 if packs <= 32 else NORM_SLOTS),
        [total.view(-1)],
        (total.numel(),),
        (total.nbytes,),
        in_place=choices.random() < 0.5,
        operands=(residual, weight, torch.zeros_like(total)),
        scalars=numbers,
        columns=columns,
        **of_call,
    )
    program = build(tuple(map(residual_norm_source, DTYPES)), sanitizer, mutation)
    simulation = Simulation(program, OF_ANY_KIND, 1, Scratch(0, 128, 0, NORM_SHARED_NBYTES), index, seed)

    (outcome,) = simulation.run([call])

    normed, _ = norms.specification(total, residual, weight, *numbers)
    return same_bits(outcome.results[0].view(dtype), normed.view(-1)) + outcome.broken_guards


@pytest.mark.parametrize(("sanitizer", "seeds"), [("plain", 24), ("thread", 3), ("address", 6)])
def test_it_gives_the_specifications_bits(sanitizer, seeds):
    for seed in range(seeds):
        assert wrong_elements(sanitizer, seed) == 0, seed


def test_a_row_left_out_is_noticed():
    mistake = Mutation("norm/residual_rmsnorm.cu", "row += norm.teams", "row += norm.teams + 1")
    assert any(wrong_elements("plain", seed, mistake) for seed in range(8))


def test_a_kernel_without_its_wait_for_the_one_before_is_noticed():
    assert any(wrong_elements("plain", seed, waits=False) for seed in range(4))

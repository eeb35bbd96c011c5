"""Negative controls: every small mistake in the kernels is noticed by the runs of test_kernels.py."""

from __future__ import annotations

import pytest

from graphar.simulator.simulation import KernelFailure
from tests.host.build import build, known
from tests.host.cases import Kernels, differences, draw, dtypes_of, simulate
from tests.host.mutants import MUTANTS

pytestmark = pytest.mark.host

MOST_SEEDS = 30
known([], [mutant.mutation for mutant in MUTANTS])


def is_noticed(kernels: Kernels, program, seed: int) -> bool:
    (world_size,), (dtype,) = kernels.world_sizes, kernels.dtypes
    drawn = draw(kernels.algorithm, world_size, dtype, seed)
    try:
        return bool(differences(drawn, simulate(program, kernels, world_size, dtype, seed, drawn.calls)))
    except KernelFailure:
        return True


@pytest.mark.promise("Kernels run on the CPU, on models of the PTX they use, and mistakes in ordering are noticed.")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.algorithm}: {mutant.name}")
def test_a_mistake_is_noticed(mutant):
    kernels = Kernels(mutant.algorithm, (mutant.world_size,), dtypes_of(mutant.algorithm)[:1])
    program = build(kernels.sources(), mutant.sanitizer, mutant.mutation)

    assert any(is_noticed(kernels, program, seed) for seed in range(MOST_SEEDS))


def test_no_two_mistakes_are_the_same():
    assert len({(mutant.mutation, mutant.algorithm) for mutant in MUTANTS}) == len(MUTANTS)

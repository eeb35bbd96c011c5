"""Negative controls: every small mistake in the kernels is noticed by the runs of test_kernels.py."""

from __future__ import annotations

from functools import partial

import pytest

from tests.host.build import build, known
from tests.host.cases import Kernels, draw, dtypes_of, faults
from tests.host.mutant import notices
from tests.host.mutants import MUTANTS

pytestmark = pytest.mark.host

MOST_SEEDS = 30
known(mutant.mutation for mutant in MUTANTS)


@pytest.mark.promise("Kernels run on the CPU, on models of the PTX they use, and mistakes in ordering are noticed.")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: f"{mutant.algorithm}: {mutant.name}")
def test_a_mistake_is_noticed(mutant):
    algorithm, world_size, dtype = mutant.algorithm, mutant.world_size, dtypes_of(mutant.algorithm)[0]
    program = build(Kernels(algorithm, (world_size,), (dtype,)).sources(), mutant.sanitizer, mutant.mutation)

    def has_faults(seed):
        return faults(draw(algorithm, world_size, dtype, seed), program, algorithm, world_size, 0, seed)

    assert any(notices(partial(has_faults, seed)) for seed in range(MOST_SEEDS))


def test_no_two_mistakes_are_the_same():
    assert len({(mutant.mutation, mutant.algorithm) for mutant in MUTANTS}) == len(MUTANTS)

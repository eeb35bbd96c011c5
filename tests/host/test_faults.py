"""A rank that never calls, on the host: every kernel ends within its deadline and names that rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphar.algorithms import Algorithm
from tests.host.build import build
from tests.host.cases import ALGORITHMS, WORLD_SIZES, Kernels, draw, dtypes_of, simulate

pytestmark = pytest.mark.host

TIMED_OUT = 1  # `timed_out` in cuda_src/device/call.cuh
DEADLINE_NS = 20_000_000


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "algorithm", [pytest.param(one, marks=pytest.mark.xdist_group(f"{one}-plain")) for one in ALGORITHMS]
)
def test_an_absent_rank_is_named_and_nothing_is_written_beside_the_tensors(algorithm, world_size):
    dtype = dtypes_of(algorithm)[0]
    kernels = Kernels(algorithm, WORLD_SIZES, dtypes_of(algorithm))
    program = build(kernels.sources(), "plain")
    for absent in range(world_size):
        calls = draw(algorithm, world_size, dtype, absent, 3).calls
        late = replace(calls[1], absent=(absent,), timeout_ns=DEADLINE_NS)

        outcomes = simulate(program, kernels, world_size, dtype, absent, [calls[0], late])

        named = {outcome.record.peer for outcome in outcomes if outcome.record.kind == TIMED_OUT}
        others = [outcome.record.kind for rank, outcome in enumerate(outcomes) if rank != absent]
        assert named == {absent}
        assert set(others) == {TIMED_OUT}
        assert outcomes[absent].record.kind == 0
        assert not any(outcome.broken_guards for outcome in outcomes)


@pytest.mark.parametrize("algorithm", [Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PUSH, Algorithm.ALLGATHER_FLAGGED])
def test_after_a_timeout_no_rank_takes_data_of_another_call(algorithm):
    """The others give up the call that one rank misses; when it comes to the next, none of them sends any more."""
    dtype = dtypes_of(algorithm)[0]
    kernels = Kernels(algorithm, WORLD_SIZES, dtypes_of(algorithm))
    program = build(kernels.sources(), "plain")
    calls = [replace(call, timeout_ns=DEADLINE_NS) for call in draw(algorithm, 3, dtype, 1, 3).calls]

    outcomes = simulate(program, kernels, 3, dtype, 1, [calls[0], replace(calls[1], absent=(2,)), calls[2], calls[2]])

    assert [outcome.record.kind for outcome in outcomes] == [TIMED_OUT] * 3
    assert [outcome.record.sequence for outcome in outcomes[:2]] == [6, 6]

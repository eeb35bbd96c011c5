"""A rank that never calls, on the host: every kernel ends within its deadline and names that rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.host.build import build
from tests.host.cases import ALGORITHMS, WORLD_SIZES, Kernels, draw, dtypes_of, simulate

pytestmark = pytest.mark.host

TIMED_OUT = 1  # `timed_out` in cuda_src/device/call.cuh
DEADLINE_NS = 200_000_000  # a thread looks at the clock every 1024th spin: in few of these would be too coarse


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

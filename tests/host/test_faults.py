"""A rank that never calls, on the host: every kernel ends within its deadline and names that rank."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.host.build import build
from tests.host.cases import ALGORITHMS, WAYS, WORLD_SIZES, Kernels, draw, dtypes_of, simulate

pytestmark = pytest.mark.host

TIMED_OUT = 1  # `timed_out` in cuda_src/device/sync/call.cuh
DEADLINE_NS = 200_000_000  # a thread looks at the clock every 1024th spin: in few of these would be too coarse
DEADLINE_OF_WARPS_NS = 8 * DEADLINE_NS  # the spins of a warp take longer, since its lanes meet in each


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_absent_rank_is_named_and_nothing_is_written_beside_the_tensors(algorithm, world_size):
    dtype = dtypes_of(algorithm)[0]
    kernels = Kernels(algorithm, WORLD_SIZES, dtypes_of(algorithm))
    program = build(kernels.sources(), "plain")
    deadline_ns = DEADLINE_OF_WARPS_NS if WAYS[algorithm].codecs else DEADLINE_NS
    for absent in range(world_size):
        first, *others = draw(algorithm, world_size, dtype, absent, 6 if WAYS[algorithm].codecs else 2).calls
        largest = max(others, key=lambda call: sum(call.counts))  # a rank without a part could only name one that waits
        late = replace(largest, absent=(absent,), timeout_ns=deadline_ns)

        outcomes = simulate(program, kernels, world_size, dtype, absent, [first, late])

        named = {outcome.record.peer for outcome in outcomes if outcome.record.kind == TIMED_OUT}
        told = [outcome.record.kind for rank, outcome in enumerate(outcomes) if rank != absent]
        assert named == {absent}
        assert set(told) == {TIMED_OUT}
        assert outcomes[absent].record.kind == 0
        assert not any(outcome.broken_guards for outcome in outcomes)

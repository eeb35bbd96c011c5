"""Kernels on GPUs that hold only some of their blocks at a time, as if another communicator's kernels held the rest.

Grids are equal on all ranks, as the package makes them. Those of the all-gather + matmul differ, as for weights of
unequal sizes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphar.plan.algorithms import Algorithm
from tests.host.cases import differences
from tests.host.every_kernel import EVERY_KERNEL, draw, run

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("few_slots")]

CALLS = 3  # two may be under way at a time


def with_equal_grids(calls):
    """The calls with the grid of rank 0 on every rank."""
    return [replace(call, blocks=call.blocks and (call.blocks[0],) * len(call.blocks)) for call in calls]


@pytest.mark.promise(
    "Calls of two communicators, or as many as declared, end in any order, if a matmul's K is equal on all ranks."
)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", EVERY_KERNEL)
def test_room_for_one_block_is_enough(algorithm, world_size):
    for seed in range(4):
        drawn = draw(algorithm, world_size, seed, CALLS)
        calls = drawn.calls if algorithm is Algorithm.ALLGATHER_MATMUL else with_equal_grids(drawn.calls)
        room = max(call.cluster for call in calls)

        assert differences(drawn, run(algorithm, world_size, seed, calls, room=room)) == [], f"seed {seed}"


def test_tiles_in_other_blocks_on_each_rank_need_more_room():
    """The negative control: with unequal grids a tile is computed by blocks of unlike indices."""
    found = []
    for seed in range(6):
        (call,) = draw(Algorithm.MATMUL_ALLREDUCE, 2, seed, 1).calls
        call = replace(call, timeout_ns=20_000_000)
        outcomes = run(Algorithm.MATMUL_ALLREDUCE, 2, seed, [call], room=call.cluster)
        found += [outcome.record.kind for outcome in outcomes]

    assert any(found)  # a rank has given up

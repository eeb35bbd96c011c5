"""Kernels on GPUs that hold only some of their blocks at a time, as if another communicator's kernels held the rest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphar.plan.algorithms import Algorithm
from graphar.runtime.catalogue import SUMMED_TILE_KERNELS
from tests.host.cases import differences
from tests.host.every_kernel import EVERY_KERNEL, draw, run

pytestmark = [pytest.mark.host, pytest.mark.usefixtures("few_slots")]

CALLS = 3  # two may be under way at a time


@pytest.mark.promise(
    "Calls of two communicators end in whatever order ranks launch them, but for two matmuls in tiles."
)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("algorithm", [one for one in EVERY_KERNEL if one not in SUMMED_TILE_KERNELS])
def test_room_for_one_block_is_enough(algorithm, world_size):
    for seed in range(4):
        drawn = draw(algorithm, world_size, seed, CALLS)
        room = max(call.cluster for call in drawn.calls)

        assert differences(drawn, run(algorithm, world_size, seed, drawn.calls, room=room)) == [], f"seed {seed}"


def test_a_matmuls_tiles_need_room_for_all_their_blocks():
    """The negative control."""
    found = []
    for seed in range(4):
        (call,) = draw(Algorithm.MATMUL_ALLREDUCE, 2, seed, 1).calls
        call = replace(call, timeout_ns=20_000_000)
        outcomes = run(Algorithm.MATMUL_ALLREDUCE, 2, seed, [call], room=call.cluster)
        found += [outcome.record.kind for outcome in outcomes]

    assert any(found)  # a rank has given up

"""Kernels on GPUs that hold only some of their blocks at a time, as if another communicator's kernels held the rest.

Grids are equal on all ranks, as the package makes them. Those of the all-gather + matmul differ, as for weights of
unequal sizes.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from graphar.plan.algorithms import Algorithm
from graphar.plan.policy import Chip
from graphar.simulator.simulation import ENOUGH_NS
from tests.host.build import seeds
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
    for seed in seeds(4):
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


SMS, WORLD_SIZE, SHORT_NS = 4, 3, 200_000_000


def outcomes_of(algorithm, communicators, seed, blocks, next_blocks, places=1, timeout_ns=ENOUGH_NS):
    """What ranks get that launch their communicators in rotated orders, on GPUs of SMS SMs with two places each."""
    drawn = draw(algorithm, WORLD_SIZE, seed, 2)
    share = {"blocks": (blocks,) * WORLD_SIZE, "next_blocks": next_blocks, "places": places, "timeout_ns": timeout_ns}
    calls = [replace(call, **share) for call in drawn.calls]
    return drawn, run(algorithm, WORLD_SIZE, seed, calls, room=2 * SMS, communicators=communicators)


def most_that_start_early(chip):
    return max((blocks for blocks in range(1, 2 * SMS) if chip.may_overlap(blocks, halves=True)), default=0)


def give_up(communicators, blocks, next_blocks):
    """Whether waits expire, for some sizes of tensors: blocks without work wait for nobody."""
    found = []
    for seed in range(6):
        _, outcomes = outcomes_of(
            Algorithm.ONE_SHOT_PUSH, communicators, seed, blocks, next_blocks, timeout_ns=SHORT_NS
        )
        found += [outcome.record.kind for outcome in outcomes]
    return any(found)


@pytest.mark.promise(
    "Calls of two communicators, or as many as declared, end in any order, if a matmul's K is equal on all ranks."
)
@pytest.mark.parametrize("communicators", [2, 3, 4])
@pytest.mark.parametrize(
    ("algorithm", "places"),
    [
        (Algorithm.ONE_SHOT_PUSH, 1),
        (Algorithm.TWO_SHOT_PUSH, 1),
        (Algorithm.TWO_SHOT_PIPELINED, 1),
        (Algorithm.TWO_SHOT_LOSSLESS, 2),
    ],
)
def test_as_many_communicators_as_declared_end_in_rotated_orders(algorithm, places, communicators):
    chip = Chip(SMS, "sm_90a", communicators)
    blocks = chip.shared_blocks(halves=places == 1)
    for seed in range(2):
        early = most_that_start_early(chip) if places == 1 else 0  # kernels of whole SMs release no other
        drawn, outcomes = outcomes_of(algorithm, communicators, seed, min(blocks, 3), min(early, 3), places)

        for first in range(0, len(outcomes), WORLD_SIZE):
            assert differences(drawn, outcomes[first : first + WORLD_SIZE]) == [], f"seed {seed}"


def test_three_communicators_with_the_shares_of_two_block_each_other():
    """The negative control: without a declaration."""
    two = Chip(SMS, "sm_90a")
    blocks, early = two.shared_blocks(halves=True), two.shared_blocks(halves=True)

    assert two.may_overlap(early, halves=True)
    assert not give_up(2, blocks, early)
    assert give_up(3, blocks, early)


def test_three_communicators_whose_grids_all_start_early_block_each_other():
    """The negative control: with shares, but two of them for each communicator."""
    three = Chip(SMS, "sm_90a", 3)
    blocks = three.shared_blocks(halves=True)

    assert not three.may_overlap(blocks, halves=True)
    assert not give_up(3, blocks, 0)
    assert give_up(3, blocks, blocks)

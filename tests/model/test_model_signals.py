"""Flags, and the chunks they announce: two_shot_pipelined, allgather_push and one_shot."""

import pytest

from tests.model.explore import assert_caught, assert_holds
from tests.model.machine import Machine
from tests.model.signals import Call, allgather, direct, first_inputs, pipelined, pull


def direct_in_place(ranks: int, calls: list[Call], fault: str = "") -> Machine:
    inputs = first_inputs(ranks, calls[0].chunks * calls[0].blocks)
    return Machine(direct(ranks, calls, True, fault), inputs)


GRIDS = [Call(1, 2), Call(2, 1), Call(1, 2)]
# A model, and how many states it has at least.
HOLD = {
    "two_shot_pipelined, 2 ranks, other sizes": (Machine(pipelined(2, [Call(2), Call(1), Call(2)])), 450),
    "two_shot_pipelined, 2 ranks, each place twice": (Machine(pipelined(2, [Call(5), Call(1)])), 500),
    "two_shot_pipelined, 2 ranks, other grids": (Machine(pipelined(2, GRIDS)), 8_000),
    "two_shot_pipelined, 3 ranks": (Machine(pipelined(3, [Call(1)] * 4)), 25_000),
    "two_shot_pipelined, 3 ranks, other sizes": (Machine(pipelined(3, [Call(2), Call(1)])), 19_000),
    "direct, 2 ranks": (Machine(direct(2, [Call(2)] * 2, False)), 600),
    "direct, 2 ranks, other grids": (Machine(direct(2, GRIDS[:2], False)), 3_500),
    "direct, 3 ranks": (Machine(direct(3, [Call(1)] * 2, False)), 17_000),
    "direct and in place, 2 ranks": (direct_in_place(2, [Call(2)] * 2), 600),
    "direct and in place, 2 ranks, other grids": (direct_in_place(2, GRIDS[:2]), 5_500),
    "direct and in place, 3 ranks": (direct_in_place(3, [Call(1)] * 2), 13_000),
    "allgather_push, 2 ranks": (Machine(allgather([(2, 1), (0, 2), (3, 3)])), 450),
    "allgather_push, 2 ranks, each place twice": (Machine(allgather([(5, 2), (1, 4)])), 700),
    "allgather_push, 3 ranks": (Machine(allgather([(1, 0, 2), (1, 1, 1)])), 6_000),
    "one_shot, 2 ranks": (Machine(pull(2, [Call(1, 2), Call(2, 1)] * 2)), 700),
    "one_shot, 3 ranks": (Machine(pull(3, [Call(1)] * 4)), 4_500),
}


@pytest.mark.promise("The protocols hold in every order of stores at 2 and 3 ranks, and when a rank dies.")
@pytest.mark.parametrize("name", HOLD)
def test_every_chunk_is_read_whole_and_once(name):
    model, states = HOLD[name]
    assert_holds(model, states)


def of_chunks(fault: str) -> Machine:
    return Machine(pipelined(2, [Call(2), Call(1), Call(2)], fault))


def of_grids(fault: str) -> Machine:
    return Machine(pipelined(2, GRIDS, fault))


def of_outputs(fault: str) -> Machine:
    return direct_in_place(2, [Call(2)] * 2, fault)


def of_parts(fault: str) -> Machine:
    return Machine(allgather([(2, 1), (0, 2), (3, 3)], fault))


def of_stages(fault: str) -> Machine:
    return Machine(pull(2, [Call(1)] * 4, fault))


FAULTS = [
    ("flags are relaxed stores", of_chunks, "'not yet' is read"),
    ("flags are relaxed stores", of_outputs, "'not yet' is read"),
    ("flags are relaxed stores", of_parts, "'not yet' is read"),
    ("flags are relaxed stores", of_stages, "'not yet' is read"),
    ("signals before it writes", of_chunks, "'not yet' is read"),
    ("signals before it writes", of_parts, "'not yet' is read"),
    ("signals before it writes", of_stages, "'not yet' is read"),
    ("waits for the step before", of_chunks, "'not yet' is read"),
    ("waits for the step before", of_parts, "'not yet' is read"),
    ("waits for the step before", of_stages, "'not yet' is read"),
    ("sums before it waits", of_chunks, "'not yet' is read"),
    ("the last wait is left out", of_chunks, "'not yet' is read"),
    ("the last wait is left out", of_outputs, "is read where"),
    ("steps are not counted on", of_chunks, "is read where"),
    ("steps are not counted on", of_outputs, "is read where"),
    ("steps are not counted on", of_parts, "is read where"),
    ("steps are not counted on", of_stages, "is read where"),
    ("slots depend on the grid", of_grids, "overwrites"),
    ("each call begins at the first slot", of_parts, "overwrites"),
    ("an empty part has no steps", of_parts, "is read where"),
    ("one stage", of_stages, "overwrites"),
]


@pytest.mark.parametrize(("fault", "model", "symptom"), FAULTS)
def test_a_fault_is_seen(fault, model, symptom):
    assert_caught(model(fault), symptom)


@pytest.mark.parametrize("depths", [(2, 3), (3, 2)])
def test_fewer_places_for_chunks_would_not_do(depths):
    assert_caught(Machine(pipelined(2, [Call(5)], depths=depths)), "overwrites")


def test_fewer_places_for_parts_would_not_do():
    assert_caught(Machine(allgather([(5, 2)], depth=3)), "overwrites")

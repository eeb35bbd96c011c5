"""Data that carry their own readiness: one_shot_push, reducescatter_push, allgather_flagged and two_shot_push.

A word is what cannot be torn: 4 bytes of a pack (device/sync/sentinel.cuh), or 4 bytes with the flag beside them
(device/sync/flagged.cuh). Four calls use each slot twice.
"""

import pytest

from tests.model.explore import assert_caught, assert_holds
from tests.model.machine import Machine
from tests.model.sentinel import allgather, one_hop, one_shot, reducescatter, two_shot

# Threads, and how many states there are at least.
HOLD = {
    "one_shot_push, 2 ranks, two words": (one_hop(2, [one_shot(2, 1)] * 4, words=2), 2_700),
    "one_shot_push, 2 ranks, other sizes": (one_hop(2, [one_shot(2, packs) for packs in (2, 1, 3, 2)]), 800),
    "one_shot_push, 2 ranks, other grids": (one_hop(2, [one_shot(2, 2, blocks) for blocks in (2, 1, 2, 1)]), 4_500),
    "one_shot_push, 3 ranks": (one_hop(3, [one_shot(3, 1)] * 4), 13_000),
    "reducescatter_push, 2 ranks": (one_hop(2, [reducescatter(p) for p in ((1, 0), (0, 1), (1, 0), (2, 1))]), 400),
    "reducescatter_push, 3 ranks": (
        one_hop(3, [reducescatter(p) for p in ((1, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1))]),
        13_000,
    ),
    "allgather_flagged, 2 ranks, two words": (
        one_hop(2, [allgather(p) for p in ((1, 0), (0, 1), (1, 2), (1, 1))], words=2),
        350,
    ),
    "allgather_flagged, 3 ranks": (
        one_hop(3, [allgather(p) for p in ((1, 0, 0), (0, 1, 0), (1, 0, 1), (1, 1, 1))]),
        2_400,
    ),
    "two_shot_push, 2 ranks": (two_shot(2, [2] * 4), 500),
    "two_shot_push, 2 ranks, other sizes": (two_shot(2, [2, 1, 2, 1]), 300),
    "two_shot_push, 3 ranks": (two_shot(3, [3] * 3), 49_000),
    "two_shot_push, 3 ranks, other sizes": (two_shot(3, [3, 1, 2, 1]), 17_000),
}


@pytest.mark.promise("The protocols hold in every order of stores at 2 and 3 ranks, and when a rank dies.")
@pytest.mark.parametrize("name", HOLD)
def test_every_pack_is_taken_whole_and_once(name):
    threads, states = HOLD[name]
    assert_holds(Machine(threads), states)


def of_packs(fault: str) -> Machine:
    return Machine(one_hop(2, [one_shot(2, 1)] * 4, 2, fault))


def of_two_packs(fault: str) -> Machine:
    return Machine(one_hop(2, [one_shot(2, 2)] * 4, 1, fault))


def of_grids(fault: str) -> Machine:
    return Machine(one_hop(2, [one_shot(2, 2, blocks) for blocks in (2, 1, 2, 1)], 1, fault))


def of_parts(fault: str) -> Machine:
    return Machine(one_hop(2, [allgather((1, 1))] * 4, 2, fault))


def of_two_shots(fault: str) -> Machine:
    return Machine(two_shot(2, [2] * 4, fault))


FAULTS = [
    ("one slot", of_packs, "overwrites"),
    ("one slot", of_parts, "overwrites"),
    ("one slot in the scatter phase", of_two_shots, "overwrites"),
    ("both phases in one slot", of_two_shots, "is read where"),
    ("takes from the other slot", of_packs, "stuck"),
    ("looks at one word of a pack", of_packs, "'not yet' is read"),
    ("looks at one word of a pack", of_parts, "'not yet' is read"),
    ("not armed again", of_packs, "is read where"),
    ("not armed again", of_parts, "is read where"),
    ("arms its first pack alone", of_two_packs, "is read where"),
    ("scatter slots not armed again", of_two_shots, "is read where"),
    ("gather slots not armed again", of_two_shots, "is read where"),
    ("armed in the next call", of_packs, "'not yet' overwrites"),
    ("armed in the next call", of_parts, "'not yet' overwrites"),
    ("epoch not advanced", of_packs, "overwrites"),
    ("a block advances its own epoch alone", of_grids, "overwrites"),
    ("a kernel does not wait for the one before", of_grids, "is read where"),
]


@pytest.mark.parametrize(("fault", "model", "symptom"), FAULTS)
def test_a_fault_is_seen(fault, model, symptom):
    assert_caught(model(fault), symptom)


@pytest.mark.parametrize("calls", [[reducescatter((1, 0), least=0)] * 4, [allgather((1, 0), least=0)] * 4])
def test_an_empty_part_that_sends_nothing_is_seen(calls):
    assert_caught(Machine(one_hop(2, calls)), "overwrites")


def test_one_slot_would_do_for_gathering():
    """A sum needs a pack that each rank sends after its previous call has ended, and thus has armed the slot."""
    assert_holds(Machine(two_shot(3, [3, 1, 2], "one slot in the gather phase")), 10_000)

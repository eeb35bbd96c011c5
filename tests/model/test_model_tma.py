"""The channels of two_shot_tma: one of each rank, with fewer places in the scratch than the kernel's three."""

import pytest

from tests.model.explore import assert_caught, assert_holds
from tests.model.machine import Machine
from tests.model.tma import channels

# Threads, and how many states there are at least.
HOLD = {
    "2 ranks, 2 places": (channels(2, [3, 1]), 50_000),
    "2 ranks, 2 places, 3 calls": (channels(2, [1, 2, 1]), 12_000),
    "2 ranks, 1 place, 3 calls": (channels(2, [2, 1, 1], depth=1), 1_700),
    "3 ranks, 2 places, 3 calls": (channels(3, [1, 1, 1]), 20_000),
    "3 ranks, 1 place": (channels(3, [2, 1], depth=1), 23_000),
}


@pytest.mark.promise("The protocols hold in every order of stores at 2 and 3 ranks, and when a rank dies.")
@pytest.mark.parametrize("name", HOLD)
def test_every_chunk_is_read_whole_and_once(name):
    threads, states = HOLD[name]
    assert_holds(Machine(threads), states)


FAULTS = [
    ("flags are relaxed stores", 1, "'not yet' is read"),
    ("scatter does not wait", 1, "overwrites"),
    ("scatter waits for the chunk before", 1, "overwrites"),
    ("signals before its copies are done", 1, "'not yet' is read"),
    ("loads before its copies are done", 1, "a copy finds"),
    ("reduce does not wait for push", 2, "a copy finds"),
    ("push does not wait for reduce", 1, "a copy finds"),
    ("gather arrives before it reads", 1, "overwrites"),
    ("one mbarrier for all gathering", 2, "stuck"),
    ("both phases in one slot", 1, "overwrites"),
    ("both phases in one row", 1, "is read where"),
    ("chunks are not counted on", 1, "is read where"),
]


@pytest.mark.parametrize(("fault", "depth", "symptom"), FAULTS)
def test_a_fault_is_seen(fault, depth, symptom):
    assert_caught(Machine(channels(2, [depth + 1, 1], fault, depth)), symptom)

"""Waits that expire at any moment, and a rank that dies at any moment: nobody waits for ever, or takes wrong data."""

import pytest

from tests.model import signals
from tests.model.explore import assert_caught, assert_holds
from tests.model.machine import Machine
from tests.model.sentinel import allgather, one_hop, one_shot, reducescatter, two_shot
from tests.model.tma import channels

Call = signals.Call
# Threads of a protocol at some number of ranks, with a fault or none. They make several calls, to reuse places.
PROTOCOLS = {
    "one_shot_push": lambda fault="", ranks=2, calls=4: one_hop(ranks, [one_shot(ranks, 1)] * calls, 1, fault),
    "reducescatter_push": lambda fault="", ranks=2, calls=4: one_hop(
        ranks, [reducescatter([1] + [0] * (ranks - 1))] * calls, 1, fault
    ),
    "allgather_flagged": lambda fault="", ranks=2, calls=4: one_hop(ranks, [allgather([1] * ranks)] * calls, 1, fault),
    "two_shot_push": lambda fault="", ranks=2, calls=4: two_shot(ranks, [2] * calls, fault),
    "two_shot_pipelined": lambda fault="", ranks=2, calls=3: signals.pipelined(ranks, [Call(1)] * calls, fault),
    "allgather_push": lambda fault="", ranks=2, calls=5: signals.allgather([[1] * ranks] * calls, fault),
    "one_shot": lambda fault="", ranks=2, calls=4: signals.pull(ranks, [Call(1)] * calls, fault),
    "two_shot_tma": lambda fault="", ranks=2, calls=3: channels(ranks, [1] * calls, fault, depth=1),
}
AT_LEAST = {  # by ranks and calls, how many states
    ("one_shot_push", 2, 4): 3_700,
    ("one_shot_push", 3, 2): 89_000,
    ("reducescatter_push", 2, 4): 3_700,
    ("allgather_flagged", 2, 4): 1_000,
    ("allgather_flagged", 3, 3): 50_000,
    ("two_shot_push", 2, 4): 12_000,
    ("two_shot_push", 3, 1): 26_000,
    ("two_shot_pipelined", 2, 3): 2_300,
    ("two_shot_pipelined", 3, 2): 105_000,
    ("allgather_push", 2, 5): 2_200,
    ("allgather_push", 3, 3): 59_000,
    ("one_shot", 2, 4): 1_400,
    ("one_shot", 3, 3): 62_000,
    ("two_shot_tma", 2, 3): 28_000,
}


@pytest.mark.promise("The protocols hold in every order of stores at 2 and 3 ranks, and when a rank dies.")
@pytest.mark.parametrize(("protocol", "ranks", "calls"), AT_LEAST)
def test_nobody_waits_for_ever_or_takes_wrong_data_though_a_rank_dies(protocol, ranks, calls):
    threads = PROTOCOLS[protocol](ranks=ranks, calls=calls)
    assert_holds(Machine(threads, deadlines=True, dies=0), AT_LEAST[protocol, ranks, calls], one_end=False)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_wait_without_a_deadline_is_seen(protocol):
    assert_caught(Machine(PROTOCOLS[protocol]("waits without a deadline"), deadlines=True, dies=0), "stuck")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_rank_that_goes_on_sending_after_a_wait_has_expired_is_seen(protocol):
    assert_caught(Machine(PROTOCOLS[protocol]("sends after a wait has expired"), deadlines=True), "overwrites")


def test_a_warp_that_does_not_look_whether_a_wait_has_expired_is_seen():
    fault = "warps do not look whether a wait has expired"
    assert_caught(Machine(channels(2, [2], fault, depth=1), deadlines=True), "stuck")

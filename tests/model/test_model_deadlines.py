"""Waits that expire at any moment, and a rank that dies at any moment: nobody waits for ever, or takes wrong data."""

from __future__ import annotations

import pytest

from tests.model import signals
from tests.model.explore import assert_caught, assert_holds
from tests.model.machine import Machine
from tests.model.sentinel import allgather, one_hop, one_shot, reducescatter, two_shot
from tests.model.tma import channels

# Threads of 2 and of 3 ranks with a fault or none, and how many states there are at least.
PROTOCOLS = {
    "one_shot_push": lambda ranks, fault: one_hop(ranks, [one_shot(ranks, 1)] * (6 - ranks), 1, fault),
    "reducescatter_push": lambda ranks, fault: one_hop(ranks, [reducescatter([1] + [0] * (ranks - 1))] * 3, 1, fault),
    "allgather_flagged": lambda ranks, fault: one_hop(ranks, [allgather([1] * ranks)] * 3, 1, fault),
    "two_shot_push": lambda ranks, fault: two_shot(ranks, [2] * (6 - ranks), fault),
    "two_shot_pipelined": lambda ranks, fault: signals.pipelined(ranks, [signals.Call(1)] * 2, fault),
    "allgather_push": lambda ranks, fault: signals.allgather([[1] * ranks] * 3, fault),
    "one_shot": lambda ranks, fault: signals.pull(ranks, [signals.Call(1)] * 4, fault),
    "two_shot_tma": lambda ranks, fault: channels(ranks, [1] * (4 - ranks), fault, depth=1),
}

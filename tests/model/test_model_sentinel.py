from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.model import programs as do
from tests.model.explore import explore
from tests.model.machine import Machine


@dataclass(frozen=True)
class Call:
    packs: int
    blocks: int = 1


def epochs(calls, blocks: int, mutant: str) -> list[list[int]]:
    """By call and block, what a block finds in its counter (advance_epoch in device/call.cuh)."""
    counters, found = [0] * blocks, []
    for call in calls:
        found.append(list(counters))
        if mutant == "epoch not advanced":
            continue
        for i in range(call.blocks if mutant == "each block advances its own epoch alone" else blocks):
            counters[i] = counters[i % call.blocks] + 1
    return found


def one_shot(ranks: int, calls, words: int, mutant: str = ""):
    most = max(call.blocks for call in calls)
    epoch = epochs(calls, most, mutant)

    def slot(on, e, source, i, w):
        parity = 0 if mutant == "one slot" else e % 2
        return (on, "slot", parity, "from", source, "pack", i, "word", w)

    def program(rank, block) -> Iterator:
        for c, call in enumerate(calls):
            yield do.Begin(c)
            if block >= call.blocks:
                continue
            e = epoch[c][block]
            mine = range(block, call.packs, call.blocks)
            data = lambda source, i, w: f"pack {i}.{w} of rank {source}, call {c}"
            for i in mine:
                for hop in range(1, ranks + 1):
                    for w in range(words):
                        yield do.Store(slot((rank + hop) % ranks, e, rank, i, w), data(rank, i, w))
            for i in mine:
                each = [(r, w) for r in range(ranks) for w in range(words)]
                at = tuple(slot(rank, e + (mutant == "receiver takes the other slot"), r, i, w) for r, w in each)
                polled = tuple(one for one, (r, w) in zip(at, each) if w == 0) if mutant == "one word checked" else at
                yield do.Read(at, tuple(data(r, i, w) for r, w in each), polled)
                if mutant == "no re-arm": continue
                for one in at:
                    yield do.Store(one, do.NOT_YET)

    return [do.Thread(f"rank {r} block {b}", r, tuple(program(r, b))) for r in range(ranks) for b in range(most)]

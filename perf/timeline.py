"""When which warp of one op did what, where one kernel multiplies and sums tiles: recordings of `perf fused`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphar.matmul.timelines import CONSUMER_TRACKS, PHASES, TRACKS

BLOCKS = 8  # whose events are kept
DRAWN = ("consumer 0", "consumer 1", "sender 0", "gatherer 0")  # warps that a report keeps
CONSUMER, SENDER, LOADER, GATHERER = "consumer", "sender", "loader", "gatherer"


class Event(NamedTuple):
    """Times are from the beginning of the op's first product on the rank; phases as in device/matmul/timeline.cuh."""

    begin_us: float
    duration_us: float
    phase: str


@dataclass(frozen=True)
class Lane:
    """What one warp of a block did, or the first warp of a consumer.

    Attributes:
        warp: its kind, and which one of these it is in its block.
        events: one after another.
    """

    block: int
    warp: str
    events: list[Event]


@dataclass(frozen=True)
class Mean:
    """How long warps of a kind spend in a phase: the mean over all of them.

    Attributes:
        warp: "consumer", "sender", "loader" (whose loading is not told) or "gatherer".
        phase: one of those that the kind is ever in.
    """

    warp: str
    phase: str
    time_us: float


@dataclass(frozen=True)
class Timeline:
    """One op of a layer on the first rank, the last of some in a row, recorded as it ran.

    Attributes:
        total_us: from the beginning of the first product to the end of the last event, on any SM.
        means: over all SMs, each of which has one block.
        lanes: of BLOCKS blocks, or all, evenly spread; those of DRAWN warps.
        tile: what a block computed at a time, of graphar/plan/tiles.py.
        wrong: elements of its result that differ from what the op promises, over all ranks.
    """

    world_size: int
    m: int
    n: int
    k: int
    tile: str
    total_us: float
    means: list[Mean]
    lanes: list[Lane]
    wrong: int


def decode(recorded: Tensor, consumers: int) -> tuple[float, list[Mean], list[Lane]]:
    """total_us, means and lanes of Timeline.

    Args:
        recorded: of graphar/matmul/timelines.py, on the CPU. Blocks that never multiplied did not run.
        consumers: of a block, one or two.
    """
    begin, end, phase = recorded[..., 0], recorded[..., 0] + (recorded[..., 1] & 0xFFFFFFFF), recorded[..., 1] >> 32
    multiplied = phase == 1 + PHASES.index("multiplying")
    first = begin[multiplied].min()
    begin, end = (times.clamp(min=first) - first for times in (begin, end))  # a warp may have waited before
    phase = torch.where(end > begin, phase, 0)
    times_us = (begin.double() / 1e3, (end - begin).double() / 1e3, phase)
    blocks = multiplied.flatten(1).any(1).nonzero().flatten().tolist()
    warps = warps_of_tracks(consumers)
    spread = [blocks[at * len(blocks) // BLOCKS] for at in range(BLOCKS)] if len(blocks) > BLOCKS else blocks
    lanes = [Lane(block, warp, _events(times_us, block, track)) for block in spread for track, warp in warps.items()]
    return end[phase > 0].max().item() / 1e3, _means(times_us, blocks, warps), lanes


def warps_of_tracks(consumers: int) -> dict[int, str]:
    """By track, the names of a block's warps, in the order of timeline.cuh."""
    names = {at: f"{CONSUMER} {at}" for at in range(consumers)}
    helpers = [f"{SENDER} {at}" for at in range(consumers)] + [f"{LOADER} 0"]
    helpers += [f"{GATHERER} {at}" for at in range(TRACKS - CONSUMER_TRACKS - len(helpers))]
    return names | dict(enumerate(helpers, CONSUMER_TRACKS))


def _events(times_us: tuple[Tensor, Tensor, Tensor], block: int, track: int) -> list[Event]:
    begin, duration, phase = (one[block, track].tolist() for one in times_us)
    found = zip(begin, duration, phase, strict=True)
    return [Event(round(at, 3), round(long, 3), PHASES[which - 1]) for at, long, which in found if which]


def _means(times_us: tuple[Tensor, Tensor, Tensor], blocks: Sequence[int], warps: dict[int, str]) -> list[Mean]:
    _, duration, phase = (one[blocks] for one in times_us)
    means = []
    for kind, tracks in itertools.groupby(warps, key=lambda track: warps[track].split()[0]):
        mine = list(tracks)
        for number, name in enumerate(PHASES, 1):
            spent = torch.where(phase[:, mine] == number, duration[:, mine], 0.0).sum().item()
            if spent:
                means.append(Mean(kind, name, round(spent / (len(blocks) * len(mine)), 3)))
    return means

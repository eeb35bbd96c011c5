"""Timelines of the warps of a fused matmul kernel, recorded by `perf fused`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphar.product.timelines import CONSUMER_TRACKS, PHASES, TRACKS

BLOCKS = 8  # the number of thread blocks in a report
DRAWN = ("consumer 0", "consumer 1", "sender 0", "gatherer 0")  # the warps in a report
CONSUMER, SENDER, LOADER, GATHERER = "consumer", "sender", "loader", "gatherer"


class Event(NamedTuple):
    """A phase of device/matmul/timeline.cuh. Time 0 is the beginning of the first product on the rank."""

    begin_us: float
    duration_us: float
    phase: str


@dataclass(frozen=True)
class Lane:
    """The events of one warp of a block. A consumer warpgroup is represented by its first warp.

    Attributes:
        warp: the kind of warp, and its index among the block's warps of this kind.
    """

    block: int
    warp: str
    events: list[Event]


@dataclass(frozen=True)
class Mean:
    """The mean time that one kind of warp spends in a phase.

    Attributes:
        warp: "consumer", "sender", "loader" (whose loads are not recorded) or "gatherer".
    """

    warp: str
    phase: str
    time_us: float


@dataclass(frozen=True)
class Timeline:
    """The timeline of one call on the first rank. It is the last of several consecutive calls.

    Attributes:
        total_us: the time from the beginning of the first product to the end of the last event, over all SMs.
        means: means over all SMs. Each SM has one block.
        lanes: the lanes of DRAWN warps, in at most BLOCKS evenly spaced blocks.
        tile: the shape of the tiles, as in graphar/plan/tiles.py.
        wrong: the number of wrong elements of the result, summed over all ranks.
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
    """Returns total_us, means and lanes of a Timeline.

    Args:
        recorded: a timeline of graphar/product/timelines.py, on the CPU. Blocks without a product did not run.
        consumers: the number of consumer warpgroups of a block, 1 or 2.
    """
    begin, end, phase = recorded[..., 0], recorded[..., 0] + (recorded[..., 1] & 0xFFFFFFFF), recorded[..., 1] >> 32
    multiplied = phase == 1 + PHASES.index("multiplying")
    first = begin[multiplied].min()
    # A warp may begin to wait before the first product.
    begin, end = (times.clamp(min=first) - first for times in (begin, end))
    phase = torch.where(end > begin, phase, 0)
    times_us = (begin.double() / 1e3, (end - begin).double() / 1e3, phase)
    blocks = multiplied.flatten(1).any(1).nonzero().flatten().tolist()
    warps = warps_of_tracks(consumers)
    spread = [blocks[at * len(blocks) // BLOCKS] for at in range(BLOCKS)] if len(blocks) > BLOCKS else blocks
    lanes = [Lane(block, warp, _events(times_us, block, track)) for block in spread for track, warp in warps.items()]
    return end[phase > 0].max().item() / 1e3, _means(times_us, blocks, warps), lanes


def warps_of_tracks(consumers: int) -> dict[int, str]:
    """Returns the names of a block's warps by track, in the order of timeline.cuh."""
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

"""When which warp of one op did what, where one kernel multiplies and sums tiles."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from graphar.matmul import fused, timelines
from graphar.matmul.fused import FusedMatmuls
from graphar.matmul.operands import Operands
from graphar.matmul.timelines import CONSUMER_TRACKS, PHASES, TRACKS
from graphar.plan.algorithms import Algorithm
from graphar.plan.matmuls import owned_rows, tile_for
from graphar.plan.slices import rows_a_launch
from graphar.plan.tiles import MatmulTile
from graphar.runtime.registry import engine_of_group
from perf.fused.cases import Layer, Plan
from perf.fused.methods import MIN_ROWS, TILES, Way, product_of_tiles
from perf.fused.trial import Trial, count_wrong
from perf.ranks import Ranks, agreed

MOST_ROWS = 4096
BLOCKS = 8  # whose events are kept
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
        lanes: of BLOCKS blocks, or all, evenly spread.
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

    @classmethod
    def from_json(cls, content: dict) -> Timeline:
        lanes = [Lane(**lane | {"events": [Event(*event) for event in lane["events"]]}) for lane in content["lanes"]]
        return cls(**content | {"means": [Mean(**mean) for mean in content["means"]], "lanes": lanes})


def layers(plan: Plan) -> list[Layer]:
    """Those whose op is recorded: of each K the one with most rows, up to MOST_ROWS, that one launch has in tiles."""
    if plan.device != "cuda":
        return []
    able = [layer for layer in plan.layers() if MIN_ROWS <= layer.m <= MOST_ROWS and _is_one_launch(layer)]
    by_k = itertools.groupby(able, key=lambda layer: layer.k)
    return [max(mine, key=lambda layer: layer.m) for _, mine in by_k]


def _is_one_launch(layer: Layer) -> bool:
    return max(owned_rows(layer.m, layer.world_size)) <= rows_a_launch(layer.world_size, layer.n)


class Recorder:
    """graphar's op in tiles. As many calls as a graph holds each have a timeline of their own."""

    def __init__(self, layer: Layer, ranks: Ranks) -> None:
        self.counts = tuple(owned_rows(layer.m, layer.world_size))
        blocks = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        self.timelines = [timelines.empty(blocks, ranks.device) for _ in range(layer.iterations)]
        self.calls = 0
        self.tile: MatmulTile | None = None  # known once it was called

    def __call__(self, a: Tensor, w: Tensor) -> Tensor:
        engine, algorithm = engine_of_group(""), Algorithm.MATMUL_ALLREDUCE
        out = a.new_empty(len(a), len(w))
        mine = self.timelines[self.calls % len(self.timelines)]
        fused.run(engine, algorithm, [Operands(a, w, None, out)], self.counts, timelines=[mine])
        tiles = engine.attached(FusedMatmuls).tiles(algorithm, self.counts, len(a), len(w))
        self.tile = tile_for(engine.table.matmul, tiles, a.shape[1])
        self.calls += 1
        return out

    @property
    def last(self) -> Tensor:
        """The last call's."""
        return self.timelines[(self.calls - 1) % len(self.timelines)]


def record(layer: Layer, ranks: Ranks) -> Timeline | str:
    """A timeline of the layer, or why there is none. Collective."""
    recorder = Recorder(layer, ranks)
    way = Way(TILES, recorder, exact=True, product=product_of_tiles)
    trial = Trial(way, layer, *layer.operands(ranks.rank, ranks.device))
    ranks.level()
    launch, reason = agreed(ranks, trial.make_launch)
    if reason:
        return f"timeline, {layer}: {reason}"
    launch()
    ranks.level()
    for each in recorder.timelines:
        each.zero_()  # warps that share their work have more events at one time than at another
    (wrong,) = ranks.total([count_wrong(trial, launch, ranks)])
    recorded = recorder.last.cpu()
    if recorded[:, :, -1].any():
        return f"timeline, {layer}: it has more events than there is room for"
    found = decode(recorded, recorder.tile.consumers)
    return Timeline(layer.world_size, layer.m, layer.n, layer.k, str(recorder.tile), *found, wrong)


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

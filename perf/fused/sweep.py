"""Times and verifies every way on every layer, by the ranks of one world."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from perf import world
from perf.fused import timeline
from perf.fused.cases import Layer, Plan
from perf.fused.methods import TILES, Way, make_ways
from perf.fused.timeline import Timeline
from perf.fused.trial import Trial, count_wrong
from perf.ranks import Ranks, agreed
from perf.rows import summarise


@dataclass(frozen=True)
class FusedRow:
    """One measured and verified figure.

    Attributes:
        time_us: median, p10 and p99 over the repeats, each the slowest rank's time of one operation.
        wrong: elements that differ from what the method promises, over all ranks.
    """

    method: str
    world_size: int
    m: int
    n: int
    k: int
    time_us: dict[str, float]
    wrong: int

    @property
    def median(self) -> float:
        return self.time_us["median"]


def run(plan: Plan) -> Iterator[FusedRow | Timeline | str]:
    """The plan's rows as they are measured, and timelines; a string says what was not measured, and why."""
    yield from world.run(plan.world_size, partial(run_rank, plan))


def run_rank(plan: Plan, rank: int, port: int) -> Iterator[FusedRow | Timeline | str]:
    ranks = world.join(rank, plan.world_size, plan.device, port)
    ways, skipped = make_ways(plan, ranks)
    yield from skipped
    ranks.warm_up()
    recorded = timeline.layers(plan) if TILES in plan.methods else ()
    for layer in plan.layers():
        yield from measure(layer, [way for way in ways if way.serves(layer)], ranks)
        if layer in recorded:
            yield timeline.record(layer, ranks)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # a graph's memory went back to torch's pool, where the next size cannot use it
    ranks.level()


def measure(layer: Layer, ways: list[Way], ranks: Ranks) -> Iterator[FusedRow | str]:
    """The rows of every way that can, and why others cannot. Collective."""
    a, w = layer.operands(ranks.rank, ranks.device)
    ready = []
    for way in ways:
        trial = Trial(way, layer, a, w)
        ranks.level()
        launch, reason = agreed(ranks, trial.make_launch)
        if reason:
            yield f"{way.name}, {layer}: {reason}"
        else:
            ready.append((trial, launch))
    if not ready:
        return
    times_us = ranks.slowest(_time_in_turn(ready, layer, ranks))
    wrong = ranks.total([count_wrong(trial, launch, ranks) for trial, launch in ready])
    for (trial, _), times, bad in zip(ready, times_us, wrong, strict=True):
        sizes = (layer.world_size, layer.m, layer.n, layer.k)
        yield FusedRow(trial.way.name, *sizes, summarise(times), bad)


def _time_in_turn(ready: list, layer: Layer, ranks: Ranks) -> list[list[float]]:
    """Microseconds an operation, by trial and repeat. The trials take turns, so that a drifting clock meets all."""
    on_gpu = ranks.device.type == "cuda"
    times: list[list[float]] = [[] for _ in ready]
    for repeat in range(-1, layer.repeats):  # the first turn warms up: it uploads the graphs
        for (_, launch), of_trial in zip(ready, times, strict=True):
            time_us = ranks.time_us(launch, "graph" if on_gpu else "cpu") / (layer.iterations if on_gpu else 1)
            if repeat >= 0:
                of_trial.append(time_us)
    return times

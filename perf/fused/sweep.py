"""Times and verifies every way on every layer, by the ranks of one world."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from perf import verify, world
from perf.fused.cases import Layer, Plan
from perf.fused.methods import Way, make_ways
from perf.ranks import Ranks, agreed
from perf.rows import summarise

WARM_UP = 3
ROUNDED_SHARE = 2.0**-13  # of the largest sum of magnitudes: what products may differ by where nothing is left of them


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


def run(plan: Plan) -> Iterator[FusedRow | str]:
    """The plan's rows as they are measured; a string says what was not measured, and why."""
    yield from world.run(plan.world_size, partial(run_rank, plan))


def run_rank(plan: Plan, rank: int, port: int) -> Iterator[FusedRow | str]:
    ranks = world.join(rank, plan.world_size, plan.device, port)
    ways, skipped = make_ways(plan, ranks)
    yield from skipped
    ranks.warm_up()
    for layer in plan.layers():
        yield from measure(layer, [way for way in ways if way.serves(layer)], ranks)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # a graph's memory went back to torch's pool, where the next size cannot use it
    ranks.level()


class Trial:
    """One way on one layer's data; ``result`` is what its last call returned."""

    def __init__(self, way: Way, layer: Layer, a: Tensor, w: Tensor) -> None:
        self.way, self.layer, self.a, self.w = way, layer, a, w
        self.result: Tensor | None = None

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.result = self.way.call(self.a, self.w)

    def make_launch(self) -> Callable[[], None]:
        self.run(WARM_UP)
        if not self.a.is_cuda:
            return partial(self.run, 1)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run(self.layer.iterations)
        return graph.replay


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
    times_us = ranks.slowest(_time_in_turn(ready, layer, ranks))
    wrong = ranks.total([_count_wrong(trial, launch, ranks) for trial, launch in ready])
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


def _count_wrong(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> int:
    """Wrong elements on this process of what the timed launch computes."""
    trial.result.fill_(torch.nan)
    launch()
    ranks.level()
    product, result = trial.way.product(trial.a, trial.w).view(-1), trial.result.view(-1)
    if not trial.way.summed:
        return int(_is_far(result, product, [product]).sum())
    wrong = 0
    for window in verify.windows(product.numel()):
        parts = ranks.gather(product, window)
        expected = verify.reference(parts, 1, trial.way.codec)
        found = result[window]
        bad = verify.differs(found, expected) if trial.way.exact else _is_far(found, expected, parts)
        wrong += int(bad.sum())
    return wrong


def _is_far(result: Tensor, expected: Tensor, parts: list[Tensor]) -> Tensor:
    magnitude = sum(part.float().abs() for part in parts)
    bound = magnitude * verify.tolerance(result.dtype) + magnitude.max() * ROUNDED_SHARE
    return ~((result.float() - expected.float()).abs() <= bound)

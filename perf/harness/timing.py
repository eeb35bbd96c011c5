"""Times several methods in turn, and computes percentiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy
import torch

from perf.report import Deciles, Spread

WARM_UP = 3  # calls before anything is captured or timed


class Repeated:
    """A call that is made again and again.

    Args:
        calls: how many calls a timed launch makes. On a GPU the launch replays a graph of them.

    Attributes:
        result: what the last call returned.
    """

    result: Any

    def __init__(self, call: Callable[[], object], calls: int, on_gpu: bool) -> None:
        self._make, self._calls, self._on_gpu = call, calls, on_gpu

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self.result = self._make()

    def make_launch(self) -> Callable[[], None]:
        self.run(WARM_UP)
        repeat = partial(self.run, self._calls)
        return capture(repeat) if self._on_gpu else repeat


def capture(run: Callable[[], object], stream: torch.cuda.Stream | None = None) -> Callable[[], None]:
    """Captures ``run`` in a CUDA graph and returns its replay. Call ``run`` at least once before.

    The caller must keep the operands alive. ``stream`` is the stream that is captured; None: one of torch's own.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    return graph.replay


def time_in_turn(
    launches: Sequence[Callable[[], None]],
    repeats: int,
    time_us: Callable[[Callable[[], None]], float],
    prepare: Sequence[Callable[[], None]] = (),
) -> list[list[float]]:
    """Returns this rank's times by launch and repeat. Launches alternate, so that clock drift affects all of them.

    Collective.

    Args:
        time_us: times one launch.
        prepare: for each launch, a function to run before it, for example to restore its input.
    """
    times: list[list[float]] = [[] for _ in launches]
    for repeat in range(-1, repeats):  # repeat -1 is a warm-up that uploads the graphs
        for at, launch in enumerate(launches):
            if prepare:
                prepare[at]()
            spent_us = time_us(launch)
            if repeat >= 0:
                times[at].append(spent_us)
    return times


def spread(times_us: Sequence[float]) -> Spread:
    """Returns the median, the 10th and the 99th percentile."""
    p10, median, p99 = numpy.percentile(times_us, (10, 50, 99)).tolist()
    return {"median": median, "p10": p10, "p99": p99}


def deciles(times_us: Sequence[float]) -> Deciles:
    """Returns the median, the 10th and the 90th percentile."""
    p10, median, p90 = numpy.percentile(times_us, (10, 50, 90)).tolist()
    return {"median": median, "p10": p10, "p90": p90}

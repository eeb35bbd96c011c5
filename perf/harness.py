"""Times and verifies every method on one case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from perf.cases import Case, Row, format_nbytes, make_row
from perf.methods import Method
from perf.ranks import Data, Ranks, tensors
from perf.verify import count_wrong

WARM_UP = 3

# An in-place all-reduce of random data makes it about world_size times as large, so k of them in a row would overflow.
# From 2^-60, 50 on 8 ranks end near 2^90. float16 has no room for that: there the last ones add infinities.
IN_PLACE_SCALE = 2.0**-60


class Trial:
    """One method on one case's data.

    Attributes:
        x: what the method is called with.
        result: what its last call returned.
    """

    def __init__(self, method: Method, data: Data, shrunk: Data) -> None:
        self.method = method
        self.x = input_like(method, data)
        self.result: Data | None = None
        self._source = shrunk if method.in_place else data

    def refill(self) -> None:
        """Undo what in-place calls, or another method that shares the symmetric buffer, did to the input."""
        if self.x is not self._source:
            self.x.copy_(self._source)

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.result = self.method.call(self.x)

    def final_result(self, launch: Callable[[], None], data: Data) -> Data:
        """What the timed launch computes, or, in place, what one call makes of the data at full scale."""
        if self.method.in_place:
            self.x.copy_(data)
            self.run(1)
        else:
            for tensor in tensors(self.result):
                tensor.fill_(torch.nan)
            self.refill()
            launch()
        return self.result


def input_like(method: Method, data: Data) -> Data:
    if method.buffer is not None:
        return method.buffer[: data.numel()]
    return data.clone() if method.in_place else data


def measure(case: Case, methods: Sequence[Method], ranks: Ranks) -> tuple[list[Row], list[str]]:
    """The rows of every method that serves the case, and why others do not. Collective."""
    data = ranks.random(case)
    shrunk = data * IN_PLACE_SCALE if isinstance(data, Tensor) else data
    candidates = [Trial(method, data, shrunk) for method in methods if method.serves(case.nbytes)]
    if not candidates:
        return [], []
    trials, skipped = warm_up(candidates, case, ranks)
    if not trials:
        return [], skipped
    launches = [make_launch(trial, case, ranks) for trial in trials]
    times_us = ranks.slowest(time_in_turn(trials, launches, case, ranks))
    wrong = []
    for trial, launch in zip(trials, launches, strict=True):
        result = trial.final_result(launch, data)
        ranks.level()
        wrong.append(count_wrong(data, result, trial.method.exact, ranks))
    rows = [
        make_row(case, trial.method.name, algorithm(trial), times, bad)
        for trial, times, bad in zip(trials, times_us, ranks.total(wrong), strict=True)
    ]
    return rows, skipped


def algorithm(trial: Trial) -> str | None:
    return trial.method.algorithm(trial.x) if trial.method.algorithm else None


def warm_up(candidates: list[Trial], case: Case, ranks: Ranks) -> tuple[list[Trial], list[str]]:
    """The trials whose method can serve the case, and what the others say. Only a peer may refuse."""
    trials, skipped = [], []
    for trial in candidates:
        refusal = ""
        try:
            trial.refill()
            trial.run(WARM_UP)
        except RuntimeError as error:
            if trial.method.exact:
                raise
            refusal = str(error).splitlines()[0]
        if sum(ranks.total([int(bool(refusal))])):
            size = format_nbytes(case.nbytes)
            reason = refusal or "refused on another rank"
            skipped.append(f"{trial.method.name}, {case.world_size} ranks, {size}, {case.mode}: {reason}")
        else:
            trials.append(trial)
    ranks.level()
    return trials, skipped


def make_launch(trial: Trial, case: Case, ranks: Ranks) -> Callable[[], None]:
    """What one timed repeat runs: all the case's iterations."""
    if case.mode != "graph":
        return partial(trial.run, case.iterations)
    trial.refill()
    ranks.level()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trial.run(case.iterations)
    ranks.level()
    return graph.replay


def time_in_turn(
    trials: list[Trial], launches: list[Callable[[], None]], case: Case, ranks: Ranks
) -> list[list[float]]:
    """Microseconds an operation, by trial and repeat. The trials take turns, so that a drifting clock meets all."""
    times: list[list[float]] = [[] for _ in trials]
    for repeat in range(-1, case.repeats):  # the first turn warms up: it uploads the graphs
        for trial, launch, of_trial in zip(trials, launches, times, strict=True):
            trial.refill()
            time_us = ranks.time_us(launch, case.mode) / case.iterations
            if repeat >= 0:
                of_trial.append(time_us)
    return times

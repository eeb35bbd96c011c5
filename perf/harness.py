"""Times and verifies every method on one case."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from graphar.plan.sizes import format_nbytes
from perf import traffic
from perf.cases import Case
from perf.graphs import capture
from perf.methods import Method
from perf.nvlink import Counters
from perf.ranks import Data, Ranks, agreed, tensors
from perf.rows import Row, make_row
from perf.verify import count_wrong

T = TypeVar("T")

WARM_UP = 3
GRAPH_MODES = ("graph", "chain")

# An all-reduce whose result is the next one's input makes random data about world_size times as large, so many in a row
# would overflow. From 2^-30, 50 on 8 ranks end near 2^121, and nothing is so small that an FP8 codec drops it. float16
# has no room for that: from its smallest normal number, 15 on 4 ranks reach infinity, and the others add infinities.
START_SCALES = {torch.bfloat16: 2.0**-30, torch.float32: 2.0**-30, torch.float16: 2.0**-14}

CHECKED_STEPS = 2  # one each way between a pair of symmetric tensors


class Trial:
    """One method on one case's data.

    Attributes:
        x: what the method is called with.
        result: what its last call returned.
    """

    def __init__(self, method: Method, case: Case, data: Data, shrunk: Data) -> None:
        self.method = method
        self.result: Data | None = None
        self._case, self._data = case, data
        self._is_chain = case.mode == "chain"
        self._source = shrunk if method.in_place or self._is_chain else data
        self.x = input_like(method, self._source)

    def refill(self) -> None:
        """Undo what in-place calls, or another method that shares the symmetric buffer, did to the input."""
        if self.x is not self._source:
            self.x.copy_(self._source)

    def run(self, iterations: int, x: Data | None = None) -> None:
        x = self.x if x is None else x
        for _ in range(iterations):
            self.result = self.method.call(x)
            if self._is_chain:
                x = self.result

    def count_wrong(self, launch: Callable[[], None], ranks: Ranks) -> int:
        """Wrong elements on this process of what the timed launch computes.

        A method that rounds at every hop cannot be held closely to what many calls in a row amount to. Where it was
        timed so, it answers besides for one call on the data at full scale, or, in a chain, for two.
        """
        in_a_row = self.method.in_place or self._is_chain
        for tensor in tensors(self.result):
            tensor.fill_(torch.nan)
        self.refill()
        launch()
        ranks.level()
        steps = self._case.iterations if in_a_row else 1
        wrong = count_wrong(self._source, self.result, ranks, self.method, steps)
        if not in_a_row or self.method.exact:
            return wrong
        steps = CHECKED_STEPS if self._is_chain else 1
        self._run_at_full_scale(steps)
        ranks.level()
        return max(wrong, count_wrong(self._data, self.result, ranks, self.method, steps))

    def _run_at_full_scale(self, iterations: int) -> None:
        if self.x is self._source:
            self.run(iterations, self._data)
        else:
            self.x.copy_(self._data)
            self.run(iterations)


def input_like(method: Method, source: Data) -> Data:
    if method.buffer is not None:
        return method.buffer[: source.numel()]
    return source.clone() if method.in_place else source


def measure(
    case: Case, methods: Sequence[Method], ranks: Ranks, counters: Counters | None = None
) -> tuple[list[Row], list[str]]:
    """The rows of every method that serves the case, and why others do not. Collective.

    Args:
        counters: this rank's, to count large operations with; on every rank or on none.
    """
    data = ranks.random(case)
    shrunk = data * START_SCALES[case.torch_dtype] if isinstance(data, Tensor) else data
    candidates = [Trial(method, case, data, shrunk) for method in methods if method.serves(case.nbytes)]
    warm, refusals = keep(candidates, warm_up, case, ranks)
    ready, more_refusals = keep([trial for trial, _ in warm], partial(make_launch, case=case), case, ranks)
    refusals += more_refusals
    if not ready:
        return [], refusals
    times_us = ranks.slowest(time_in_turn(ready, case, ranks))
    carried = [count_traffic(*one, times, case, ranks, counters) for one, times in zip(ready, times_us, strict=True)]
    wrong = ranks.total([trial.count_wrong(launch, ranks) for trial, launch in ready])
    rows = [
        make_row(
            case,
            trial.method.name,
            times,
            bad,
            algorithm=trial.method.algorithm(trial.x) if trial.method.algorithm else None,
            quantised=trial.method.quantised,
            nvlink=nvlink,
        )
        for (trial, _), times, bad, nvlink in zip(ready, times_us, wrong, carried, strict=True)
    ]
    return rows, refusals


def count_traffic(
    trial: Trial,
    launch: Callable[[], None],
    times_us: Sequence[float],
    case: Case,
    ranks: Ranks,
    counters: Counters | None,
) -> dict[str, object] | None:
    if counters is None or not traffic.is_counted(trial.method, case):
        return None
    trial.refill()
    return traffic.count(launch, statistics.median(times_us) * case.iterations, case, ranks, counters)


def keep(
    trials: list[Trial], work: Callable[[Trial], T], case: Case, ranks: Ranks
) -> tuple[list[tuple[Trial, T]], list[str]]:
    """The trials whose work succeeds on every rank, with what it returns; and what the others say."""
    kept, refusals = [], []
    for trial in trials:
        ranks.level()
        result, reason = agreed(ranks, partial(work, trial), trial.method.refusals)
        if reason:
            where = f"{case.world_size} ranks, {format_nbytes(case.nbytes)}, {case.mode}"
            refusals.append(f"{trial.method.name}, {where}: {reason}")
        else:
            kept.append((trial, result))
    return kept, refusals


def warm_up(trial: Trial) -> None:
    trial.refill()
    trial.run(WARM_UP)


def make_launch(trial: Trial, case: Case) -> Callable[[], None]:
    """What one timed repeat runs: all the case's iterations."""
    if case.mode not in GRAPH_MODES:
        return partial(trial.run, case.iterations)
    trial.refill()
    return capture(partial(trial.run, case.iterations))


def time_in_turn(ready: list[tuple[Trial, Callable[[], None]]], case: Case, ranks: Ranks) -> list[list[float]]:
    """Microseconds an operation, by trial and repeat. The trials take turns, so that a drifting clock meets all."""
    times: list[list[float]] = [[] for _ in ready]
    for repeat in range(-1, case.repeats):  # the first turn warms up: it uploads the graphs
        for (trial, launch), of_trial in zip(ready, times, strict=True):
            trial.refill()
            time_us = ranks.time_us(launch, case.mode) / case.iterations
            if repeat >= 0:
                of_trial.append(time_us)
    return times

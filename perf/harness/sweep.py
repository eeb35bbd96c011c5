"""Sweeps of all-reduces: times and verifies every method on every case of a plan."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from graphar.plan.sizes import format_nbytes
from perf.harness import links
from perf.harness import ranks as worlds
from perf.harness.cases import HOST_CALLS, HOST_MODES, Case, LinkCeiling, Plan, Row, Utilisation, make_row
from perf.harness.links import Counters
from perf.harness.ranks import QUEUED_CALLS, Data, InProcessRanks, Ranks, host_time_of_calls_us, tensors, timed_in_turn
from perf.harness.timing import WARM_UP, capture
from perf.harness.verify import count_wrong
from perf.peers.catalogue import make_methods
from perf.peers.methods import Method

GRAPH_MODES = ("graph", "chain")

# In a chain of all-reduces each one makes random data about world_size times as large, so a long chain overflows. Data
# scaled by 2^-30 end near 2^121 after 50 all-reduces on 8 ranks, and no element is so small that an FP8 codec drops it.
# The range of float16 is too small for that: starting at the smallest normal number, data reach infinity after 15
# all-reduces on 4 ranks. Further all-reduces add infinities.
START_SCALES = {torch.bfloat16: 2.0**-30, torch.float32: 2.0**-30, torch.float16: 2.0**-14}

CHECKED_STEPS = 2  # with a pair of symmetric tensors: from the first to the second and back


class Trial:
    """Runs one method on one case.

    Attributes:
        x: the input of the method.
        result: the result of the last call.
    """

    def __init__(self, method: Method, case: Case, data: Data, shrunk: Data) -> None:
        if method.data:
            data = shrunk = method.data(data)
        self.method, self.refusals = method, method.refusals
        self.result: Data | None = None
        self._case, self._data = case, data
        self._is_chain = case.mode == "chain"
        self._source = shrunk if method.in_place or self._is_chain else data
        self.x = input_like(method, self._source)

    def refill(self) -> None:
        """Restores the input. In-place calls, and methods with the same symmetric buffer, overwrite it."""
        if self.x is not self._source:
            self.x.copy_(self._source)

    def run(self, iterations: int, x: Data | None = None) -> None:
        x = self.x if x is None else x
        for _ in range(iterations):
            self.result = self.method.call(x)
            if self._is_chain:
                x = self.result

    def make_launch(self) -> Callable[[], float | None]:
        """Returns a function that runs one timed repeat of the case. For host times the function returns the time."""
        self.refill()
        self.run(WARM_UP)
        if self._case.mode in HOST_MODES:
            return self.host_time_us if self._case.mode == "host_loop" else self.host_time_between_us
        repeat = partial(self.run, self._case.iterations)
        if self._case.mode not in GRAPH_MODES:
            return repeat
        self.refill()
        return capture(repeat)

    def host_time_us(self) -> float:
        return host_time_of_calls_us(self.run, HOST_CALLS)

    def host_time_between_us(self) -> float:
        """Makes HOST_CALLS calls, each after an operation of torch. Returns the host time of the calls alone."""
        other, spent_ns, now_ns = torch.ones_like(self.x), 0, time.perf_counter_ns
        for at in range(HOST_CALLS):
            other = other * other
            begin_ns = now_ns()
            self.result = self.method.call(self.x)
            spent_ns += now_ns() - begin_ns
            if (at + 1) % QUEUED_CALLS == 0:
                torch.cuda.synchronize()
        return spent_ns / 1e3

    def count_wrong(self, launch: Callable[[], object], ranks: Ranks) -> int:
        """Runs the timed launch once more, and returns how many elements of this process's results are wrong.

        For host times a single call is checked instead, because in-place results would overflow after HOST_CALLS calls.

        If a method rounds at every hop, the error bound after many dependent calls is loose. Such a method is also
        checked after one call on unscaled data, or after two calls in a chain.
        """
        in_a_row = self.method.in_place or self._is_chain
        for tensor in tensors(self.result):
            tensor.fill_(torch.nan)
        self.refill()
        if self._case.mode in HOST_MODES:
            launch, steps = partial(self.run, 1), 1
        else:
            steps = self._case.iterations if in_a_row else 1
        launch()
        ranks.barrier()
        wrong = count_wrong(self._source, self.result, ranks, self.method, steps)
        if not in_a_row or self.method.exact:
            return wrong
        steps = CHECKED_STEPS if self._is_chain else 1
        self._run_at_full_scale(steps)
        ranks.barrier()
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
    """Returns a row for each method that can run the case, and a message for each that cannot. Collective.

    Args:
        counters: this rank's NVLink counters, to count the traffic of large operations. Either all ranks have
            counters or none.
    """
    data = ranks.random(case)
    shrunk = data * START_SCALES[case.torch_dtype] if isinstance(data, Tensor) else data
    where = f"{case.world_size} ranks, {format_nbytes(case.nbytes)}, {case.mode}"
    trials = [
        (f"{method.name}, {where}", Trial(method, case, data, shrunk))
        for method in methods
        if method.serves(case.nbytes)
    ]
    timed, refusals = timed_in_turn(ranks, trials, case.repeats, case.mode, case.iterations)
    if not timed:
        return [], refusals
    carried = [count_traffic(*one, case, ranks, counters) for one in timed]
    wrong = ranks.total([trial.count_wrong(launch, ranks) for trial, launch, _ in timed])
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
        for (trial, _, times), bad, nvlink in zip(timed, wrong, carried, strict=True)
    ]
    return rows, refusals


def count_traffic(
    trial: Trial,
    launch: Callable[[], None],
    times_us: Sequence[float],
    case: Case,
    ranks: Ranks,
    counters: Counters | None,
) -> Utilisation | None:
    if counters is None or not links.is_counted(trial.method, case):
        return None
    trial.refill()
    return links.count(launch, statistics.median(times_us) * case.iterations, case, ranks, counters)


def run(plan: Plan) -> Iterator[Row | LinkCeiling | str]:
    """Yields rows and link ceilings as they are measured. A string says what was not measured, and why."""
    yield from worlds.run(plan.world_size if plan.form == "process" else 1, partial(run_rank, plan))


def run_rank(plan: Plan, rank: int, port: int) -> Iterator[Row | LinkCeiling | str]:
    in_process = plan.form == "list"
    ranks = InProcessRanks(plan.world_size) if in_process else worlds.join(rank, plan.world_size, plan.device, port)
    yield from work_through(plan, ranks)
    ranks.barrier()


def work_through(plan: Plan, ranks: Ranks) -> Iterator[Row | LinkCeiling | str]:
    """Yields one rank's results. All ranks yield messages of the same types in the same order. Collective."""
    methods, skipped = make_methods(plan, ranks)
    yield from skipped
    ranks.warm_up()  # after compiling, because the clocks of an idle GPU fall
    counters = None
    if plan.device == "cuda":
        yield links.find_ceiling(ranks)
        counters, reason = links.find_counters(ranks)
        if reason:
            yield f"NVLink's counters, {plan.world_size} ranks: {reason}"
    for case in plan.cases():
        taking_part = [method for method in methods if plan.takes_part(method.name, case)]
        rows, refusals = measure(case, taking_part, ranks, counters)
        if plan.device == "cuda":
            torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next size cannot use it
        yield from (*rows, *refusals)
    if counters:
        counters.close()

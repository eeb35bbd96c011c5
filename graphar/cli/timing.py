"""Times calls between GPUs, all in one process: all-reduces of given configurations, and any op under given tables."""

from __future__ import annotations

import contextlib
import gc
import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch

from graphar.cli import specified
from graphar.cli.specified import DTYPE, OfRanks, Prepared, SpecifiedCall, count_wrong
from graphar.communicator import Communicator
from graphar.errors import GrapharError, UnsupportedError
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.sizes import MB, format_nbytes
from graphar.plan.slices import Slice
from graphar.plan.tables import Table
from graphar.plan.tune import Workload
from graphar.runtime.bind.collective import bind_slice
from graphar.runtime.engine import runner_of

REPEATS = 5
HOPELESS = 1.5  # stop timing a configuration that takes this many times as long as the fastest
CALLS = 12  # calls of a repeat; a multiple of the number of weights that take turns
_PAUSE = 200_000  # clocks, 0.1 ms: enough for the host to queue a graph on each device
_LONGEST_PAUSE = 1 << 28  # 0.15 s; if the host is still late after that, it limits the time
_DEADLINE_S = 20.0


def launches_of(nbytes: int) -> int:
    return 50 if nbytes <= MB else 20 if nbytes <= 64 * MB else 5


class Stopwatch:
    """Measures work on a stream of each of a communicator's GPUs, all in one process, without the host's time."""

    def __init__(self, communicator: Communicator, streams: Sequence[torch.cuda.Stream]) -> None:
        self.communicator, self.streams, self._pause_cycles = communicator, streams, _PAUSE

    def elapsed_us(self, run: Callable[[], None]) -> float:
        """Returns the time of the work that ``run`` queues on the streams, in microseconds."""
        while True:
            pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in self.streams]
            pauses = [partial(torch.cuda._sleep, self._pause_cycles)] * len(pairs)
            self.on_streams(pauses)
            self.on_streams([begin.record for begin, _ in pairs])
            run()
            late = any(begin.query() for begin, _ in pairs)  # the pause ended before all was queued
            self.on_streams([end.record for _, end in pairs])
            self.communicator.synchronize()
            if not late or self._pause_cycles >= _LONGEST_PAUSE:
                # The minimum: a rank that began early waited for other ranks, and the last rank to begin did not wait.
                return min(begin.elapsed_time(end) for begin, end in pairs) * 1e3
            self._pause_cycles *= 2

    def on_streams(self, functions: Sequence[Callable[[], None]]) -> None:
        """Calls one function for each rank, with the rank's stream as the current one."""
        for stream, function in zip(self.streams, functions, strict=True):
            with torch.cuda.stream(stream):
                function()


class Timer(Stopwatch, contextlib.AbstractContextManager):
    """Times calls between the first ``world_size`` GPUs, which ``auto`` may compress; a context manager."""

    def __init__(self, world_size: int) -> None:
        communicator = Communicator(devices=range(world_size), timeout_s=_DEADLINE_S, lossless=True)
        super().__init__(communicator, [torch.cuda.Stream(device) for device in range(world_size)])
        xs = [torch.ones(PACK_NBYTES, dtype=DTYPE, device=stream.device) for stream in self.streams]
        try:
            self.communicator.allreduce(xs)
            if self.communicator.engine.runner is None:
                raise UnsupportedError(f"{world_size} GPUs: {self.communicator.explain(xs).reason}")
        except GrapharError:
            self.communicator.close()
            raise

    def __exit__(self, *_) -> None:
        self.communicator.close()

    def measure(self, call: Call, configs: Sequence[Config]) -> list[float]:
        """Returns the median time of an all-reduce with each of ``configs``, in microseconds; repeats alternate.

        Raises GrapharError, which names the configuration, if a single call or a timed graph gives other bits than the
        specification of normal random values.
        """
        xs = specified.random(self.communicator.devices or (), call.work.numel, dtype=call.dtype)
        self.communicator.synchronize()  # other streams will read them
        outs = [torch.empty_like(x) for x in xs]
        bound = [self._bind(call, config, xs, outs) for config in configs]
        of_ranks = SpecifiedCall("allreduce", [xs], algorithm=call.algorithm, codec=call.wire).expected()
        expected = [total.to(x.device) for (total,), x in zip(of_ranks, xs, strict=True)]
        self._check(configs, bound, outs, expected)
        gc.collect()  # freeing an older graph during a capture would invalidate it
        count = launches_of(call.nbytes)
        graphs = [[self._capture(rank, run, count) for rank, run in enumerate(runs)] for runs in bound]
        replays = [[graph.replay for graph in of_config] for of_config in graphs]
        times = self._medians([partial(self.on_streams, of_config) for of_config in replays])
        self._check(configs, replays, outs, expected)
        return [time_us / count for time_us in times]

    def measure_under(self, workload: Workload, tables: Sequence[Table]) -> list[float]:
        """Returns the median time of one call under each of ``tables``, in microseconds; repeats alternate.

        The calls of a repeat are queued behind a pause, so that the host's time does not count. Raises GrapharError if
        a result is wrong before or after the calls that are timed.
        """
        engine, prepared = self.communicator.engine, Prepared(workload, self.communicator)
        self.communicator.synchronize()  # the tensors are made; other streams will read them
        own = engine.table
        results: list = [[] for _ in tables]  # of all calls of a repeat

        def call(at: int, calls: int) -> None:
            engine.use_table(tables[at])
            with contextlib.ExitStack() as streams:
                for stream in self.streams:
                    streams.enter_context(torch.cuda.stream(stream))
                results[at] = [prepared.run(number) for number in range(calls)]

        def poison(at: int) -> None:
            """Frees the last repeat's results, filled with NaN, to find elements that later calls do not write."""
            for out in itertools.chain.from_iterable(itertools.chain.from_iterable(results[at])):
                out.fill_(torch.nan)
            results[at] = []
            self.communicator.synchronize()

        def check() -> None:
            self.communicator.synchronize()
            for of_table in results:
                for number, of_call in enumerate(of_table):
                    prepared.check(number, of_call)

        try:
            for at in range(len(tables)):
                call(at, 1)
            check()
            times = self._medians([partial(call, at, CALLS) for at in range(len(tables))], poison)
            check()
        finally:
            engine.use_table(own)
        return [time_us / CALLS for time_us in times]

    def _medians(self, runs: Sequence[Callable[[], None]], before: Callable[[int], None] | None = None) -> list[float]:
        """Returns the median time of each of ``runs``; hopeless ones stop early. ``before`` gets a run's index."""
        times: list[list[float]] = [[] for _ in runs]
        for turn in range(1 + REPEATS):
            fastest_us = min(itertools.chain(*times), default=0.0)
            for at, run in enumerate(runs):
                if min(times[at], default=0.0) > HOPELESS * fastest_us:
                    continue
                if before:
                    before(at)
                time_us = self.elapsed_us(run)
                if turn > 0:  # the first one warms up
                    times[at].append(time_us)
        return [statistics.median(of_run) for of_run in times]

    def _bind(self, call: Call, config: Config, xs: OfRanks, outs: OfRanks) -> list[Callable[[], None]]:
        """Returns, for each rank, a function that launches its kernel on the current stream."""
        engine, whole = self.communicator.engine, Slice(call.work.numel)
        launches = bind_slice(runner_of(engine), call, config, whole, _DEADLINE_S)
        return [partial(launch, (x,), (out,)) for launch, x, out in zip(launches, xs, outs, strict=True)]

    def _check(self, configs: Sequence[Config], launches, outs: OfRanks, expected: OfRanks) -> None:
        """Raises GrapharError if a configuration's launches (one per rank) do not give the expected sum in ``outs``."""
        for config, runs in zip(configs, launches, strict=True):
            for out in outs:
                out.fill_(torch.nan)
            self.communicator.synchronize()
            self.on_streams(runs)
            self.communicator.synchronize()
            wrong = [rank for rank, out in enumerate(outs) if count_wrong(out, expected[rank])]
            if wrong:
                size = format_nbytes(outs[0].nbytes)
                raise GrapharError(f"{len(outs)} GPUs, {size}: {config} gave wrong sums on rank(s) {wrong}")

    def _capture(self, rank: int, run: Callable[[], None], count: int) -> torch.cuda.CUDAGraph:
        # Captured calls launch nothing, so the ranks can be captured one after another.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(rank), torch.cuda.graph(graph, stream=self.streams[rank]):
            for _ in range(count):
                run()
        return graph

"""Times all-reduces of given shapes: one process has all GPUs, and each GPU replays a CUDA graph."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Sequence

import torch

from graphar import reference
from graphar.communicator import Communicator
from graphar.errors import GrapharError, UnsupportedError
from graphar.numerics.codecs import Codec
from graphar.plan.algorithms import Shape
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.select import kernel_of
from graphar.plan.sizes import MB, format_nbytes
from graphar.plan.slices import Slice

DTYPE = torch.bfloat16
REPEATS = 5
HOPELESS = 1.5  # stop timing a shape that takes this many times as long as the fastest
_SLEEP_CYCLES = 200_000  # 0.1 ms, in which the host queues the events and the graph
_WINDOW = 1 << 24  # elements of the expected sum that are computed at a time; whole buckets of every codec
_DEADLINE_S = 20.0


def launches_of(nbytes: int) -> int:
    """Returns how many operations one graph holds."""
    return 50 if nbytes <= MB else 20 if nbytes <= 64 * MB else 5


class Timer:
    """Times shapes of all-reduce between the first ``world_size`` GPUs; a context manager.

    Raises:
        UnsupportedError: graphar's kernels cannot reach all of these GPUs.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._communicator = Communicator(devices=range(world_size), timeout_s=_DEADLINE_S)
        self._streams = [torch.cuda.Stream(device) for device in range(world_size)]
        xs = [torch.ones(PACK_NBYTES, dtype=DTYPE, device=stream.device) for stream in self._streams]
        try:
            self._communicator.allreduce(xs)
            if self._communicator.engine.runner is None:
                raise UnsupportedError(f"{world_size} GPUs: {self._communicator.explain(xs).reason}")
        except GrapharError:
            self._communicator.close()
            raise

    def __enter__(self) -> Timer:
        return self

    def __exit__(self, *_) -> None:
        self._communicator.close()

    def measure(self, nbytes: int, shapes: Sequence[Shape], xs: Sequence[torch.Tensor] | None = None) -> list[float]:
        """Returns the median time of one operation with each of ``shapes``, in microseconds; repeats alternate.

        Results are compared with the specification bit for bit: of single calls, and of the timed graphs.

        Args:
            nbytes: the size of one rank's tensor, in bytes.
            shapes: shapes that serve this size; their codecs, if any, round to nearest.
            xs: the ranks' tensors, bf16; None: normal random values.

        Raises:
            GrapharError: a result is wrong; the message names the shape.
            CollectiveTimeout: a kernel waited past its deadline.
        """
        xs = xs or [self._random(rank, nbytes // DTYPE.itemsize) for rank in range(self._world_size)]
        outs = [torch.empty_like(x) for x in xs]
        bound = [self._bind(shape, xs, outs) for shape in shapes]
        expected = {codec: _copies(xs, codec) for codec in dict.fromkeys(shape.codec for shape in shapes)}
        self._check(shapes, bound, outs, expected)
        gc.collect()  # freeing an older graph during a capture would invalidate it
        count = launches_of(nbytes)
        graphs = [[self._capture(rank, run, count) for rank, run in enumerate(runs)] for runs in bound]
        times: list[list[float]] = [[] for _ in shapes]
        for turn in range(1 + REPEATS):
            for at in _worthwhile(times):
                time_us = self._replay(graphs[at]) / count
                if turn > 0:  # the first one warms up
                    times[at].append(time_us)
        self._check(shapes, [[graph.replay for graph in of_shape] for of_shape in graphs], outs, expected)
        return [statistics.median(of_shape) for of_shape in times]

    def _random(self, rank: int, numel: int) -> torch.Tensor:
        device = self._streams[rank].device
        x = torch.randn(numel, dtype=DTYPE, device=device, generator=torch.Generator(device).manual_seed(rank))
        torch.cuda.synchronize(device)  # other streams will read it
        return x

    def _bind(self, shape: Shape, xs: list[torch.Tensor], outs: list[torch.Tensor]) -> list[Callable[[], None]]:
        """Returns, for each rank, a function that launches its kernel on the current stream."""
        runner = self._communicator.engine.runner
        runner.prepare(kernel_of(shape, DTYPE))
        launches = runner.bind_members(shape, Slice(xs[0].numel()), DTYPE, _DEADLINE_S)
        return [
            lambda launch=launch, x=x, out=out: launch(x, out)
            for launch, x, out in zip(launches, xs, outs, strict=True)
        ]

    def _check(self, shapes, launches, outs: list[torch.Tensor], expected: dict) -> None:
        """Raises GrapharError if a shape's launches, one a rank, do not leave its codec's expected sum in ``outs``."""
        for shape, runs in zip(shapes, launches, strict=True):
            for out in outs:
                out.fill_(torch.nan)
            self._communicator.synchronize()
            for stream, run in zip(self._streams, runs, strict=True):
                with torch.cuda.stream(stream):
                    run()
            self._communicator.synchronize()
            right = expected[shape.codec]
            wrong = [rank for rank, out in enumerate(outs) if not torch.equal(out.view(torch.int16), right[rank])]
            if wrong:
                size = format_nbytes(outs[0].nbytes)
                raise GrapharError(f"{self._world_size} GPUs, {size}: {shape} gave wrong sums on rank(s) {wrong}")

    def _capture(self, rank: int, run: Callable[[], None], count: int) -> torch.cuda.CUDAGraph:
        # Captured calls launch nothing, so the ranks can be captured one after another.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(rank), torch.cuda.graph(graph, stream=self._streams[rank]):
            for _ in range(count):
                run()
        return graph

    def _replay(self, graphs: list[torch.cuda.CUDAGraph]) -> float:
        """Replays the graphs, one a rank, at the same time, and returns their time in microseconds."""
        events = []
        for stream, graph in zip(self._streams, graphs, strict=True):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(_SLEEP_CYCLES)
                begin.record()
                graph.replay()
                end.record()
            events.append((begin, end))
        self._communicator.synchronize()
        # The minimum: a rank that began early waited for others, and the last one to begin waited for none.
        return min(begin.elapsed_time(end) for begin, end in events) * 1e3


def _worthwhile(times: list[list[float]]) -> list[int]:
    """Returns the indexes of the shapes that may still be the fastest, by the times so far."""
    if not times[0]:
        return list(range(len(times)))
    best = min(min(of_shape) for of_shape in times)
    return [at for at, of_shape in enumerate(times) if min(of_shape) <= HOPELESS * best]


def _copies(xs: list[torch.Tensor], codec: Codec | None) -> list[torch.Tensor]:
    """Returns the specification's sum on each GPU, as bits."""
    expected = _expected(xs, codec)
    return [expected.to(x.device).view(torch.int16) for x in xs]


def _expected(xs: list[torch.Tensor], codec: Codec | None) -> torch.Tensor:
    """Returns the specification's sum on the first GPU; computed in windows, because its fp32 needs much memory."""
    expected = torch.empty_like(xs[0])
    for start in range(0, expected.numel(), _WINDOW):
        window = slice(start, start + _WINDOW)
        parts = [x[window].to(expected.device) for x in xs]
        expected[window] = reference.quantized_allreduce(parts, codec) if codec else reference.allreduce(parts)
    return expected

"""The common code of `losses` and `norm_gradients`: passes on one GPU, forward and backward, against torch's.

A report has the time of each method, the time that the memory needs for the least bytes, and the peak memory.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from graphar.plan.sizes import MB
from perf.harness import ranks as ranks_of
from perf.harness.timing import WARM_UP, capture, deciles, time_in_turn
from perf.machine import memory_rate
from perf.md import NOT_SERVED, name_cell, number, ratio_cell, table, time_cell
from perf.products import integers_of
from perf.ratios import best_peer, group, of_best_peer, ratio, words_for
from perf.report import Deciles, Glance, Report, Section, Timing

OWN, TORCH, COMPILED = "graphar", "torch", "torch.compile"
CPU_METHODS = (OWN, TORCH)
BOTH = "forward and backward"
REPEATS = {"cuda": 15, "cpu": 4}
ITEMSIZE = 2  # bf16

Shape = tuple[int, ...]


class PassesPlan(NamedTuple):
    device: str
    shapes: Sequence[Shape]
    methods: Sequence[str]


@dataclass(frozen=True)
class PassRow(Timing):
    """The measured and verified time of one method. A subclass adds the shape, and ``words`` that describe it.

    Attributes:
        passes: BOTH, or which pass it is.
        least_nbytes: the bytes that must be read and written.
        floor_us: the time that these bytes take at the memory's rate; None if the rate is unknown.
        peak_nbytes: the most memory that one call takes beside its operands. None for one pass, and on the CPU.
    """

    world_size: ClassVar[int] = 1
    method: str
    passes: str
    time_us: Deciles
    least_nbytes: int
    floor_us: float | None
    peak_nbytes: int | None
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return self.passes, *self.words

    @property
    def cells(self) -> Sequence[str]:
        return self.words


class Trial:
    """Runs one method, ``calls`` times in a timed launch. ``results`` are the last call's."""

    def __init__(self, name: str, passes: str, calls: int, least_nbytes: int, on_gpu: bool) -> None:
        self.name, self.passes, self.calls, self.least_nbytes, self.on_gpu = name, passes, calls, least_nbytes, on_gpu
        self.results: tuple[Tensor, ...] = ()
        self.peak_nbytes: int | None = None

    def call(self) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def wrong(self, results: tuple[Tensor, ...]) -> int:
        raise NotImplementedError

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self.results = ()
            self.results = self.call()

    def make_launch(self, in_graph: bool = True) -> Callable[[], None]:
        """Returns the timed launch. On a GPU it replays a graph of the calls."""
        self.run(WARM_UP)
        if self.on_gpu and self.passes == BOTH:
            self.peak_nbytes = self._measure_peak()
        repeat = partial(self.run, self.calls)
        # autograd runs a backward pass on the stream of the forward pass
        return capture(repeat, torch.cuda.current_stream()) if self.on_gpu and in_graph else repeat

    def _measure_peak(self) -> int:
        self.results = ()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(1)
        return torch.cuda.max_memory_allocated() - before

    def count_wrong(self, launch: Callable[[], None]) -> int:
        """Runs the timed launch once more. Returns how many of the numbers that are verified are wrong."""
        for result in self.results:
            result.detach().fill_(torch.nan)
        launch()
        return self.wrong(tuple(result.detach() for result in self.results))


def measure(
    device: str, trials: Iterable[tuple[str, Callable[[], Trial]]], row: Callable[..., PassRow]
) -> Iterator[PassRow | str]:
    """Yields the rows of all trials, timed in turn.

    ``trials`` are pairs: words for the message if a trial fails, and a function that makes the trial. ``row`` takes the
    fields of :class:`PassRow`.
    """
    ready, rate = [], memory_rate() if device == "cuda" else None
    for words, make in trials:
        try:
            trial = make()
            ready.append((trial, trial.make_launch()))
        except Exception as error:
            yield f"{words}: {reason(error)}"
    time_of = ranks_of.host_time_us if device == "cpu" else ranks_of.graph_time_us
    times = time_in_turn([launch for _, launch in ready], REPEATS[device], time_of)
    for (trial, launch), of_trial in zip(ready, times, strict=True):
        nbytes, time_us = trial.least_nbytes, deciles([time / trial.calls for time in of_trial])
        floor_us = nbytes / rate / 1e3 if rate else None
        measured = time_us, nbytes, floor_us, trial.peak_nbytes, trial.count_wrong(launch)
        yield row(trial.name, trial.passes, *measured)


def run_shapes(topic: type[Passes], plan: PassesPlan, rank: int, port: int) -> Iterator[PassRow | str]:
    """Measures all methods with each shape in this process, which loads compilers and kernels once."""
    stream = contextlib.nullcontext()
    if plan.device == "cuda":
        torch.cuda.set_device(0)
        ranks_of.raise_clocks(torch.device("cuda", 0))
        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream:
        for shape in plan.shapes:
            try:
                yield from topic.rows_of(plan, shape)
            except Exception as error:
                yield f"{topic.words_of(shape)}: {reason(error)}"
            torch.compiler.reset()  # it compiles one function for a few shapes only


def compiled(function: Callable) -> Callable:
    """Returns ``function`` compiled by Inductor for static shapes. Its backward pass may run more than once."""
    from torch._functorch import config as of_autograd
    from torch._inductor import config

    config.compile_threads = 1  # starting a pool of processes takes longer than compiling one function
    # A backward pass that reuses the memory of saved tensors runs once. Older versions of torch do not see that it is
    # to run again.
    of_autograd.donated_buffer = False
    return torch.compile(function, dynamic=False)


def reason(error: BaseException) -> str:
    """Returns two lines of an error, and of the error during which it was raised.

    The first line of an error of torch.compile names only the backend. The end of a capture that failed raises an error
    of its own.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    said = f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return f"{said} (after {reason(before)})" if before else said


def reason_of_process(error: ProcessException) -> str:
    """Returns the line that names the error. After errors of CUDA more lines follow."""
    line = re.search(r"^[\w.]*(Error|Exception)\b.*", str(error), re.MULTILINE)
    return line[0] if line else str(error).strip().splitlines()[-1]


Cases = dict[tuple[str, ...], dict[str, PassRow]]  # by the shape in words, and by method


class Passes(Report):
    """The base of the topics: ``rows_of`` yields a shape's rows, and ``words_of`` is a shape in words."""

    has_spread: ClassVar[bool] = True
    passes: ClassVar[Sequence[str]]
    compared: ClassVar[str]  # the passes of the glance
    methods: ClassVar[Sequence[str]]  # on a GPU; CPU_METHODS run on the CPU
    shapes: ClassVar[tuple[Sequence[Shape], Sequence[Shape]]]  # on a GPU, and on the CPU
    metavar: ClassVar[str]
    numbers: ClassVar[str]  # what the numbers of a shape are
    header: ClassVar[Sequence[str]]  # of the columns of :attr:`PassRow.cells`
    apart: ClassVar[bool] = False  # whether each shape has a process of its own, which an error of CUDA then ends
    rows_of: ClassVar[Callable[[PassesPlan, Shape], Iterator[PassRow | str]]]
    words_of: ClassVar[Callable[[Shape], str]]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--shapes", type=cls.shape_of, nargs="+", metavar=cls.metavar, help=cls.numbers)

    @classmethod
    def shape_of(cls, text: str) -> Shape:
        """Returns a shape. Raises ValueError unless ``text`` is as many positive integers as ``metavar`` has."""
        return tuple(integers_of(text, len(cls.metavar.split("x"))))

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> PassesPlan:
        device, methods = ("cuda", cls.methods) if gpu_count else ("cpu", CPU_METHODS)
        return PassesPlan(device, options.shapes or cls.shapes[device == "cpu"], methods)

    def measure(self, plan: PassesPlan) -> Iterator[PassRow | str]:
        for shapes in [[shape] for shape in plan.shapes] if self.apart else [plan.shapes]:
            try:
                yield from ranks_of.run(1, partial(run_shapes, type(self), plan._replace(shapes=shapes)))
            except ProcessException as error:
                yield f"{', '.join(map(self.words_of, shapes))}: {reason_of_process(error)}"

    def sections(self) -> list[Section]:
        sections = []
        for passes in self.passes:
            if cases := self.cases_of(passes):
                sections.append(Section(passes.capitalize(), [self.comparison(cases)]))
        peaks = self.peak_table(self.cases_of(BOTH))
        return [*sections, Section(f"Peak memory of {BOTH}", [peaks])] if peaks else sections

    def glance(self) -> Glance:
        ratios = of_best_peer(self.cases_of(self.compared))
        over = words_for([row.method for row in self.rows if row.is_peer])
        named = {", ".join(words): value for words, value in ratios.items()}
        which = self.compared if self.compared == BOTH else f"the {self.compared} pass"
        return Glance(f"graphar's time of {which} / that of {over}, by shape", named, NOT_SERVED)

    def cases_of(self, passes: str) -> Cases:
        cases = group([row for row in self.rows if row.passes == passes], lambda row: row.words)
        return {words: {row.method: row for row in mine} for words, mine in cases.items()}

    def methods_in(self, cases: Cases) -> list[str]:
        return [name for name in self.methods if any(name in rows for rows in cases.values())]

    def comparison(self, cases: Cases) -> str:
        methods, lines = self.methods_in(cases), []
        for rows in cases.values():
            any_row, ours, peer = next(iter(rows.values())), rows.get(OWN), best_peer(rows.values())
            cells = [*any_row.cells, *(time_cell(rows.get(name)) for name in methods)]
            cells += [name_cell(peer), ratio_cell(ratio(ours, peer))]
            cells += [number(any_row.least_nbytes / MB), number(any_row.floor_us)]
            is_known = ours and ours.floor_us and not ours.wrong
            lines.append([*cells, number(ours.median / ours.floor_us) if is_known else NOT_SERVED])
        header = [*self.header, *(f"{name} (us)" for name in methods)]
        return table([*header, "best peer", "of_best_peer", "least (MB)", "least (us)", "graphar / least"], lines)

    def peak_table(self, cases: Cases) -> str:
        """Returns a table with the peak memory of each method; an empty string if it was not measured."""
        methods, lines = self.methods_in(cases), []
        for rows in cases.values():
            peaks = [rows[name].peak_nbytes if name in rows else None for name in methods]
            if any(peaks):
                shape = next(iter(rows.values())).cells
                lines.append([*shape, *(number(None if peak is None else peak / MB) for peak in peaks)])
        return table([*self.header, *(f"{name} (MB)" for name in methods)], lines) if lines else ""

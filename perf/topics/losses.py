"""`python -m perf losses`: times cross-entropy losses over a large vocabulary on one GPU, forward and backward."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException
from torch.nn import functional

from graphar.numerics import softmax
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.softmax import Terms
from graphar.plan.call import Operands
from graphar.plan.work import Loss
from graphar.runtime.bind import loss
from perf.harness import ranks as ranks_of
from perf.harness.timing import WARM_UP, capture, deciles, time_in_turn
from perf.machine import memory_rate
from perf.md import NOT_SERVED, name_cell, number, ratio_cell, table, time_cell
from perf.products import integers_of
from perf.ratios import best_peer, group, of_best_peer, ratio, words_for
from perf.report import Arguments, Deciles, Glance, Report, Section, Timing
from perf.topics.norm_gradients import compiled, reason, reason_of_process
from perf.topics.norms import count_far, count_wrong

Shape = tuple[int, int, int]  # rows, the columns of all ranks, ranks

SHAPES: tuple[Shape, ...] = (
    (1, 128256, 1),
    (16, 32064, 1),
    (1024, 32064, 1),
    (4096, 32064, 1),
    (4096, 128256, 1),
    (4096, 128256, 8),
    (16384, 32064, 1),
)
CPU_SHAPES: tuple[Shape, ...] = ((4, 1024, 1), (16, 4096, 2))
OWN, TORCH, COMPILED, LIGER = METHODS = ("graphar", "torch", "torch.compile", "liger")
CPU_METHODS = (OWN, TORCH)
FORWARD, BOTH = PASSES = ("forward", "forward and backward")
REPEATS = {"cuda": 15, "cpu": 4}
FEW_CALLS_NBYTES = 1 << 30  # of logits, from which on a graph has few calls
ITEMSIZE, MB = 2, 1 << 20  # bf16
VERIFIED_ROWS = 64
ROUNDINGS = 8  # to bf16, of a peer: half a machine epsilon each


@dataclass(frozen=True)
class LossRow(Timing):
    """The measured and verified time of one method.

    Attributes:
        method: one of METHODS.
        passes: one of PASSES.
        rows, columns: the shape of the bf16 logits of all ranks.
        ranks: that divide the columns; one of them is measured.
        least_nbytes: the bytes that are read and written: the logits once for each pass, and their gradient.
        floor_us: the time that these bytes take at the memory's rate; None if the rate is unknown.
        peak_nbytes: the most memory that one call takes beside its operands. None for "forward", and on the CPU.
    """

    world_size: ClassVar[int] = 1
    method: str
    passes: str
    rows: int
    columns: int
    ranks: int
    time_us: Deciles
    least_nbytes: int
    floor_us: float | None
    peak_nbytes: int | None
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return self.passes, words_of((self.rows, self.columns, self.ranks))


class LossPlan(NamedTuple):
    device: str
    shapes: Sequence[Shape]
    methods: Sequence[str]


def words_of(shape: Shape) -> str:
    rows, columns, ranks = shape
    return f"{rows} x {columns}" + (f" / {ranks}" if ranks > 1 else "")


def least_nbytes(passes: str, shape: Shape) -> int:
    rows, columns, ranks = shape
    return rows * columns // ranks * ITEMSIZE * (1 if passes == FORWARD else 3)


# ---- methods --------------------------------------------------------------------------------------------------------


class Own:
    """graphar's kernels of the first of some ranks. The others' partials count as equal to its own."""

    def __init__(self, x: Tensor, target: Tensor, shape: Shape, result: str = "mean") -> None:
        rows, columns, self.ranks = shape
        self.work = Loss("cross_entropy", rows, x.shape[1], Terms(columns, result, ignore_index=-100))
        self.kernels, self.x, self.target = loss.of_rank(x, self.work, 0, self.ranks), x, target
        self.upstream = torch.ones((), device=x.device)
        new = partial(x.new_empty, dtype=torch.float32)
        self.results = new(() if result == "mean" else rows), new(2 * rows + 1)
        partials = self.kernels.partials(self._operands()) if self.ranks > 1 else None
        self.gathered = None if partials is None else partials.expand(self.ranks, -1, -1).contiguous()

    def _operands(self) -> Operands:
        return Operands((self.x, self.target), self.results)

    def __call__(self, passes: str) -> tuple[Tensor, ...]:
        if self.gathered is not None:
            self.kernels.partials(self._operands())
        self.kernels.results(self._operands(), self.gathered)
        if passes == FORWARD:
            return (self.results[0],)
        gradient = torch.empty_like(self.x)
        loss.backward(self.work, 0, self.x, self.target, self.results[1], self.upstream, gradient)
        return self.results[0], gradient


class Peer:
    """A function of logits and target, by autograd."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, target: Tensor) -> None:
        self.function, self.x, self.target = function, x, target

    def __call__(self, passes: str) -> tuple[Tensor, ...]:
        if passes == FORWARD:
            return (self.function(self.x, self.target),)
        x = self.x.detach().requires_grad_()
        mean = self.function(x, self.target)
        return mean.detach(), *torch.autograd.grad(mean, x)


class Liger:
    """Its forward pass writes the gradient over the logits: a copy of them, which is made anew to be verified."""

    def __init__(self, x: Tensor, target: Tensor) -> None:
        from liger_kernel.transformers.functional import liger_cross_entropy

        self.function, self.target = liger_cross_entropy, target
        self.x = x.clone()

    def __call__(self, passes: str) -> tuple[Tensor, ...]:
        if passes == FORWARD:
            raise NotImplementedError("it computes the gradient in the forward pass")
        mean = self.function(self.x.requires_grad_(), self.target)
        return mean.detach(), self.x.detach()


def in_fp32(x: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(x.float(), target)


def make_method(name: str, x: Tensor, target: Tensor, shape: Shape) -> Callable[[str], tuple[Tensor, ...]]:
    if name == OWN:
        return Own(x, target, shape)
    if name == LIGER:
        return Liger(x, target)
    return Peer(compiled(in_fp32) if name == COMPILED else functional.cross_entropy, x, target)


# ---- what is right --------------------------------------------------------------------------------------------------


def some_rows(rows: int, device: str) -> Tensor:
    count = min(rows, VERIFIED_ROWS)
    return torch.arange(count, device=device) * rows // count


@torch.no_grad()
def wrong_of_own(own: Own, results: tuple[Tensor, ...]) -> int:
    """Counts the numbers of VERIFIED_ROWS that differ from the specification, and the mean of all rows."""
    rows, (loss_of_all, *gradient) = some_rows(len(own.x), own.x.device.type), results
    terms = own.work.terms._replace(result="none")
    x, target = own.x[rows], own.target[rows]
    part = softmax.partial(x, target, 0, LEAVES // own.ranks, terms)
    losses, state = softmax.finish(part.expand(own.ranks, -1, -1), target, x.shape[1], terms)
    of_rows = Own(own.x, own.target, (len(own.x), own.work.terms.vocab_size, own.ranks), "none")
    (each,) = of_rows(FORWARD)
    mean = softmax.tree_sum(each) / torch.tensor(float(len(own.x)), device=each.device)
    wrong = count_wrong((each[rows], loss_of_all.view(1)), (losses, mean.view(1)))
    if gradient:
        wanted, count = torch.empty_like(x), own.results[1][-1:]
        upstream = own.upstream
        terms = terms._replace(result="mean")
        softmax.gradient(x, target, torch.cat([state[:-1], count]), upstream, 0, terms, wanted)
        wrong += count_wrong((gradient[0][rows],), (wanted,))
    return wrong


@torch.no_grad()
def wrong_of_peer(x: Tensor, target: Tensor, results: tuple[Tensor, ...]) -> int:
    """Counts the gradients of VERIFIED_ROWS, and the loss of all, whose error is above ROUNDINGS to bf16.

    torch rounds log-probabilities to bf16, so their share of a gradient's error is as large as they are.
    """
    half, step = torch.finfo(torch.bfloat16).eps / 2, max(1, (1 << 26) // x.shape[1])
    losses = [
        functional.cross_entropy(rows.double(), of_rows, reduction="sum")
        for rows, of_rows in zip(x.split(step), target.split(step), strict=True)
    ]
    mean = torch.stack(losses).sum() / len(x)
    wrong = count_far(results[:1], (mean,), [ROUNDINGS * half * mean])
    if len(results) > 1:
        chosen = some_rows(len(x), x.device.type)
        log_probs = functional.log_softmax(x[chosen].double(), -1)
        gradient = log_probs.exp()
        limit = gradient * -log_probs
        gradient[torch.arange(len(chosen), device=x.device), target[chosen]] -= 1
        limit += gradient.abs() + torch.finfo(torch.bfloat16).tiny
        wrong += count_far((results[1][chosen],), (gradient / len(x),), [ROUNDINGS * half * limit / len(x)])
    return wrong


# ---- the measurement ------------------------------------------------------------------------------------------------


class Trial:
    """Runs one method. ``results`` are those of its last call."""

    def __init__(self, name: str, passes: str, method: Callable, x: Tensor, target: Tensor) -> None:
        self.name, self.passes, self.method, self.x, self.target = name, passes, method, x, target
        self.calls = 1 if not x.is_cuda else 4 if x.nbytes >= FEW_CALLS_NBYTES else 20
        self.results: tuple[Tensor, ...] = ()
        self.peak_nbytes: int | None = None

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self.results = ()
            self.results = self.method(self.passes)

    def make_launch(self) -> Callable[[], None]:
        self.run(WARM_UP)
        if self.x.is_cuda and self.passes == BOTH:
            self.results = ()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.run(1)
            self.peak_nbytes = torch.cuda.max_memory_allocated() - before
        if not self.x.is_cuda or self.name == LIGER:  # which waits for the GPU
            return partial(self.run, self.calls)
        return capture(partial(self.run, self.calls), torch.cuda.current_stream())

    def count_wrong(self, launch: Callable[[], None]) -> int:
        """Runs the timed launch once more. Returns how many of the numbers that are verified are wrong."""
        for result in self.results:
            result.fill_(torch.nan)
        if self.name == LIGER:
            self.method.x = self.x.clone()
            self.run(1)
        else:
            launch()
        if self.name == OWN:
            return wrong_of_own(self.method, self.results)
        return wrong_of_peer(self.x, self.target, self.results)


def run_shapes(plan: LossPlan, rank: int, port: int) -> Iterator[LossRow | str]:
    """Measures all methods with each shape, in a process that loads compilers and kernels once."""
    stream = contextlib.nullcontext()
    if plan.device == "cuda":
        torch.cuda.set_device(0)
        ranks_of.raise_clocks(torch.device("cuda", 0))
        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream:
        for shape in plan.shapes:
            try:
                yield from rows_of(plan, shape)
            except Exception as error:
                yield f"{words_of(shape)}: {reason(error)}"
            torch.compiler.reset()  # it compiles one function for a few shapes only


def rows_of(plan: LossPlan, shape: Shape) -> Iterator[LossRow | str]:
    rows, columns, ranks = shape
    generator = torch.Generator(plan.device).manual_seed(0)
    x = 3 * torch.randn(rows, columns // ranks, dtype=torch.bfloat16, device=plan.device, generator=generator)
    target = torch.randint(columns // ranks, (rows,), device=plan.device, generator=generator)
    rate, ready = memory_rate() if plan.device == "cuda" else None, []
    for name in plan.methods:
        for passes in PASSES[name == LIGER :]:
            try:
                trial = Trial(name, passes, make_method(name, x, target, shape), x, target)
                ready.append((trial, trial.make_launch()))
            except Exception as error:
                yield ", ".join((name, passes, words_of(shape))) + f": {reason(error)}"
    time_of = ranks_of.host_time_us if plan.device == "cpu" else ranks_of.graph_time_us
    times = time_in_turn([launch for _, launch in ready], REPEATS[plan.device], time_of)
    for (trial, launch), of_trial in zip(ready, times, strict=True):
        nbytes, time_us = least_nbytes(trial.passes, shape), deciles([time / trial.calls for time in of_trial])
        found = time_us, nbytes, nbytes / rate / 1e3 if rate else None, trial.peak_nbytes, trial.count_wrong(launch)
        yield LossRow(trial.name, trial.passes, *shape, *found)


# ---- the topic ------------------------------------------------------------------------------------------------------


@dataclass
class Losses(Report):
    rows: list[LossRow] = field(default_factory=list)

    order: ClassVar[int] = 24
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--shapes 16x32064x1 1024x128256x1 4096x32064x1 4096x128256x8",
        quick_on_gpus="--shapes 4096x32064x1",
        quick_on_cpu="--shapes 4x1024x1",
    )
    has_spread: ClassVar[bool] = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        text = "rows, columns of all ranks, and ranks, such as 4096x128256x8 (default: seven, from 1 to 16384 rows)"
        parser.add_argument("--shapes", type=shape_of, nargs="+", metavar="MxVxN", help=text)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> LossPlan:
        device, shapes, methods = ("cuda", SHAPES, METHODS) if gpu_count else ("cpu", CPU_SHAPES, CPU_METHODS)
        return LossPlan(device, options.shapes or shapes, methods)

    def measure(self, plan: LossPlan) -> Iterator[LossRow | str]:
        try:
            yield from ranks_of.run(1, partial(run_shapes, plan))
        except ProcessException as error:
            yield reason_of_process(error)

    @classmethod
    def count(cls, plan: LossPlan) -> int:
        return len(plan.shapes) * sum(len(PASSES[name == LIGER :]) for name in plan.methods)

    def sections(self) -> list[Section]:
        sections = []
        for passes in PASSES:
            if cases := cases_of(self.rows, passes):
                sections.append(Section(passes.capitalize(), [comparison(cases)]))
        peaks = peak_table(cases_of(self.rows, BOTH))
        return [*sections, Section("Peak memory of forward and backward", [peaks])] if peaks else sections

    def glance(self) -> Glance:
        over = words_for([row.method for row in self.rows if row.is_peer], {})
        named = {words_of(case): of_peer for case, of_peer in of_best_peer(cases_of(self.rows, BOTH)).items()}
        return Glance(f"graphar's time of forward and backward / that of {over}, by shape", named, NOT_SERVED)


def shape_of(text: str) -> Shape:
    """Returns rows, columns and ranks. Raises ValueError unless ``text`` is three positive integers, as in 8x512x2."""
    rows, columns, ranks = integers_of(text, 3)
    return rows, columns, ranks


Cases = dict[Shape, dict[str, LossRow]]


def cases_of(rows: Sequence[LossRow], passes: str) -> Cases:
    """Returns the rows by shape and method."""
    cases = group([row for row in rows if row.passes == passes], lambda row: (row.rows, row.columns, row.ranks))
    return {case: {row.method: row for row in of_case} for case, of_case in cases.items()}


def methods_of(cases: Cases) -> list[str]:
    return [name for name in METHODS if any(name in rows for rows in cases.values())]


def comparison(cases: Cases) -> str:
    methods, lines = methods_of(cases), []
    for shape, rows in cases.items():
        any_row, own, peer = next(iter(rows.values())), rows.get(OWN), best_peer(rows.values())
        cells = [words_of(shape), *(time_cell(rows.get(name)) for name in methods)]
        cells += [name_cell(peer), ratio_cell(ratio(own, peer))]
        cells += [number(any_row.least_nbytes / MB), number(any_row.floor_us)]
        of_floor = own and any_row.floor_us and not own.wrong and own.median / any_row.floor_us
        lines.append([*cells, number(of_floor) if of_floor else NOT_SERVED])
    header = ["rows x columns / ranks", *(f"{name} (us)" for name in methods)]
    return table([*header, "best peer", "of_best_peer", "least (MB)", "least (us)", "graphar / least"], lines)


def peak_table(cases: Cases) -> str:
    """Returns a table with the peak memory of each method; an empty string if it was not measured."""
    methods, lines = methods_of(cases), []
    for shape, rows in cases.items():
        peaks = [rows[name].peak_nbytes if name in rows else None for name in methods]
        if any(peaks):
            lines.append([words_of(shape), *(number(None if peak is None else peak / MB) for peak in peaks)])
    return table(["rows x columns / ranks", *(f"{name} (MB)" for name in methods)], lines) if lines else ""

"""`python -m perf norm_gradients`: times the backward pass of residual and RMSNorm on one GPU, and forward with it."""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException

from graphar.errors import UnsupportedError
from graphar.numerics import norm_gradients
from graphar.numerics import norms as norm_numerics
from graphar.runtime.availability import missing_software
from graphar.runtime.bind import residual_norm
from perf.harness import ranks as ranks_of
from perf.harness.timing import WARM_UP, capture, deciles, time_in_turn
from perf.machine import memory_rate
from perf.md import NOT_SERVED, name_cell, number, ratio_cell, table, time_cell
from perf.products import integers_of
from perf.ratios import best_peer, group, of_best_peer, ratio, words_for
from perf.report import Arguments, Deciles, Glance, Report, Section, Timing
from perf.topics.norms import EPS, OFFSET, add_and_norm, count_far, count_wrong

Shape = tuple[int, int]  # rows, columns

SHAPES: tuple[Shape, ...] = ((16, 8192), (128, 8192), (512, 2048), (2048, 5120), (2048, 16384), (4096, 8192))
SHAPES += ((8192, 4096), (16384, 1024), (16384, 4096))
CPU_SHAPES: tuple[Shape, ...] = ((16, 1024), (64, 264))
OWN, TORCH, COMPILED = METHODS = ("graphar", "torch", "torch.compile")
CPU_METHODS = (OWN, TORCH)
BACKWARD, BOTH = PASSES = ("backward", "forward and backward")
CALLS, REPEATS = {"cuda": 20, "cpu": 1}, {"cuda": 15, "cpu": 4}
ITEMSIZE = 2  # bf16
MB = 1 << 20
# The most roundings to bf16 between a peer's inputs and a result, see :func:`exact`.
ROUNDINGS = 8
NO_KERNEL = "graphar has no kernel for these rows on this GPU"


@dataclass(frozen=True)
class NormGradientRow(Timing):
    """The measured and verified time of one method.

    Attributes:
        rows, columns: the shape of the bf16 tensors.
        summed: whether the sum of input and residual has a gradient of its own.
        least_nbytes: the bytes of all operands and results, each once.
        floor_us: the time that these bytes take at the memory's rate; None if the rate is unknown.
        peak_nbytes: the most memory that one call takes beside its operands. None for "backward", and on the CPU.
    """

    world_size: ClassVar[int] = 1
    method: str
    passes: str
    rows: int
    columns: int
    summed: bool
    time_us: Deciles
    least_nbytes: int
    floor_us: float | None
    peak_nbytes: int | None
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return self.passes, *words_of((self.rows, self.columns), self.summed)


@dataclass(frozen=True)
class NormGradientPlan:
    device: str
    shapes: Sequence[Shape]
    methods: Sequence[str]


def words_of(shape: Shape, summed: bool) -> tuple[str, str]:
    return "{} x {}".format(*shape), f"{'with' if summed else 'without'} a gradient of the sum"


def least_nbytes(passes: str, shape: Shape, summed: bool) -> int:
    """Returns the bytes of all operands and results. The new residual counts twice if both passes are measured."""
    tensor, weight = shape[0] * shape[1] * ITEMSIZE, shape[1] * ITEMSIZE
    backward = (3 + summed) * tensor + 2 * weight
    return backward if passes == BACKWARD else backward + 4 * tensor + weight


class Operands(NamedTuple):
    """The bf16 tensors of a case. The first three are leaves of autograd."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    of_normed: Tensor
    of_summed: Tensor | None


Forward = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (x, residual, weight) -> (normed, summed)
# (normed, summed, operands, whether it runs again) -> the gradients of x, residual and weight
Backward = Callable[[Tensor, Tensor, Operands, bool], tuple[Tensor, ...]]
Method = tuple[Forward, Backward]


def make_operands(shape: Shape, summed: bool, device: str) -> Operands:
    """Returns random data whose gradients have no negligible term.

    The gradient of the normed rows correlates with the rows. With independent data the mean in a row's gradient would
    nearly vanish, and a method without it would seem right.
    """
    generator = torch.Generator(device).manual_seed(0)
    shapes = (shape, shape, shape[1:], shape, shape)
    draw = partial(torch.randn, dtype=torch.bfloat16, device=device, generator=generator)
    x, residual, weight, noise, of_summed = (draw(one) for one in shapes)
    leaves = [one.requires_grad_() for one in (x, residual, 1 + weight / 4)]
    return Operands(*leaves, noise + x.detach(), of_summed if summed else None)


def make_method(name: str, summed: bool) -> Method:
    if name == OWN:
        return own_forward, own_backward
    function = add_and_norm if summed else add_and_norm_detached
    return compiled(function) if name == COMPILED else function, autograd


@torch.no_grad()
def own_forward(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    if not x.is_cuda:
        return norm_numerics.specification(x, residual, weight, EPS, OFFSET)
    if not residual_norm.serves(x):
        raise UnsupportedError(missing_software() or NO_KERNEL)
    normed, summed = torch.empty_like(x), torch.empty_like(x)
    residual_norm.norm(x, residual, weight, normed, summed, EPS, OFFSET)
    return normed, summed


@torch.no_grad()
def own_backward(normed: Tensor, summed: Tensor, operands: Operands, retain: bool) -> tuple[Tensor, ...]:
    if summed.is_cuda and not residual_norm.serves_backward(summed):  # the op would take its specification
        raise UnsupportedError(missing_software() or NO_KERNEL)
    op = torch.ops.graphar.residual_rmsnorm_backward
    of_rows, of_weight = op(operands.of_normed, operands.of_summed, summed, operands.weight, EPS, OFFSET, True, 0)
    return of_rows, of_rows, of_weight


def add_and_norm_detached(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the results of ``add_and_norm``, the sum without gradient. Otherwise autograd would add zeros to it."""
    normed, summed = add_and_norm(x, residual, weight)
    return normed, summed.detach()


def compiled(function: Callable) -> Callable:
    """Returns ``function`` compiled by Inductor for static shapes. Its backward pass may run more than once."""
    from torch._functorch import config as of_autograd
    from torch._inductor import config

    config.compile_threads = 1  # starting a pool of processes takes longer than compiling one function
    # A backward pass that reuses the memory of saved tensors runs once. Older versions of torch do not see that it is
    # to run again.
    of_autograd.donated_buffer = False
    return torch.compile(function, dynamic=False)


def autograd(normed: Tensor, summed: Tensor, operands: Operands, retain: bool) -> tuple[Tensor, ...]:
    outputs = [(normed, operands.of_normed), (summed, operands.of_summed)]
    used, gradients = zip(*[one for one in outputs if one[1] is not None], strict=True)
    return torch.autograd.grad(used, operands[:3], gradients, retain_graph=retain)


@torch.no_grad()
def specified(operands: Operands) -> tuple[Tensor, ...]:
    """Returns the bits that graphar promises: normed rows, sums, the gradients of x and residual, and the weight's."""
    normed, summed = norm_numerics.specification(*operands[:3], EPS, OFFSET)
    gradients = operands.of_normed, operands.of_summed
    of_rows, of_weight = norm_gradients.specification(*gradients, summed, operands.weight, EPS, OFFSET)
    return normed, summed, of_rows, of_rows, of_weight


@torch.no_grad()
def exact(operands: Operands) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the results of :func:`specified` in fp64, and the errors that a peer may have.

    With r the rounded sum, s = 1 / root mean square, u = r s and g w the gradient times the weight, a row's gradient is
    s (g w) - s u mean(g w u) + of_summed. A rounding to bf16 changes a factor by at most half a machine epsilon. A peer
    may round as often as this: the second term has s once, u twice, g w once, and u holds r and s. A peer that does not
    round the sum, as a compiled norm, differs by half an epsilon in each r and so in each s. That makes 1 + 2 + 2
    changes, one more if g w is rounded, one for the rounding of the result and one for that of its sum with of_summed:
    ROUNDINGS. The first term, the normed rows and a weight's gradient have fewer. So an error may be half an epsilon
    times ROUNDINGS of the sum of the terms' magnitudes. Sums in fp32 add much less: the errors of s average out.
    """
    x, residual, weight, of_normed, more = operands
    r, w, g = (one.double() for one in (x + residual, weight + OFFSET, of_normed))
    s = (r.square().mean(-1, keepdim=True) + EPS).rsqrt()
    u, scaled = r * s, g * w
    second = s * u * (scaled * u).mean(-1, keepdim=True)
    of_rows, magnitude = s * scaled - second, s * (scaled.abs() + u.abs() * (scaled * u).abs().mean(-1, keepdim=True))
    if more is not None:
        of_rows, magnitude = of_rows + more, magnitude + more.abs()
    normed, terms = u * w, g * u
    values = normed, r, of_rows, of_rows, terms.sum(0)
    share = ROUNDINGS * torch.finfo(x.dtype).eps / 2
    limits = [share * one for one in (normed.abs(), r.abs(), magnitude, magnitude, terms.abs().sum(0))]
    return values, tuple(limits)


class Trial:
    """Runs one method. ``results`` are those of its last call: gradients, for BOTH after normed rows and sums."""

    def __init__(self, name: str, passes: str, method: Method, operands: Operands) -> None:
        self.name, self.passes, self.operands = name, passes, operands
        self._forward, self._backward = method
        self._retained: tuple[Tensor, Tensor] | None = None
        self.results: tuple[Tensor, ...] = ()
        self.peak_nbytes: int | None = None

    def run(self, calls: int) -> None:
        for _ in range(calls):
            self.results = self._call()

    def _call(self) -> tuple[Tensor, ...]:
        if self.passes == BACKWARD:
            return self._backward(*self._retained, self.operands, True)
        outputs = self._forward(*self.operands[:3])
        return *outputs, *self._backward(*outputs, self.operands, False)

    def make_launch(self) -> Callable[[], None]:
        if self.passes == BACKWARD:
            self._retained = self._forward(*self.operands[:3])
        self.run(WARM_UP)
        if not self.operands.x.is_cuda:
            return partial(self.run, CALLS["cpu"])
        if self.passes == BOTH:
            self.peak_nbytes = self._peak_nbytes()
        # autograd runs a backward pass on the stream of the forward pass
        return capture(partial(self.run, CALLS["cuda"]), torch.cuda.current_stream())

    def _peak_nbytes(self) -> int:
        self.results = ()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run(1)
        return torch.cuda.max_memory_allocated() - before

    def count_wrong(self, launch: Callable[[], None]) -> int:
        """Runs the timed launch once more. Returns how many elements of the last call's results are wrong."""
        for one in self.results:
            one.detach().fill_(torch.nan)
        launch()
        found = tuple(one.detach() for one in self.results)
        if self.name == OWN:
            return count_wrong(found, specified(self.operands)[-len(found) :])
        values, limits = exact(self.operands)
        return count_far(found, values[-len(found) :], limits[-len(found) :])


def run_shape(plan: NormGradientPlan, shape: Shape, rank: int, port: int) -> Iterator[NormGradientRow | str]:
    """Measures all methods with one shape, in a process of its own."""
    stream = contextlib.nullcontext()
    if plan.device == "cuda":
        torch.cuda.set_device(0)
        ranks_of.raise_clocks(torch.device("cuda", 0))
        stream = torch.cuda.stream(torch.cuda.Stream())
    with stream:
        for summed in (True, False):
            yield from rows_of(plan, shape, summed)


def rows_of(plan: NormGradientPlan, shape: Shape, summed: bool) -> Iterator[NormGradientRow | str]:
    operands, ready = make_operands(shape, summed, plan.device), []
    rate = memory_rate() if plan.device == "cuda" else None
    for name in plan.methods:
        method = make_method(name, summed)
        for passes in PASSES:
            trial = Trial(name, passes, method, operands)
            try:
                ready.append((trial, trial.make_launch()))
            except Exception as error:
                yield ", ".join((name, passes, *words_of(shape, summed))) + f": {reason(error)}"
    times = time_in_turn([launch for _, launch in ready], REPEATS[plan.device], partial(time_us, plan.device))
    for (trial, launch), of_trial in zip(ready, times, strict=True):
        nbytes = least_nbytes(trial.passes, shape, summed)
        floor_us = nbytes / rate / 1e3 if rate else None
        wrong = trial.count_wrong(launch)
        identity = trial.name, trial.passes, *shape, summed
        yield NormGradientRow(*identity, deciles(of_trial), nbytes, floor_us, trial.peak_nbytes, wrong)


def time_us(device: str, launch: Callable[[], None]) -> float:
    """Returns the time of one call of a launch in microseconds."""
    time_of = ranks_of.host_time_us if device == "cpu" else ranks_of.graph_time_us
    return time_of(launch) / CALLS[device]


def reason(error: BaseException) -> str:
    """Returns two lines of an error, and of the error during which it was raised.

    The first line of an error of torch.compile names only the backend. The end of a capture that failed raises an error
    of its own.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()][:2]
    found = f"{type(error).__name__}: {' '.join(lines)}" if lines else type(error).__name__
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return f"{found} (after {reason(before)})" if before else found


def reason_of_process(error: ProcessException) -> str:
    """Returns the line that names the error. After errors of CUDA more lines follow."""
    found = re.search(r"^[\w.]*(Error|Exception)\b.*", str(error), re.MULTILINE)
    return found[0] if found else str(error).strip().splitlines()[-1]


@dataclass
class NormGradients(Report):
    rows: list[NormGradientRow] = field(default_factory=list)

    order: ClassVar[int] = 5
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--shapes 16x8192 2048x5120 4096x8192",
        quick_on_gpus="--shapes 4096x8192",
        quick_on_cpu="--shapes 64x1024",
    )
    has_spread: ClassVar[bool] = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        shapes = "rows and columns, such as 4096x8192 (default: from 16x8192 to 16384x4096; small ones on the CPU)"
        parser.add_argument("--shapes", type=shape_of, nargs="+", metavar="MxN", help=shapes)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> NormGradientPlan:
        device, shapes, methods = ("cuda", SHAPES, METHODS) if gpu_count else ("cpu", CPU_SHAPES, CPU_METHODS)
        return NormGradientPlan(device, options.shapes or shapes, methods)

    def measure(self, plan: NormGradientPlan) -> Iterator[NormGradientRow | str]:
        for shape in plan.shapes:
            try:
                yield from ranks_of.run(1, partial(run_shape, plan, shape))
            except ProcessException as error:
                yield f"{words_of(shape, True)[0]}: {reason_of_process(error)}"

    @classmethod
    def count(cls, plan: NormGradientPlan) -> int:
        return 2 * len(PASSES) * len(plan.shapes) * len(plan.methods)

    def sections(self) -> list[Section]:
        found = []
        for passes in PASSES:
            if cases := cases_of(self.rows, passes):
                found.append(Section(passes.capitalize(), [comparison(cases)]))
        peaks = peak_table(cases_of(self.rows, BOTH))
        return [*found, Section("Peak memory of forward and backward", [peaks])] if peaks else found

    def glance(self) -> Glance:
        ratios = of_best_peer(cases_of(self.rows, BACKWARD))
        over = words_for([row.method for row in self.rows if row.is_peer], {})
        named = {", ".join(words_of(*case)): one for case, one in ratios.items()}
        return Glance(f"graphar's time of the backward pass / that of {over}, by shape", named, NOT_SERVED)


def shape_of(text: str) -> Shape:
    """Returns rows and columns. Raises ValueError unless ``text`` is two positive integers with an x between them."""
    rows, columns = integers_of(text, 2)
    return rows, columns


Case = tuple[Shape, bool]  # and whether the sum has a gradient of its own
Cases = dict[Case, dict[str, NormGradientRow]]


def cases_of(rows: Sequence[NormGradientRow], passes: str) -> Cases:
    """Returns the rows by case and method."""
    mine = [row for row in rows if row.passes == passes]
    cases = group(mine, lambda row: ((row.rows, row.columns), row.summed))
    return {case: {row.method: row for row in of_case} for case, of_case in cases.items()}


def methods_of(cases: Cases) -> list[str]:
    return [name for name in METHODS if any(name in rows for rows in cases.values())]


def comparison(cases: Cases) -> str:
    methods, lines = methods_of(cases), []
    for (shape, summed), rows in cases.items():
        any_row, peer = next(iter(rows.values())), best_peer(rows.values())
        own = rows.get(OWN)
        cells = [
            words_of(shape, summed)[0],
            "yes" if summed else "no",
            *(time_cell(rows.get(name)) for name in methods),
        ]
        cells += [name_cell(peer), ratio_cell(ratio(own, peer))]
        cells += [number(any_row.least_nbytes / MB), number(any_row.floor_us)]
        lines.append([*cells, number(own.least_nbytes / own.median / 1e3) if own and not own.wrong else NOT_SERVED])
    header = ["rows x columns", "gradient of the sum", *(f"{name} (us)" for name in methods)]
    return table([*header, "best peer", "of_best_peer", "least (MB)", "least (us)", "graphar (GB/s)"], lines)


def peak_table(cases: Cases) -> str:
    """Returns a table with the peak memory of each method; an empty string if it was not measured."""
    methods, lines = methods_of(cases), []
    for (shape, summed), rows in cases.items():
        peaks = [rows[name].peak_nbytes if name in rows else None for name in methods]
        if any(peaks):
            cells = [number(None if one is None else one / MB) for one in peaks]
            lines.append([words_of(shape, summed)[0], "yes" if summed else "no", *cells])
    header = ["rows x columns", "gradient of the sum", *(f"{name} (MB)" for name in methods)]
    return table(header, lines) if lines else ""

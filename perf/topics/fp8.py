"""`python -m perf fp8`: times graphar's matmul of e4m3 operands, torch._scaled_mm and graphar's bf16, on one GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.plan.trials import WEIGHTS
from graphar.product import gemm, scaled_gemm
from perf.charts import Axis, Mark, Rows
from perf.harness import ranks as ranks_of
from perf.harness.timing import WARM_UP, capture, deciles, time_in_turn
from perf.models.decoder import normal
from perf.report import (
    NOT_SERVED,
    Arguments,
    Deciles,
    Glance,
    Report,
    Section,
    Timing,
    geometric_mean,
    group,
    plural,
    ratio,
    ratio_cell,
    table,
    time_cell,
)
from perf.topics.matmul import (
    CYCLED_NBYTES,
    LEAST_CALLS,
    MOST_CALLS,
    NEEDED,
    Shape,
    calls_of,
    is_far,
    run_rank,
    sentence,
    shape_of,
    words_of,
)
from perf.topics.matmul import ROWS as MANY_ROWS

TORCH, TORCH_BLOCKS = "torch, scales of rows", "torch, scales of blocks"
ROWS, BLOCKS, BF16 = "graphar, scales of rows", "graphar, scales of blocks", "graphar, bf16"
METHODS = (TORCH, ROWS, TORCH_BLOCKS, BLOCKS, BF16)
DECODE_ROWS = (1, 16, 64)
SHAPES: tuple[Shape, ...] = tuple((m, n, k) for n, k in WEIGHTS for m in sorted({*DECODE_ROWS, *MANY_ROWS}))
SOME = "--shapes 1x8192x7168 512x5120x8192 4096x8192x7168"
FEW = "--shapes 64x8192x7168 4096x8192x7168"
REPEATS = 9


@dataclass(frozen=True)
class ScaledRow(Timing):
    """The measured and verified time of one method.

    Attributes:
        method: one of METHODS.
        m, n, k: the operands are [m, k] and [n, k], both e4m3, or bf16 with the same values.
        time_us: the time of one call: median, p10 and p90 over the repeats.
        wrong: the number of elements that are too far from float64.
    """

    world_size: ClassVar[int] = 1
    method: str
    m: int
    n: int
    k: int
    time_us: Deciles
    wrong: int

    @property
    def shape(self) -> Shape:
        return self.m, self.n, self.k

    @property
    def what(self) -> tuple[str, ...]:
        return (words_of(self.shape),)


# ---- the measurement ------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """The tensors of a shape: A, the weights that calls use in turn, their scales, and the result of the last call."""

    a: Tensor
    weights: list[Tensor]
    of_rows: tuple[Tensor, Tensor]  # [M, 1] and [1, N]
    of_blocks: tuple[Tensor, Tensor]  # [M, K / BLOCK], whose columns are contiguous, and [N / BLOCK, K / BLOCK]
    out: Tensor

    def weight(self, call: int) -> Tensor:
        return self.weights[call % len(self.weights)]

    def scales(self, method: str) -> tuple[Tensor, Tensor]:
        return self.of_blocks if method in (BLOCKS, TORCH_BLOCKS) else self.of_rows

    def in_bf16(self) -> Operands:
        return self._replace(a=self.a.bfloat16(), weights=[one.bfloat16() for one in self.weights])


def make_operands(shape: Shape, device: torch.device) -> Operands:
    """Returns random data. The weights take CYCLED_NBYTES or more, unless each call of a graph has its own."""
    m, n, k = shape
    count = min(-(-CYCLED_NBYTES // (n * k)) + 1, calls_of(shape))
    weights = [normal(1 + at, (n, k), device).to(FP8) for at in range(count)]
    blocks = -(-k // BLOCK)
    shapes = ((m, 1), (1, n), (blocks, m), (-(-n // BLOCK), blocks))
    scales = [normal(100 + at, one, device).float().abs().add_(0.5).div_(k**0.25) for at, one in enumerate(shapes)]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    return Operands(normal(0, (m, k), device).to(FP8), weights, (*scales[:2],), (scales[2].t(), scales[3]), out)


def multiply(method: str, given: Operands, calls: int) -> None:
    for at in range(calls):
        a_scale, w_scale = given.scales(method)
        if method == BF16:
            gemm.matmul(given.a, given.weight(at), given.out)
        elif method in (TORCH, TORCH_BLOCKS):
            w_scale = w_scale if method == TORCH else w_scale.t()
            torch._scaled_mm(given.a, given.weight(at).t(), a_scale, w_scale, out_dtype=given.out.dtype, out=given.out)
        else:
            scaled_gemm.scaled_matmul(given.a, given.weight(at), given.out, a_scale=a_scale, w_scale=w_scale)


def make_launch(method: str, given: Operands, calls: int) -> Callable[[], None]:
    """Returns the replay of a graph of ``calls`` calls."""
    multiply(method, given, WARM_UP)
    return capture(partial(multiply, method, given, calls))


def rows_of(shape: Shape, device: torch.device) -> Iterator[ScaledRow | str]:
    given, calls = make_operands(shape, device), calls_of(shape)
    if reason := scaled_gemm.why_not(given.a, given.weight(0), given.out):
        yield f"{words_of(shape)}: {reason}"
        return
    in_bf16, launches = given.in_bf16(), {}
    for name in METHODS:
        try:
            launches[name] = make_launch(name, in_bf16 if name == BF16 else given, calls)
        except RuntimeError as error:  # torch serves scales of blocks in some shapes, and with some releases of CUDA
            if name != TORCH_BLOCKS:
                raise
            yield f"{words_of(shape)}: {name}: {str(error).splitlines()[0]}"
    times = time_in_turn(list(launches.values()), REPEATS, lambda launch: ranks_of.graph_time_us(launch) / calls)
    for method, of_method in zip(launches, times, strict=True):
        wrong = count_wrong(method, launches[method], given, calls)
        yield ScaledRow(method, *shape, deciles(of_method), wrong)


# ---- what is right --------------------------------------------------------------------------------------------------

# A tensor core keeps 13 bits below the largest term that one of its instructions adds. In random data few terms are
# four times as large as others.
LOST = 2.0**-11


def exact(method: str, given: Operands, call: int) -> tuple[Tensor, Tensor]:
    """Returns the scaled product in fp64, and the sum of the magnitudes of each element's terms."""
    x, w = given.a.double(), given.weight(call).double()
    if method != BF16:
        a_scale, w_scale = given.scales(method)
        w_scale = w_scale if method in (BLOCKS, TORCH_BLOCKS) else w_scale.t()
        x, w = x * of_elements(a_scale, x), w * of_elements(w_scale, w)
    return x @ w.t(), x.abs() @ w.abs().t()


def of_elements(scale: Tensor, x: Tensor) -> Tensor:
    """Returns the scales of ``x``, of rows or of blocks, in a shape that can be multiplied by ``x``."""
    for axis, size in enumerate(x.shape):
        if scale.shape[axis] not in (1, size):
            scale = scale.repeat_interleave(BLOCK, axis).narrow(axis, 0, size)
    return scale


def count_wrong(method: str, launch: Callable[[], None], given: Operands, calls: int) -> int:
    """Replays a timed graph once more. Returns how many elements of its last call's result are too far from fp64.

    The tensor core may lose LOST of the sum of the magnitudes of an element's terms. Sums in fp32 and the rounding to
    bf16 lose less than a machine epsilon of bf16 of its value.
    """
    value, magnitude = exact(method, given, calls - 1)
    given.out.fill_(torch.nan)
    launch()
    limit = LOST * magnitude + torch.finfo(given.out.dtype).eps * value.abs()
    return int(is_far(given.out, value, limit).sum())


# ---- the topic ------------------------------------------------------------------------------------------------------


@dataclass
class Scaled(Report):
    rows: list[ScaledRow] = field(default_factory=list)

    name: ClassVar[str] = "fp8"
    title: ClassVar[str] = "Matmuls of e4m3 operands"
    order: ClassVar[int] = 9
    help: ClassVar[str] = "time graphar's matmul of e4m3 operands with scales, torch._scaled_mm, and bf16, on one GPU"
    arguments: ClassVar[Arguments] = Arguments(on_gpus=SOME, quick_on_gpus=FEW, on_cpu=SOME, quick_on_cpu=FEW)
    has_spread: ClassVar[bool] = True
    notes: ClassVar[str] = f"""\
- M, N, K: activations [M, K] are multiplied by the transpose of a weight [N, K], on one GPU. Both are e4m3, all rows
  are contiguous, and results are bf16.
- torch: `torch._scaled_mm(a, w.t(), a_scale, w_scale, out=out)` with a scale for each row of A and of W, without
  `use_fast_accum`. torch, blocks: the same with scales of blocks.
- rows, blocks: graphar's kernel with a scale for each row of A and of W, or for each 1 x {BLOCK} of A and {BLOCK} x
  {BLOCK} of W.
- bf16: graphar's matmul of the same values in bf16.
- times: microseconds of one call. A time is the median of {REPEATS} repeats of a CUDA graph of {LEAST_CALLS} to
  {MOST_CALLS} calls, fewer for large products. Methods took turns, and had the same operands. Consecutive calls use
  different weights, so that a call does not find its weight in the L2 cache, as in a model.
- a ratio below 1.00: the former is faster. Differences under 3 % are noise.

Every result is that of a replay of the timed graph, and was compared with float64. A tensor core keeps 13 bits below
the largest of the terms that one of its instructions adds, so an error may be 2^-11 of the sum of the magnitudes of an
element's terms, and one rounding to bf16."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        shapes = f"M, N and K, such as 4096x8192x7168 (default: {len(SHAPES)} shapes)"
        parser.add_argument("--shapes", type=shape_of, nargs="+", metavar="MxNxK", help=shapes)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> Sequence[Shape]:
        """Returns the shapes to measure. Ends the program without a GPU."""
        if not gpu_count:
            sys.exit(NEEDED)
        return options.shapes or SHAPES

    def measure(self, plan: Sequence[Shape]) -> Iterator[ScaledRow | str]:
        yield from ranks_of.run(1, partial(run_rank, rows_of, plan))

    @classmethod
    def count(cls, plan: Sequence[Shape]) -> int:
        return len(plan) * len(METHODS)

    def line(self, row: ScaledRow) -> str:
        return f"{row.what[0]:<20} {row.method:>26} {row.median:>9.2f} us {row.wrong:>6} wrong"

    # ---- the report --------------------------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        cases = cases_of(self.rows)
        few = {shape: case for shape, case in cases.items() if shape[0] < max(DECODE_ROWS)}
        many = {shape: case for shape, case in cases.items() if shape not in few}
        groups = {f"fewer than {max(DECODE_ROWS)} rows": few, f"{max(DECODE_ROWS)} rows or more": many}
        found = []
        for name in RATIOS:
            for words, mine in groups.items():
                ratios = ratios_of(name, mine)
                found.append(sentence(name, f"{plural(len(ratios), 'shape')} of {words}", ratios))
        return [one for one in found if one]

    def sections(self) -> list[Section]:
        cases = cases_of(self.rows)
        if not cases:
            return []
        times = ["torch (us)", "rows (us)", "torch, blocks (us)", "blocks (us)", "bf16 (us)"]
        head = ["M x N x K", *times, *RATIOS]
        lines = [
            [
                words_of(shape),
                *map(time_cell, case),
                *[ratio_cell(ratio(*of_case(case))) for of_case in RATIOS.values()],
            ]
            for shape, case in cases.items()
        ]
        charts = [ratio_chart(name, cases) for name in RATIOS]
        return [Section("Scales of rows, scales of blocks, torch and bf16", [table(head, lines)], charts)]

    def glance(self) -> Glance:
        found = ratios_of(ROWS_OF_TORCH, cases_of(self.rows))
        mean = f", geometric mean {geometric_mean(found.values()):.3f}" if found else ""
        return Glance(f"graphar's time of a matmul with scales of rows / torch's, by shape{mean}", found, NOT_SERVED)


class Case(NamedTuple):
    """The rows of one shape, in the order of METHODS."""

    torch: ScaledRow | None
    rows: ScaledRow | None
    torch_blocks: ScaledRow | None
    blocks: ScaledRow | None
    bf16: ScaledRow | None


ROWS_OF_TORCH = "rows/torch"
# By name, the two rows of a case.
RATIOS: dict[str, Callable[[Case], tuple[ScaledRow | None, ScaledRow | None]]] = {
    ROWS_OF_TORCH: lambda case: (case.rows, case.torch),
    "blocks/torch": lambda case: (case.blocks, case.torch_blocks),
    "blocks/rows": lambda case: (case.blocks, case.rows),
    "rows/bf16": lambda case: (case.rows, case.bf16),
}


def cases_of(rows: Sequence[ScaledRow]) -> dict[Shape, Case]:
    shapes = group(rows, lambda row: row.shape)
    return {
        shape: Case(*[next((row for row in mine if row.method == method), None) for method in METHODS])
        for shape, mine in shapes.items()
    }


def ratios_of(name: str, cases: Mapping[Shape, Case]) -> dict[str, float]:
    """Returns a ratio by shape. Shapes without correct results of both are left out."""
    ratios = {words_of(shape): ratio(*RATIOS[name](case)) for shape, case in cases.items()}
    return {shape: one for shape, one in ratios.items() if one is not None}


def ratio_chart(name: str, cases: Mapping[Shape, Case]) -> Rows:
    """Plots a ratio with a row for each weight, and a mark for each M."""
    marks = []
    for shape, case in cases.items():
        one = ratio(*RATIOS[name](case))
        if one is not None:
            series = "few rows" if shape[0] < max(DECODE_ROWS) else "more rows"
            marks.append(Mark("{1} x {2}".format(*shape), series, one, f"{words_of(shape)}: {one:.2f}"))
    return Rows(f"{name} by N x K", marks, Axis(name, form="{:.2f}".format), 1.0)

"""`python -m perf leaves`: times the tensor-parallel invariant matmul of one rank, and torch.mm, on one GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

import torch

from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.trials import WEIGHTS
from graphar.product import gemm
from perf.charts import Axis, Mark, Rows
from perf.harness import ranks as ranks_of
from perf.harness import verify
from perf.harness.timing import WARM_UP, capture, deciles, time_in_turn
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
    LEAST_CALLS,
    MOST_CALLS,
    NEEDED,
    ROWS,
    TORCH,
    Operands,
    Shape,
    calls_of,
    exact,
    is_far,
    limit_of,
    make_operands,
    run_rank,
    sentence,
    shape_of,
    words_of,
)

PLAIN, TREE = "graphar, in the order of K", f"graphar, {LEAVES} leaves"
METHODS = (TORCH, PLAIN, TREE)
DECODE_ROWS = (1, 16, 64)
LEAST_K = 4096
SHAPES: tuple[Shape, ...] = tuple((m, n, k) for n, k in WEIGHTS if k >= LEAST_K for m in sorted({*DECODE_ROWS, *ROWS}))
SOME = "--shapes 1x8192x7168 512x5120x8192 4096x4096x14336"
FEW = "--shapes 64x8192x7168 4096x8192x7168"
REPEATS = 9


@dataclass(frozen=True)
class LeavesRow(Timing):
    """The measured and verified time of one method.

    Attributes:
        method: one of METHODS.
        m, n, k: the operands are [m, k] and [n, k], both bf16.
        time_us: the time of one call: median, p10 and p90 over the repeats.
        wrong: the number of elements that are too far from float64, or have other bits than the tree of leaves.
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


def multiply(method: str, given: Operands, calls: int) -> None:
    for at in range(calls):
        if method == TORCH:
            torch.mm(given.a, given.weight(at).t(), out=given.out)
        else:
            gemm.matmul(given.a, given.weight(at), given.out, leaves=LEAVES if method == TREE else 1)


def make_launch(method: str, given: Operands, calls: int) -> Callable[[], None]:
    """Returns the replay of a graph of ``calls`` calls."""
    multiply(method, given, WARM_UP)
    return capture(partial(multiply, method, given, calls))


def rows_of(shape: Shape, device: torch.device) -> Iterator[LeavesRow | str]:
    given, calls = make_operands(shape, device), calls_of(shape)
    if reason := gemm.why_not(given.a, given.weight(0), given.out, LEAVES):
        yield f"{words_of(shape)}: {reason}"
        return
    launches = {method: make_launch(method, given, calls) for method in METHODS}
    times = time_in_turn(list(launches.values()), REPEATS, lambda launch: ranks_of.graph_time_us(launch) / calls)
    wrong = count_wrong(launches, given, calls)
    for method, of_method in zip(METHODS, times, strict=True):
        yield LeavesRow(method, *shape, deciles(of_method), wrong[method])


# ---- what is right --------------------------------------------------------------------------------------------------


def tree_of_leaves(given: Operands, call: int) -> torch.Tensor:
    """Returns the product in leaves that are multiplied one by one, in the order of K, and added as a tree."""
    parts = zip(given.a.chunk(LEAVES, 1), given.weight(call).chunk(LEAVES, 1), strict=True)
    nodes = [gemm.matmul(*part, out_dtype=torch.float32) for part in parts]
    while len(nodes) > 1:
        nodes = [left + right for left, right in zip(nodes[::2], nodes[1::2], strict=True)]
    return nodes[0].to(given.out.dtype)


def count_wrong(launches: Mapping[str, Callable[[], None]], given: Operands, calls: int) -> dict[str, int]:
    """Replays each timed graph once more. Returns how many elements of its last call's result are wrong, by method."""
    value, magnitude = exact(given.a, given.weight(calls - 1))
    tree, wrong = tree_of_leaves(given, calls - 1), {}
    for method, launch in launches.items():
        given.out.fill_(torch.nan)
        launch()
        bad = is_far(given.out, value, limit_of(method, given.a.shape[1], value, magnitude))
        if method == TREE:
            bad |= verify.differs(given.out, tree)
        wrong[method] = int(bad.sum())
    return wrong


# ---- the topic ------------------------------------------------------------------------------------------------------


@dataclass
class Leaves(Report):
    rows: list[LeavesRow] = field(default_factory=list)

    name: ClassVar[str] = "leaves"
    title: ClassVar[str] = "The tensor-parallel invariant matmul and torch's"
    order: ClassVar[int] = 8
    help: ClassVar[str] = f"time graphar's matmul in {LEAVES} leaves of K, and torch.mm, on one GPU"
    arguments: ClassVar[Arguments] = Arguments(on_gpus=SOME, quick_on_gpus=FEW, on_cpu=SOME, quick_on_cpu=FEW)
    has_spread: ClassVar[bool] = True
    notes: ClassVar[str] = f"""\
- M, N, K: activations [M, K] are multiplied by the transpose of a weight [N, K]. All are bf16 on one GPU, and all rows
  are contiguous.
- torch: `torch.mm(a, w.t(), out=out)`. order of K: graphar's kernel, whose bits depend on neither M nor N. {LEAVES}
  leaves: the same with K in {LEAVES} leaves that are added in fp32 as a binary tree, as a single rank computes with
  `partition="tp_invariant"`.
- times: microseconds of one call. A time is the median of {REPEATS} repeats of a CUDA graph of {LEAST_CALLS} to
  {MOST_CALLS} calls, fewer for large products. Methods took turns, and had the same operands. Consecutive calls use
  different weights, so that a call does not find its weight in the L2 cache, as in a model.
- leaves/torch: graphar's time in {LEAVES} leaves / torch's; below 1.00 graphar is faster. Differences under 3 % are
  noise.

Every result is that of a replay of the timed graph, and was compared with float64, as in the topic `matmul`. That in
leaves must have the bits of leaves that were multiplied one by one and added as a tree."""

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

    def measure(self, plan: Sequence[Shape]) -> Iterator[LeavesRow | str]:
        yield from ranks_of.run(1, partial(run_rank, rows_of, plan))

    @classmethod
    def count(cls, plan: Sequence[Shape]) -> int:
        return len(plan) * len(METHODS)

    def line(self, row: LeavesRow) -> str:
        return f"{row.what[0]:<20} {row.method:>26} {row.median:>9.2f} us {row.wrong:>6} wrong"

    # ---- the report --------------------------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        cases = cases_of(self.rows)
        decode = {shape: case for shape, case in cases.items() if shape[0] <= max(DECODE_ROWS)}
        more = {shape: case for shape, case in cases.items() if shape not in decode}
        groups = {f"up to {max(DECODE_ROWS)} rows": decode, "more rows": more}
        found = [(words, ratios_of(mine)) for words, mine in groups.items()]
        sentences = [
            sentence("leaves/torch", f"{plural(len(ratios), 'shape')} of {words}", ratios) for words, ratios in found
        ]
        return [one for one in sentences if one]

    def sections(self) -> list[Section]:
        cases = cases_of(self.rows)
        if not cases:
            return []
        head = [
            "M x N x K",
            "torch (us)",
            "order of K (us)",
            f"{LEAVES} leaves (us)",
            "order of K/torch",
            "leaves/torch",
        ]
        lines = [
            [
                words_of(shape),
                *map(time_cell, case),
                ratio_cell(ratio(case.plain, case.torch)),
                ratio_cell(ratio(case.tree, case.torch)),
            ]
            for shape, case in cases.items()
        ]
        return [Section("Leaves, the order of K and torch", [table(head, lines)], [ratio_chart(cases)])]

    def glance(self) -> Glance:
        found = ratios_of(cases_of(self.rows))
        mean = f", geometric mean {geometric_mean(found.values()):.3f}" if found else ""
        return Glance(f"graphar's time of a matmul in {LEAVES} leaves / torch's, by shape{mean}", found, NOT_SERVED)


class Case(NamedTuple):
    """The rows of one shape, in the order of METHODS."""

    torch: LeavesRow | None
    plain: LeavesRow | None
    tree: LeavesRow | None


def cases_of(rows: Sequence[LeavesRow]) -> dict[Shape, Case]:
    shapes = group(rows, lambda row: row.shape)
    return {
        shape: Case(*[next((row for row in mine if row.method == method), None) for method in METHODS])
        for shape, mine in shapes.items()
    }


def ratios_of(cases: Mapping[Shape, Case]) -> dict[str, float]:
    """Returns leaves/torch by shape. Shapes without correct results of both are left out."""
    ratios = {words_of(shape): ratio(case.tree, case.torch) for shape, case in cases.items()}
    return {shape: one for shape, one in ratios.items() if one is not None}


def ratio_chart(cases: Mapping[Shape, Case]) -> Rows:
    """Plots the ratio with a row for each weight, and a mark for each M."""
    marks = []
    for shape, case in cases.items():
        one = ratio(case.tree, case.torch)
        if one is not None:
            series = "decode" if shape[0] <= max(DECODE_ROWS) else "more rows"
            marks.append(Mark("{1} x {2}".format(*shape), series, one, f"{words_of(shape)}: {one:.2f}"))
    return Rows("leaves/torch by N x K", marks, Axis("leaves/torch", form="{:.2f}".format), 1.0)

"""The base of topics that compare methods of one matmul, over many shapes, on one GPU.

A topic has rows, methods and shapes. It says how a call multiplies, what is wrong, and which times are divided.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from graphar.plan.algorithms import MATMUL_ARCH
from graphar.runtime import launcher
from graphar.runtime.availability import missing_software
from perf.harness import ranks as ranks_of
from perf.harness.timing import WARM_UP, capture, deciles, time_in_turn
from perf.md import NOT_SERVED, plural, ratio_cell, table, time_cell
from perf.models.decoder import normal
from perf.ratios import geometric_mean, group, ratio
from perf.report import Arguments, Deciles, Glance, Report, Section, Timing

Shape = tuple[int, int, int]  # M, N, K

MANY_ROWS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
DECODE_ROWS = (1, 16, 64)
# The weights that calls use in turn. They take five times the L2 cache of an H200, so that no weight is still in L2.
CYCLED_MB = 256
CYCLED_NBYTES = CYCLED_MB << 20
# A graph has as many calls as have this many floating-point operations, within the bounds.
GRAPH_FLOPS, LEAST_CALLS, MOST_CALLS = 10**12, 5, 20
REPEATS = 9
NEEDED = f"graphar's matmul kernel needs a GPU of {MATMUL_ARCH}"


@dataclass(frozen=True)
class ProductRow(Timing):
    """The measured and verified time of one method.

    Attributes:
        m, n, k: the operands are [m, k] and [n, k].
        wrong: the number of elements that are too far from float64, or do not have the bits that the method promises.
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


Case = Mapping[str, ProductRow]  # the rows of one shape, by method
Pair = tuple[ProductRow | None, ProductRow | None]
IsWrong = Callable[[str], Tensor]  # (method) -> a mask of the wrong elements of its result


def words_of(shape: Shape) -> str:
    return "{} x {} x {}".format(*shape)


def shape_of(text: str) -> Shape:
    """Returns M, N and K. Raises ValueError unless ``text`` is three positive integers with an x between them."""
    m, n, k = integers_of(text, 3)
    return m, n, k


def integers_of(text: str, count: int) -> tuple[int, ...]:
    """Returns ``count`` positive integers that have an x between them. Raises ValueError if ``text`` is not that."""
    if not re.fullmatch("x".join([r"[1-9]\d*"] * count), text):
        raise ValueError(text)
    return tuple(map(int, text.split("x")))


@dataclass(frozen=True)
class ProductOperands:
    """The tensors of a shape: A, the weights that calls use in turn, and the result of the last call."""

    a: Tensor
    weights: list[Tensor]
    out: Tensor

    def weight(self, call: int) -> Tensor:
        return self.weights[call % len(self.weights)]


def flops(shape: Shape) -> int:
    """Returns how many floating-point operations one call has: a multiplication and an addition for each term."""
    m, n, k = shape
    return 2 * m * n * k


def calls_of(shape: Shape) -> int:
    """Returns how many calls a graph has."""
    return min(max(GRAPH_FLOPS // flops(shape), LEAST_CALLS), MOST_CALLS)


def weight_count(shape: Shape, itemsize: int) -> int:
    """Returns how many weights take CYCLED_NBYTES or more, or the calls of a graph if these are fewer."""
    return min(-(-CYCLED_NBYTES // (itemsize * shape[1] * shape[2])) + 1, calls_of(shape))


def bf16_operands(shape: Shape, device: torch.device) -> ProductOperands:
    m, n, k = shape
    weights = [normal(1 + at, (n, k), device).mul_(k**-0.5) for at in range(weight_count(shape, 2))]
    return ProductOperands(normal(0, (m, k), device), weights, torch.empty(m, n, dtype=torch.bfloat16, device=device))


def run_calls(call: Callable[[int], object], calls: int) -> None:
    for at in range(calls):
        call(at)


def make_launch(call: Callable[[int], object], calls: int) -> Callable[[], None]:
    """Returns the replay of a graph of ``calls`` calls. ``call(n)`` makes the n-th."""
    run_calls(call, WARM_UP)
    return capture(partial(run_calls, call, calls))


def run_rank(topic: type[Products], shapes: Sequence[Shape], rank: int, port: int) -> Iterator[ProductRow | str]:
    """Measures all shapes of a topic, in a process of its own."""
    device = torch.device("cuda", 0)
    if reason := missing_software() or ("" if launcher.architecture(device.index) == MATMUL_ARCH else NEEDED):
        yield reason
        return
    torch.cuda.set_device(device)
    ranks_of.raise_clocks(device)
    for shape in shapes:
        yield from topic.rows_of(shape, device)
        torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next shape cannot use it


# Tensor cores add 16 products of bf16 at a time, and keep at least 22 bits of each sum.
ADDED, KEPT = 16, 2.0**-22


def exact(a: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the product in fp64, and the sum of the magnitudes of each element's terms."""
    x, w = a.double(), weight.double().t()
    return x @ w, x.abs() @ w.abs()


def limit_of(k: int, value: Tensor, magnitude: Tensor, may_split: bool) -> Tensor:
    """Returns the error that each element of a product of bf16 operands may have.

    No sum in fp32 is larger than the sum of magnitudes. A rounding to bf16 changes a number by at most half a machine
    epsilon of it. With ``may_split``, a method may split K and round partial products, whose magnitudes add up to no
    more than that sum. torch may.
    """
    half = torch.finfo(torch.bfloat16).eps / 2
    of_sums = k / ADDED * KEPT * magnitude
    limit = of_sums + half * (value.abs() + of_sums)
    return limit + half * magnitude if may_split else limit


def run_with(some: str, few: str) -> Arguments:
    """Returns the arguments of a run of all topics: ``some`` shapes, or ``few`` in a quick run, with any GPUs."""
    return Arguments(*[f"--shapes {shapes}" for shapes in (some, few, some, few)])


def pair(method: str, other: str) -> Callable[[Case], Pair]:
    return lambda case: (case.get(method), case.get(other))


@dataclass
class Products(Report):
    """The base of the topics.

    Class attributes:
        shapes: the shapes that are measured unless others are named.
        columns: the methods, each with the name of its column.
        refusable: the methods that may refuse a shape.
        ratios: by name, the two rows of a case whose times are divided.
        told: the ratios of the findings. Empty: all.
        groups: what shapes are told apart in the findings, each with its words there.
        heading: the title of the table.
        subject: the first ratio of the findings, in words.
    """

    shapes: ClassVar[Sequence[Shape]]
    columns: ClassVar[Mapping[str, str]]
    refusable: ClassVar[tuple[str, ...]] = ()
    ratios: ClassVar[Mapping[str, Callable[[Case], Pair]]]
    told: ClassVar[tuple[str, ...]] = ()
    groups: ClassVar[Mapping[str, str]] = {}
    heading: ClassVar[str]
    subject: ClassVar[str]
    has_spread: ClassVar[bool] = True

    # Measurement: a topic overrides these.
    @classmethod
    def operands(cls, shape: Shape, device: torch.device) -> ProductOperands:
        return bf16_operands(shape, device)

    @classmethod
    def why_not(cls, operands: ProductOperands) -> str | None:
        """Returns why graphar's kernel cannot multiply these; None if it can."""
        raise NotImplementedError

    @classmethod
    def multiply(cls, method: str, operands: ProductOperands, call: int) -> None:
        """Writes the product with a call's weight into the result."""
        raise NotImplementedError

    @classmethod
    def judge(cls, operands: ProductOperands, call: int) -> IsWrong:
        """Returns a function that says which elements of the result of a method's last call are wrong."""
        raise NotImplementedError

    @classmethod
    def make_row(cls, method: str, shape: Shape, time_us: Deciles, wrong: int) -> ProductRow:
        return ProductRow(method, *shape, time_us, wrong)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        shapes = f"M, N and K, such as 4096x8192x7168 (default: {len(cls.shapes)} shapes)"
        parser.add_argument("--shapes", type=shape_of, nargs="+", metavar="MxNxK", help=shapes)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> Sequence[Shape]:
        """Returns the shapes to measure. Ends the program without a GPU."""
        if not gpu_count:
            sys.exit(NEEDED)
        return options.shapes or cls.shapes

    @classmethod
    def count(cls, plan: Sequence[Shape]) -> int:
        return len(plan) * len(cls.columns)

    def measure(self, plan: Sequence[Shape]) -> Iterator[ProductRow | str]:
        yield from ranks_of.run(1, partial(run_rank, type(self), plan))

    @classmethod
    def rows_of(cls, shape: Shape, device: torch.device) -> Iterator[ProductRow | str]:
        operands, calls = cls.operands(shape, device), calls_of(shape)
        if reason := cls.why_not(operands):
            yield f"{words_of(shape)}: {reason}"
            return
        launches = {}
        for method in cls.columns:
            try:
                launches[method] = make_launch(partial(cls.multiply, method, operands), calls)
            except RuntimeError as error:
                if method not in cls.refusable:
                    raise
                yield f"{words_of(shape)}: {method}: {str(error).splitlines()[0]}"
        times = time_in_turn(list(launches.values()), REPEATS, lambda launch: ranks_of.graph_time_us(launch) / calls)
        wrong = cls.count_wrong(launches, operands, calls)
        for method, of_method in zip(launches, times, strict=True):
            yield cls.make_row(method, shape, deciles(of_method), wrong[method])

    @classmethod
    def count_wrong(
        cls, launches: Mapping[str, Callable[[], None]], operands: ProductOperands, calls: int
    ) -> dict[str, int]:
        """Replays each timed graph once more. Returns how many elements of its last call's result are wrong."""
        is_wrong, wrong = cls.judge(operands, calls - 1), {}
        for method, launch in launches.items():
            operands.out.fill_(torch.nan)
            launch()
            wrong[method] = int(is_wrong(method).sum())
        return wrong

    def cases(self) -> dict[Shape, Case]:
        shapes = group(self.rows, lambda row: row.shape)
        return {shape: {row.method: row for row in mine} for shape, mine in shapes.items()}

    @classmethod
    def group_of(cls, shape: Shape, case: Case) -> str:
        raise NotImplementedError

    def grouped(self) -> dict[str, dict[Shape, Case]]:
        """Returns the cases that have findings of their own, by the words that follow "shapes" there."""
        cases = self.cases()
        return {
            f" of {words}": {shape: case for shape, case in cases.items() if self.group_of(shape, case) == name}
            for name, words in self.groups.items()
        }

    def findings(self) -> list[str]:
        sentences = []
        for name in self.told or self.ratios:
            for words, cases in self.grouped().items():
                ratios = self.ratios_of(name, cases)
                sentences.append(sentence(name, f"{plural(len(ratios), 'shape')}{words}", ratios))
        return list(filter(None, sentences))

    def sections(self) -> list[Section]:
        return [Section(self.heading, [self.comparison()])] if self.rows else []

    def glance(self) -> Glance:
        ratios = self.ratios_of(next(iter(self.told or self.ratios)), self.cases())
        mean = f", geometric mean {geometric_mean(ratios.values()):.3f}" if ratios else ""
        return Glance(f"{self.subject}, by shape{mean}", ratios, NOT_SERVED)

    @classmethod
    def ratios_of(cls, name: str, cases: Mapping[Shape, Case]) -> dict[str, float]:
        """Returns a ratio by shape. Shapes without correct results of both are left out."""
        ratios = {words_of(shape): ratio(*cls.ratios[name](case)) for shape, case in cases.items()}
        return {shape: value for shape, value in ratios.items() if value is not None}

    def comparison(self) -> str:
        """Returns a table with a row for each shape: the time of each method, and the ratios."""
        head = ["M x N x K", *(f"{column} (us)" for column in self.columns.values()), *self.ratios]
        lines = [
            [words_of(shape), *(time_cell(case.get(method)) for method in self.columns), *self.ratio_cells(case)]
            for shape, case in self.cases().items()
        ]
        return table(head, lines)

    def ratio_cells(self, case: Case) -> list[str]:
        return [ratio_cell(ratio(*rows_of(case))) for rows_of in self.ratios.values()]


def sentence(name: str, where: str, ratios: Mapping[str, float]) -> str:
    """Returns the geometric mean of the ratios and the worst of them; an empty string if there are none."""
    if not ratios:
        return ""
    worst = max(ratios, key=ratios.__getitem__)
    mean = geometric_mean(ratios.values())
    return f"{name} over {where}: geometric mean {mean:.3f}, at worst {ratios[worst]:.2f} ({worst})."

"""`python -m perf matmul`: times graphar's matmul kernel with each of its tiles, and torch.mm, on one GPU."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from graphar.plan.algorithms import MATMUL_ARCH
from graphar.plan.matmuls import WAVE_TILE, choose_matmul, fills_wave
from graphar.plan.tiles import MATMUL_TILES, MatmulTile
from graphar.plan.trials import WEIGHTS
from graphar.product import gemm
from graphar.runtime import launcher
from graphar.runtime.availability import missing_software
from graphar.runtime.user_tables import find_table
from perf.charts import Axis, Mark, Rows
from perf.harness import ranks as ranks_of
from perf.harness import verify
from perf.harness.timing import WARM_UP, capture, deciles, time_in_turn
from perf.models.decoder import normal
from perf.report import (
    NOT_SERVED,
    Arguments,
    Choice,
    Deciles,
    Glance,
    Report,
    Section,
    Timing,
    best,
    geometric_mean,
    group,
    number,
    plural,
    ratio,
    ratio_cell,
    table,
    time_cell,
    time_table,
)

Shape = tuple[int, int, int]  # M, N, K
Row = TypeVar("Row")  # of a report

ROWS = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192)
SHAPES: tuple[Shape, ...] = tuple((m, n, k) for n, k in WEIGHTS for m in ROWS)
SOME = "--shapes 64x8192x2048 512x5120x8192 2048x6144x4096 4096x8192x2048 8192x8192x7168"
FEW = "--shapes 64x8192x2048 4096x8192x2048"

# The weights that calls use in turn. They take five times the L2 cache of an H200, so that no weight is still in L2.
CYCLED_NBYTES = 256 << 20

TORCH = "torch.mm"
OWN = "graphar:"  # followed by the name of a tile
# A graph has as many calls as have this many floating-point operations, within the bounds.
GRAPH_FLOPS, LEAST_CALLS, MOST_CALLS = 10**12, 5, 20
REPEATS = 9
WAVE = "at least one wave"
NEEDED = f"graphar's matmul kernel needs a GPU of {MATMUL_ARCH}"


def name_of(tile: MatmulTile) -> str:
    """Returns a tile's rows x columns x stages, and the blocks of its cluster, such as "128x128x6c2"."""
    cluster = f"c{tile.cluster}" if tile.cluster > 1 else ""
    return f"{tile.rows}x{tile.columns}x{tile.stages}{cluster}"


TILES = {f"{OWN}{name_of(tile)}": tile for tile in MATMUL_TILES}
METHODS = (TORCH, *TILES)


@dataclass(frozen=True)
class MatmulRow(Timing):
    """The measured and verified time of one method.

    Attributes:
        method: one of METHODS.
        m, n, k: the operands are [m, k] and [n, k], both bf16.
        is_taken: whether it is the tile that graphar takes by default.
        is_auto: whether "auto" multiplies by it before a sum: the tile taken, or torch.mm.
        sms: the number of SMs of the GPU.
        time_us: the time of one call: median, p10 and p90 over the repeats.
        wrong: the number of elements that are too far from float64, or differ from the other tiles' bits.
    """

    world_size: ClassVar[int] = 1
    method: str
    m: int
    n: int
    k: int
    is_taken: bool
    is_auto: bool
    sms: int
    time_us: Deciles
    wrong: int

    @property
    def shape(self) -> Shape:
        return self.m, self.n, self.k

    @property
    def what(self) -> tuple[str, ...]:
        return (words_of(self.shape),)


def words_of(shape: Shape) -> str:
    return "{} x {} x {}".format(*shape)


# ---- the measurement ------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """The bf16 tensors of a shape: A, the weights that calls use in turn, and the result of the last call."""

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


def make_operands(shape: Shape, device: torch.device) -> Operands:
    """Returns random data. The weights take CYCLED_NBYTES or more, unless each call of a graph has its own."""
    m, n, k = shape
    count = min(-(-CYCLED_NBYTES // (2 * n * k)) + 1, calls_of(shape))
    weights = [normal(1 + at, (n, k), device).mul_(k**-0.5) for at in range(count)]
    return Operands(normal(0, (m, k), device), weights, torch.empty(m, n, dtype=torch.bfloat16, device=device))


def multiply(method: str, given: Operands, calls: int) -> None:
    for at in range(calls):
        if method == TORCH:
            torch.mm(given.a, given.weight(at).t(), out=given.out)
        else:
            gemm.matmul(given.a, given.weight(at), given.out, tile=TILES[method])


def make_launch(method: str, given: Operands, calls: int) -> Callable[[], None]:
    """Returns the replay of a graph of ``calls`` calls."""
    multiply(method, given, WARM_UP)
    return capture(partial(multiply, method, given, calls))


def run_rank(
    rows_of: Callable[[Shape, torch.device], Iterator[Row | str]], shapes: Sequence[Shape], rank: int, port: int
) -> Iterator[Row | str]:
    """Measures all shapes with ``rows_of``, in a process of its own."""
    device = torch.device("cuda", 0)
    if reason := missing_software() or ("" if launcher.architecture(device.index) == MATMUL_ARCH else NEEDED):
        yield reason
        return
    torch.cuda.set_device(device)
    ranks_of.raise_clocks(device)
    for shape in shapes:
        yield from rows_of(shape, device)
        torch.cuda.empty_cache()  # a graph's memory stays in torch's pool, where the next shape cannot use it


def rows_of(shape: Shape, device: torch.device) -> Iterator[MatmulRow | str]:
    given, calls = make_operands(shape, device), calls_of(shape)
    if reason := gemm.why_not(given.a, given.weight(0), given.out):
        yield f"{words_of(shape)}: {reason}"
        return
    launches = {method: make_launch(method, given, calls) for method in METHODS}
    times = time_in_turn(list(launches.values()), REPEATS, lambda launch: ranks_of.graph_time_us(launch) / calls)
    wrong = count_wrong(launches, given, calls)
    sms = launcher.sm_count(device.index)
    taken = gemm.default_tile(device.index, *shape, sms)
    policy = find_table(torch.cuda.get_device_name(device)).matmul
    auto = taken if choose_matmul(policy, *shape, sms).own else None
    for method, of_method in zip(METHODS, times, strict=True):
        tile = TILES.get(method)  # None: torch's
        yield MatmulRow(method, *shape, tile == taken, tile == auto, sms, deciles(of_method), wrong[method])


# ---- what is right --------------------------------------------------------------------------------------------------

# Tensor cores add 16 products at a time, and keep at least 22 bits of each sum.
ADDED, KEPT = 16, 2.0**-22


def exact(a: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the product in fp64, and the sum of the magnitudes of each element's terms."""
    x, w = a.double(), weight.double().t()
    return x @ w, x.abs() @ w.abs()


def limit_of(method: str, k: int, value: Tensor, magnitude: Tensor) -> Tensor:
    """Returns the error that each element may have.

    No sum in fp32 is larger than the sum of magnitudes. A rounding to bf16 changes a number by at most half a machine
    epsilon of it. torch may split K and round partial products, whose magnitudes add up to no more than that sum.
    """
    half = torch.finfo(torch.bfloat16).eps / 2
    of_sums = k / ADDED * KEPT * magnitude
    limit = of_sums + half * (value.abs() + of_sums)
    return limit + half * magnitude if method == TORCH else limit


def is_far(found: Tensor, value: Tensor, limit: Tensor) -> Tensor:
    """Returns a mask of the elements whose error exceeds the limit or is NaN."""
    return ~((found.double() - value).abs() <= limit)


def count_wrong(launches: Mapping[str, Callable[[], None]], given: Operands, calls: int) -> dict[str, int]:
    """Replays each timed graph once more. Returns how many elements of its last call's result are wrong, by method.

    The bits of a result do not depend on the tile, so all tiles are compared with the first.
    """
    value, magnitude = exact(given.a, given.weight(calls - 1))
    wrong: dict[str, int] = {}
    bits: Tensor | None = None
    for method, launch in launches.items():
        given.out.fill_(torch.nan)
        launch()
        bad = is_far(given.out, value, limit_of(method, given.a.shape[1], value, magnitude))
        if method in TILES:
            bits = given.out.clone() if bits is None else bits
            bad |= verify.differs(given.out, bits)
        wrong[method] = int(bad.sum())
    return wrong


# ---- the topic ------------------------------------------------------------------------------------------------------


@dataclass
class Matmul(Report):
    rows: list[MatmulRow] = field(default_factory=list)

    name: ClassVar[str] = "matmul"
    title: ClassVar[str] = "graphar's matmul and torch's"
    order: ClassVar[int] = 7
    help: ClassVar[str] = "time graphar's matmul with each of its tiles, and torch.mm, on one GPU"
    arguments: ClassVar[Arguments] = Arguments(on_gpus=SOME, quick_on_gpus=FEW, on_cpu=SOME, quick_on_cpu=FEW)
    has_spread: ClassVar[bool] = True
    notes: ClassVar[str] = f"""\
- M, N, K: activations [M, K] are multiplied by the transpose of a weight [N, K]. All are bf16 on one GPU, and all rows
  are contiguous.
- torch: `torch.mm(a, w.t(), out=out)`. graphar: the kernel of its fused and batch-invariant matmuls, on all SMs,
  without a collective.
- tiles: rows x columns x stages, such as 128x128x6. With c2, clusters of two thread blocks load the weight together.
- taken: the tile that graphar takes by default, by an estimate. best: the fastest tile in the same run whose result was
  correct.
- times: microseconds of one call. A time is the median of {REPEATS} repeats of a CUDA graph of {LEAST_CALLS} to
  {MOST_CALLS} calls, fewer for large products. Methods took turns, and had the same operands. Consecutive calls use
  different weights, {CYCLED_NBYTES >> 20} MB or one for each call, so that a call does not find its weight in the L2
  cache, as in a model. Activations are the same for all calls: those that fit are in the L2 cache.
- taken/torch, best/torch: graphar's time / torch's time; below 1.00 graphar is faster. Differences under 3 % are noise.
- taken/best: what the estimate loses; 1.00 is the fastest tile.
- auto: what `auto` multiplies by before a sum: the tile taken, or torch.mm where the tuning table says so.
- auto/better: the time of `auto` / that of the faster of torch.mm and the tile taken.
- {WAVE}: the result has at least as many tiles of {WAVE_TILE}x{WAVE_TILE} as the GPU has SMs.
- taken (TFLOP/s): 2 M N K / the taken tile's time.

Every result is that of a replay of the timed graph, and was compared with float64. An error may be one rounding to
bf16, and K / {ADDED} x 2^-22 of the sum of the magnitudes of an element's terms, for sums in fp32. torch may split K
and round partial products, so half a machine epsilon of that sum is allowed, too. The results of all tiles must have
the same bits."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        shapes = f"M, N and K, such as 4096x8192x2048 (default: {len(SHAPES)} shapes)"
        parser.add_argument("--shapes", type=shape_of, nargs="+", metavar="MxNxK", help=shapes)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> Sequence[Shape]:
        """Returns the shapes to measure. Ends the program without a GPU."""
        if not gpu_count:
            sys.exit(NEEDED)
        return options.shapes or SHAPES

    def measure(self, plan: Sequence[Shape]) -> Iterator[MatmulRow | str]:
        yield from ranks_of.run(1, partial(run_rank, rows_of, plan))

    @classmethod
    def count(cls, plan: Sequence[Shape]) -> int:
        return len(plan) * len(METHODS)

    def line(self, row: MatmulRow) -> str:
        marks = (", taken" if row.is_taken else "") + (", auto" if row.is_auto else "")
        return f"{row.what[0]:<20} {row.method:>20} {row.median:>9.2f} us {row.wrong:>6} wrong{marks}"

    # ---- the report --------------------------------------------------------------------------------------------------

    def findings(self) -> list[str]:
        cases = cases_of(self.rows)
        waves = {shape: case for shape, case in cases.items() if case.has_wave}
        groups = {plural(len(cases), "shape"): cases}
        if len(waves) < len(cases):
            groups[f"{plural(len(waves), 'shape')} of {WAVE}"] = waves
        found = []
        for name, of_case in RATIOS.items():
            found += [sentence(name, where, ratios_of(mine, of_case)) for where, mine in groups.items()]
        loss = self.loss_of_auto()
        found += [f"The time of `auto` / the faster of torch's and graphar's is at most {loss}."] if loss else []
        return [one for one in found if one]

    def sections(self) -> list[Section]:
        cases = cases_of(self.rows)
        if not cases:
            return []
        charts = [ratio_chart(name, cases) for name in (TAKEN_OF_TORCH, TAKEN_OF_BEST)]
        tiles = {words_of(shape): case.tiles for shape, case in cases.items()}
        return [
            Section("The tile taken, the best tile and torch", [comparison(cases)], charts),
            Section("Every tile", [time_table("M x N x K", tiles)]),
        ]

    def glance(self) -> Glance:
        found = ratios_of(cases_of(self.rows), RATIOS[TAKEN_OF_TORCH])
        mean = f", geometric mean {geometric_mean(found.values()):.3f}" if found else ""
        return Glance(f"graphar's time of a matmul / torch's, by shape{mean}", found, NOT_SERVED)

    def losses(self) -> list[tuple[str, Choice]]:
        cases = cases_of(self.rows)
        known = {shape: case for shape, case in cases.items() if ratio(case.auto, case.better) is not None}
        return [(words_of(shape), Choice(case.auto, case.better)) for shape, case in known.items()]


def shape_of(text: str) -> Shape:
    """Returns M, N and K. Raises ValueError unless ``text`` is three positive integers with an x between them."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text)
    if not found:
        raise ValueError(text)
    return int(found[1]), int(found[2]), int(found[3])


@dataclass(frozen=True)
class Case:
    """The rows of one shape.

    Attributes:
        peer: torch's row.
        tiles: graphar's rows by the name of the tile.
        has_wave: whether the result has at least as many tiles of WAVE_TILE x WAVE_TILE as the GPU has SMs.
    """

    peer: MatmulRow | None
    tiles: dict[str, MatmulRow]
    has_wave: bool

    @property
    def taken(self) -> MatmulRow | None:
        return next((row for row in self.tiles.values() if row.is_taken), None)

    @property
    def best(self) -> MatmulRow | None:
        return best(self.tiles.values())

    @property
    def auto(self) -> MatmulRow | None:
        """The row of what "auto" takes."""
        return next((row for row in (self.peer, *self.tiles.values()) if row and row.is_auto), None)

    @property
    def better(self) -> MatmulRow | None:
        """The faster of torch's row and the tile taken; None unless both were measured and are correct."""
        return None if ratio(self.taken, self.peer) is None else best((self.peer, self.taken))


Cases = Mapping[Shape, Case]
TAKEN_OF_TORCH, BEST_OF_TORCH, TAKEN_OF_BEST = "taken/torch", "best/torch", "taken/best"
AUTO_OF_BETTER = "auto/better"
RATIOS: dict[str, Callable[[Case], float | None]] = {
    TAKEN_OF_TORCH: lambda case: ratio(case.taken, case.peer),
    BEST_OF_TORCH: lambda case: ratio(case.best, case.peer),
    TAKEN_OF_BEST: lambda case: ratio(case.taken, case.best),
    AUTO_OF_BETTER: lambda case: ratio(case.auto, case.better),
}


def cases_of(rows: Sequence[MatmulRow]) -> Cases:
    found = {}
    for shape, mine in group(rows, lambda row: row.shape).items():
        peer = next((row for row in mine if row.is_peer), None)
        tiles = {tile_of(row): row for row in mine if row.is_own}
        found[shape] = Case(peer, tiles, fills_wave(*shape[:2], mine[0].sms))
    return found


def tile_of(row: MatmulRow | None) -> str:
    """Returns the name of a row's tile, or torch.mm."""
    return NOT_SERVED if row is None else row.method.removeprefix(OWN)


def ratios_of(cases: Cases, of_case: Callable[[Case], float | None]) -> dict[str, float]:
    """Returns a ratio by shape. Shapes without correct results of both rows are left out."""
    ratios = {words_of(shape): of_case(case) for shape, case in cases.items()}
    return {shape: one for shape, one in ratios.items() if one is not None}


def sentence(name: str, where: str, ratios: Mapping[str, float]) -> str:
    """Returns the geometric mean of the ratios and the worst of them; an empty string if there are none."""
    if not ratios:
        return ""
    worst = max(ratios, key=ratios.__getitem__)
    mean = geometric_mean(ratios.values())
    return f"{name} over {where}: geometric mean {mean:.3f}, at worst {ratios[worst]:.2f} ({worst})."


def comparison(cases: Cases) -> str:
    """Returns a table with a row for each shape."""
    lines = []
    for shape, case in cases.items():
        taken = case.taken
        cells = [words_of(shape), time_cell(case.peer), tile_of(taken), time_cell(taken)]
        cells += [tile_of(case.best), time_cell(case.best), tile_of(case.auto)]
        cells += [ratio_cell(of_case(case)) for of_case in RATIOS.values()]
        cells += [number(flops(shape) / taken.median / 1e6) if taken and not taken.wrong else NOT_SERVED]
        lines.append(cells)
    times = ["torch (us)", "taken", "taken (us)", "best", "best (us)", "auto"]
    return table(["M x N x K", *times, *RATIOS, "taken (TFLOP/s)"], lines)


def ratio_chart(name: str, cases: Cases) -> Rows:
    """Plots a ratio with a row for each weight, and a mark for each M."""
    marks = []
    for shape, case in cases.items():
        one = RATIOS[name](case)
        if one is not None:
            series = WAVE if case.has_wave else "less"
            hint = f"{words_of(shape)}: {one:.2f}, {tile_of(case.taken)} taken, {tile_of(case.best)} best"
            marks.append(Mark("{1} x {2}".format(*shape), series, one, hint))
    return Rows(f"{name} by N x K", marks, Axis(name, form="{:.2f}".format), 1.0)

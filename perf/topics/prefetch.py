"""`python -m perf prefetch`: times small all-reduces that prefetch the next matmul's weight into L2."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

import graphar
from perf.charts import Axis, Line, Plot
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks
from perf.harness.timing import WARM_UP, capture, deciles, time_in_turn
from perf.machine import check_world_sizes
from perf.report import (
    Deciles,
    Glance,
    Report,
    Section,
    Timing,
    by_method,
    ratio,
    ratio_cell,
    table,
    time_cell,
)

HIDDEN, ROWS = 8192, (1, 16, 64)
# Output features of the layers after an all-reduce in Llama-3-70B: query, key and value; gate.
FEATURES = (10240, 28672)
# The weights that calls use in turn. They take five times the L2 cache of an H200, so that no weight is still in L2.
CYCLED_NBYTES = 256 << 20
CALLS, REPEATS = 20, {"cuda": 15, "cpu": 4}
CPU_WORLD_SIZE, CPU_HIDDEN, CPU_ROWS, CPU_FEATURES, CPU_CYCLED_NBYTES = 2, 256, (1, 16), (512,), 1 << 20
ALLREDUCE, HINTED, MATMUL, SEQUENCE, PREFETCHED = METHODS = (
    "allreduce",
    "allreduce, prefetching",
    "matmul",
    "allreduce, matmul",
    "allreduce, prefetching, matmul",
)


@dataclass(frozen=True)
class PrefetchRow(Timing):
    """The measured and verified time of one method.

    Attributes:
        method: one of METHODS.
        m, n, k: the sum is [m, k], and the weight is [n, k].
        time_us: the time of one operation: median, p10 and p90 over the repeats. Each repeat has the time of the
            slowest rank.
        wrong: the number of wrong elements, summed over all ranks.
    """

    method: str
    world_size: int
    m: int
    n: int
    k: int
    time_us: Deciles
    wrong: int

    @property
    def what(self) -> tuple[str, ...]:
        return (f"{self.m} x {self.n} x {self.k}",)

    @property
    def is_own(self) -> bool:
        return True


@dataclass(frozen=True)
class PrefetchPlan:
    device: str
    world_size: int
    rows: Sequence[int] = ROWS
    features: Sequence[int] = FEATURES
    hidden: int = HIDDEN
    cycled_nbytes: int = CYCLED_NBYTES


# ---- on a rank ------------------------------------------------------------------------------------------------------


def run_rank(plan: PrefetchPlan, rank: int, port: int) -> Iterator[PrefetchRow]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()
    for features in plan.features:
        shape = (features // plan.world_size, plan.hidden)
        count = -(-plan.cycled_nbytes // (2 * shape[0] * shape[1])) + 1
        weights = [normal(1000 + at, shape, ranks.device).mul_(plan.hidden**-0.5) for at in range(count)]
        for m in plan.rows:
            yield from rows_of(m, weights, ranks)
    ranks.barrier()


class Trial:
    """Runs one method on one rank's data. ``sums`` and ``products`` are the results of its calls."""

    def __init__(self, method: str, x: Tensor, total: Tensor, weights: Sequence[Tensor]) -> None:
        self.method, self.x, self.total, self.weights = method, x, total, weights
        self.sums: list[Tensor] = []
        self.products: list[Tensor] = []

    def run(self) -> None:
        self.sums, self.products = [], []
        for at in range(CALLS):
            weight, y = self.weights[at % len(self.weights)], self.total
            if self.method != MATMUL:
                hint = weight if self.method in (HINTED, PREFETCHED) else None
                y = graphar.allreduce(self.x, prefetch=hint)
                self.sums.append(y)
            if self.method in (MATMUL, SEQUENCE, PREFETCHED):
                self.products.append(torch.mm(y, weight.t()))

    def make_launch(self) -> Callable[[], None]:
        for _ in range(WARM_UP):
            self.run()
        if not self.x.is_cuda:
            return self.run
        return capture(self.run)

    def count_wrong(self, launch: Callable[[], None], ranks: ProcessRanks) -> int:
        """Runs the timed launch once more. Returns the number of this process's wrong elements. Collective."""
        for result in (*self.sums, *self.products):
            result.fill_(torch.nan)
        launch()
        ranks.barrier()
        wrong = sum(differing(y, self.total) for y in self.sums)
        for at, product in enumerate(self.products):
            wrong += differing(product, torch.mm(self.total, self.weights[at % len(self.weights)].t()))
        return wrong


def differing(found: Tensor, expected: Tensor) -> int:
    return int((found.view(torch.int16) != expected.view(torch.int16)).sum())


def normal(seed: int, shape: tuple[int, int], device: torch.device) -> Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=device, generator=torch.Generator(device).manual_seed(seed))


def rows_of(m: int, weights: Sequence[Tensor], ranks: ProcessRanks) -> Iterator[PrefetchRow]:
    n, k = weights[0].shape
    xs = [normal(rank, (m, k), ranks.device) for rank in range(ranks.size)]
    total = graphar.reference.allreduce(xs)
    trials = [Trial(method, xs[ranks.rank], total, weights) for method in METHODS]
    ready = [(trial, trial.make_launch()) for trial in trials]
    mode = "graph" if ranks.device.type == "cuda" else "cpu"
    launches = [launch for _, launch in ready]
    times = time_in_turn(launches, REPEATS[ranks.device.type], lambda launch: ranks.time_us(launch, mode) / CALLS)
    wrong = ranks.total([trial.count_wrong(launch, ranks) for trial, launch in ready])
    for method, of_ranks, bad in zip(METHODS, ranks.slowest(times), wrong, strict=True):
        yield PrefetchRow(method, ranks.size, m, n, k, deciles(of_ranks), bad)


# ---- the topic ------------------------------------------------------------------------------------------------------


@dataclass
class Prefetch(Report):
    rows: list[PrefetchRow] = field(default_factory=list)

    name: ClassVar[str] = "prefetch"
    title: ClassVar[str] = "Prefetching the next weight into L2"
    order: ClassVar[int] = 6
    help: ClassVar[str] = "time all-reduces that prefetch the next matmul's weight into L2"
    has_spread: ClassVar[bool] = True
    notes: ClassVar[str] = """\
- M, N, K: the all-reduce sums bf16 tensors [M, K]. The matmul multiplies the sum by the transpose of a rank's weight
  [N, K].
- times: microseconds of one operation. A time is the median of 15 repeats of 20 operations, on GPUs in a CUDA graph.
  Each repeat has the time of the slowest rank. Methods took turns. The matmul is torch's. Consecutive calls use
  different weights, so that the weight is not already in L2.
- prefetching: `graphar.allreduce(x, prefetch=weight)`. On the CPU `prefetch` is ignored.
- of_unprefetched: the time of all-reduce and matmul with prefetching / their time without it; below 1.00 prefetching is
  faster.

Every sum was compared bit for bit with the sum of `graphar.reference`, and every product with torch's product of that
sum."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--world-size", type=int, nargs="+", metavar="N", help="ranks (default: all GPUs; 2 on the CPU)"
        )

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[PrefetchPlan]:
        """Returns one plan for each world size."""
        world_sizes = options.world_size or [gpu_count if gpu_count >= 2 else CPU_WORLD_SIZE]
        check_world_sizes(world_sizes, gpu_count)
        if gpu_count >= 2:
            return [PrefetchPlan("cuda", world_size) for world_size in world_sizes]
        of_cpu = CPU_ROWS, CPU_FEATURES, CPU_HIDDEN, CPU_CYCLED_NBYTES
        return [PrefetchPlan("cpu", world_size, *of_cpu) for world_size in world_sizes]

    def measure(self, plan: Sequence[PrefetchPlan]) -> Iterator[PrefetchRow]:
        for one in plan:
            yield from ranks_of.run(one.world_size, partial(run_rank, one))

    # ---- the report --------------------------------------------------------------------------------------------------

    def sections(self) -> list[Section]:
        found = []
        for world_size in dict.fromkeys(row.world_size for row in self.rows):
            mine = [row for row in self.rows if row.world_size == world_size]
            found.append(Section(f"{world_size} ranks", [comparison(mine)], [ratio_plot(mine)]))
        return found

    def glance(self) -> Glance:
        found = {}
        for (world_size, n, m), mine in by_method(self.rows, lambda row: (row.world_size, row.n, row.m)).items():
            one = ratio(mine.get(PREFETCHED), mine.get(SEQUENCE))
            found |= {f"M = {m}, N = {n}, {world_size} ranks": one} if one else {}
        return Glance("time of an all-reduce and a matmul with prefetching / without it", found)


def comparison(rows: Sequence[PrefetchRow]) -> str:
    lines = []
    for (n, k, m), mine in by_method(rows, lambda row: (row.n, row.k, row.m)).items():
        with_it, without = mine.get(PREFETCHED), mine.get(SEQUENCE)
        of_without = ratio(with_it, without)
        times = [time_cell(mine.get(method)) for method in METHODS]
        lines.append([str(m), str(n), str(k), *times, ratio_cell(of_without)])
    return table(["M", "N", "K", *(f"{name} (us)" for name in METHODS), "of_unprefetched"], lines)


def ratio_plot(rows: Sequence[PrefetchRow]) -> Plot | None:
    """Plots a line for each layer."""
    lines = []
    for n in dict.fromkeys(row.n for row in rows):
        cases = by_method([row for row in rows if row.n == n], lambda row: row.m)
        both = {m: mine for m, mine in cases.items() if {SEQUENCE, PREFETCHED} <= mine.keys()}
        points = [(m, mine[PREFETCHED].median / mine[SEQUENCE].median) for m, mine in both.items()]
        hints = [
            f"M = {m}: {mine[PREFETCHED].median:.4g} us, without prefetching {mine[SEQUENCE].median:.4g} us"
            for m, mine in both.items()
        ]
        wrong = frozenset(at for at, mine in enumerate(both.values()) if mine[SEQUENCE].wrong or mine[PREFETCHED].wrong)
        lines += [Line(f"N = {n}", points, hints, wrong=wrong)] if points else []
    axes = Axis("M: rows of the sum", 2), Axis("time / time without", form="{:.2f}".format)
    return Plot("All-reduce and matmul", lines, *axes, [(1.0, "without prefetching")]) if lines else None

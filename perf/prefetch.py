"""`python -m perf prefetch`: all-reduces of a few rows, the matmul behind them, and its weight in L2 by then or not."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

import graphar
from perf import files, live, machine, world
from perf.graphs import capture
from perf.machine import check_world_sizes
from perf.ranks import ProcessRanks
from perf.tables import table

HIDDEN, ROWS = 8192, (1, 16, 64)
FEATURES = (
    10240,
    28672,
)  # of whole layers behind an all-reduce of Llama-3-70B: queries, keys and values; the MLP's gate
CYCLED_NBYTES = 256 << 20  # of weights, one after another: five times the L2 cache of an H200, so that each comes cold
CALLS, REPEATS, WARM_UP = 20, 15, 3
CPU_WORLD_SIZE, CPU_HIDDEN, CPU_ROWS, CPU_FEATURES, CPU_CYCLED_NBYTES = 2, 256, (1, 16), (512,), 1 << 20
ALLREDUCE, HINTED, MATMUL, SEQUENCE, PREFETCHED = METHODS = (
    "allreduce",
    "allreduce, prefetching",
    "matmul",
    "allreduce, matmul",
    "allreduce, prefetching, matmul",
)

COLUMNS = """\
- M, K: rows and columns of the sum, bf16; N: columns of the product. The weight, [N, K] of one rank, was not in the L2
  cache before: each call took another one, of so many that L2 holds none by chance.
- times: microseconds of one operation, the median of 15 rounds of 20 that the methods take in turn, on GPUs in a CUDA
  graph; each round's the slowest rank's. The matmul is torch's.
- prefetching: `graphar.allreduce(x, prefetch=weight)`; on the CPU it is ignored.
- gained: by prefetching, of the all-reduce and the matmul together, and as a share of the matmul's time alone.

Every sum, and the product behind it, was compared bit for bit with the product of `graphar.reference`'s sum."""


@dataclass(frozen=True)
class PrefetchRow:
    """Attributes:
    method: one of METHODS.
    m, n, k: the sum is [m, k], the weight [n, k].
    time_us: the median, the tenth and the ninetieth percentile; of one operation.
    wrong: elements of all ranks that differ from what they must be.
    """

    method: str
    world_size: int
    m: int
    n: int
    k: int
    time_us: dict[str, float]
    wrong: int


@dataclass(frozen=True)
class PrefetchPlan:
    device: str
    world_size: int
    rows: Sequence[int] = ROWS
    features: Sequence[int] = FEATURES
    hidden: int = HIDDEN
    cycled_nbytes: int = CYCLED_NBYTES


def add(commands) -> argparse.ArgumentParser:
    prefetch = commands.add_parser("prefetch", help="all-reduces that bring the next matmul's weight into L2")
    prefetch.add_argument("--world-size", type=int, nargs="+", metavar="N", help="default: all GPUs; 2 on the CPU")
    return prefetch


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """What was measured is written even where a later size fails."""
    on_gpus = block["gpu_count"] >= 2
    world_sizes = options.world_size or [block["gpu_count"] if on_gpus else CPU_WORLD_SIZE]
    check_world_sizes(world_sizes, block["gpu_count"])
    rows, skipped = [], []

    def report() -> tuple[Path, str]:
        return write(folder, block, rows, skipped, command), verdict((rows, skipped))

    with live.reported("prefetch", None, skipped, report) as advance:
        for world_size in world_sizes:
            plan = PrefetchPlan("cuda", world_size)
            if not on_gpus:
                plan = PrefetchPlan("cpu", world_size, CPU_ROWS, CPU_FEATURES, CPU_HIDDEN, CPU_CYCLED_NBYTES)
            for row in world.run(world_size, partial(run_rank, plan)):
                advance()
                rows.append(row)
    return int(any(row.wrong for row in rows))


# ---- on a rank ------------------------------------------------------------------------------------------------------


def run_rank(plan: PrefetchPlan, rank: int, port: int) -> Iterator[PrefetchRow]:
    ranks = world.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()
    for features in plan.features:
        shape = (features // plan.world_size, plan.hidden)
        count = -(-plan.cycled_nbytes // (2 * shape[0] * shape[1])) + 1
        weights = [normal(1000 + at, shape, ranks.device).mul_(plan.hidden**-0.5) for at in range(count)]
        for m in plan.rows:
            yield from rows_of(m, weights, ranks)
    ranks.level()


class Trial:
    """One method on one rank's data; ``sums`` and ``products`` are what its calls returned."""

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
        """Wrong elements on this process of what the timed launch computes. Collective."""
        for result in (*self.sums, *self.products):
            result.fill_(torch.nan)
        launch()
        ranks.level()
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
    times: list[list[float]] = [[] for _ in ready]
    for repeat in range(-1, REPEATS):  # the first turn warms up
        for (_, launch), of_trial in zip(ready, times, strict=True):
            time_us = ranks.time_us(launch, "graph" if ranks.device.type == "cuda" else "cpu") / CALLS
            if repeat >= 0:
                of_trial.append(time_us)
    wrong = ranks.total([trial.count_wrong(launch, ranks) for trial, launch in ready])
    for method, of_ranks, bad in zip(METHODS, ranks.slowest(times), wrong, strict=True):
        tenths = statistics.quantiles(of_ranks, n=10)
        time_us = {"median": statistics.median(of_ranks), "p10": tenths[0], "p90": tenths[-1]}
        yield PrefetchRow(method, ranks.size, m, n, k, time_us, bad)


# ---- the report -----------------------------------------------------------------------------------------------------

Found = tuple[Sequence[PrefetchRow], Sequence[str]]  # and what was not measured


def write(
    folder: Path, block: dict[str, object], rows: Sequence[PrefetchRow], skipped: list[str], command: str
) -> Path:
    """Both files. Returns the one for people."""
    content = {"machine": block, "command": command, "rows": [asdict(row) for row in rows], "skipped": skipped}
    return files.write(folder, "prefetch", content, markdown(block, (rows, skipped), command))


def found_in(content: dict) -> Found:
    """What :func:`write` was given, from its JSON."""
    return [PrefetchRow(**row) for row in content["rows"]], content["skipped"]


def markdown(block: dict[str, object], found: Found, command: str) -> str:
    rows, skipped = found
    parts = ["# The next weight, prefetched by an all-reduce", machine.one_line(block) + ".", verdict(found)]
    for world_size in dict.fromkeys(row.world_size for row in rows):
        parts += [f"## {world_size} ranks", comparison([row for row in rows if row.world_size == world_size])]
    if skipped:
        parts += ["## Not measured", "\n".join(f"- {one}" for one in skipped)]
    parts += ["## Columns", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def verdict(found: Found) -> str:
    """Whether all is right."""
    wrong = [f"{row.method} of {row.m} rows" for row in found[0] if row.wrong]
    return f"**WRONG RESULTS: {', '.join(wrong)}.**" if wrong else f"{len(found[0])} rows, every one verified."


def comparison(rows: Sequence[PrefetchRow]) -> str:
    lines = []
    for m, n, k in dict.fromkeys((row.m, row.n, row.k) for row in rows):
        mine = {row.method: row for row in rows if (row.m, row.n, row.k) == (m, n, k)}
        times = [_us(mine.get(method)) for method in METHODS]
        lines.append([str(m), str(n), str(k), *times, _gain(mine)])
    return table(["M", "N", "K", *METHODS, "gained"], lines)


def _us(row: PrefetchRow | None) -> str:
    if row is None:
        return "-"
    return "wrong" if row.wrong else f"{row.time_us['median']:.2f}"


def _gain(mine: dict[str, PrefetchRow]) -> str:
    rows = [mine.get(method) for method in (SEQUENCE, PREFETCHED, MATMUL)]
    if any(row is None or row.wrong for row in rows):
        return "-"
    sequence, prefetched, matmul = (row.time_us["median"] for row in rows)
    return f"{sequence - prefetched:.2f} us ({(sequence - prefetched) / matmul:.0%})"

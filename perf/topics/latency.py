"""`python -m perf latency`: times calls between ranks that share one GPU, beside the last committed report."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple

from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.plan.sizes import KB, MB, format_nbytes
from graphar.plan.work import MATMUL_ALLREDUCE
from perf import machine
from perf.harness import shared_gpu
from perf.harness.shared_gpu import Case
from perf.harness.timing import deciles
from perf.md import NOT_SERVED, number, plural, ratio_cell, table, time_cell
from perf.ratios import NOISE, extent, geometric_mean, group, ratio
from perf.report import Arguments, Deciles, Glance, Report, Section, Timing, read

WORLD_SIZES = (2, 3, 4)
REPEATS = 15
OWN = "graphar"
NEEDED = "calls between ranks that share a GPU: need a GPU of sm_90 or newer"
SERVER = Path(shared_gpu.__file__).relative_to(machine.ROOT)
LIMIT_S = 120.0  # after which a process that does not answer is ended
SUMS = (2, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)  # KB
FEW_SUMS = (8, 64, 512, 1024, 4096)
HIDDEN = 8192  # the columns of norms
TOKENS = (1, 4, 64, 256, 2048)
SKINNY = (1, 16, 64)  # rows
WEIGHTS = ((8192, 2048), (8192, 7168))  # columns and K of skinny matmuls
SHORT = {
    "allreduce": "all-reduce",
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    ALLREDUCE_NORM: "all-reduce + norm",
    REDUCESCATTER_NORM: "reduce-scatter + norm",
    MATMUL_ALLREDUCE: "matmul + all-reduce",
}


def cases(world_size: int) -> list[Case]:
    """Returns calls for all algorithms that `auto` takes, at sizes of the tables."""
    case = partial(Case, world_size=world_size)
    scattered = [
        case(op=op, size=size) for op in ("reducescatter", "allgather") for size in (64 * KB, MB, 4 * MB, 16 * MB)
    ]
    norms = [case(op=op, size=rows, columns=HIDDEN) for op in (ALLREDUCE_NORM, REDUCESCATTER_NORM) for rows in TOKENS]
    skinny = [case(op=MATMUL_ALLREDUCE, size=rows, columns=columns, k=k) for columns, k in WEIGHTS for rows in SKINNY]
    plain = skinny[-len(SKINNY) : -1]
    scaled = [unscaled._replace(scales=scales) for unscaled in plain for scales in ("rows", "blocks")]
    return [
        *(case(op="allreduce", size=size * KB) for size in SUMS),
        case(op="allreduce", size=256 * MB, dtype="float32"),
        case(op="allreduce", size=256 * MB),
        *scattered,
        *norms,
        *(
            case(op="allreduce", size=size, codec=codec)
            for codec in ("fp8_e4m3", "int4")
            for size in (256 * KB, 4 * MB)
        ),
        case(op="allreduce", size=256 * MB, codec="fp8_e4m3"),
        case(op="reducescatter", size=16 * MB, codec="fp8_e4m3"),
        *skinny,
        *scaled,
    ]


def few_cases(world_size: int) -> list[Case]:
    return [Case("allreduce", world_size, size * KB) for size in FEW_SUMS]


def words_of(case: Case) -> tuple[str, str]:
    """Returns the op with its options, and the size."""
    options = [option for option in (case.codec, case.dtype if case.dtype != "bfloat16" else "") if option]
    options += [f"FP8, scales of {case.scales}"] if case.scales else []
    op = f"{SHORT[case.op]} ({', '.join(options)})" if options else SHORT[case.op]
    if case.k:
        return op, f"{case.size} x {case.columns} x {case.k}"
    return op, f"{case.size} x {case.columns}" if case.columns else format_nbytes(case.size)


@dataclass(frozen=True)
class LatencyRow(Timing):
    """The measured and verified time of one call by one checkout.

    Attributes:
        method: OWN, or "graphar at" the commit of the other checkout.
        size: bytes, or rows and columns, between whole GPUs.
        algorithm, grid: what `auto` takes there, and the blocks x threads that one GPU has room for.
        share: how much of the data a rank has here.
        time_us: the time of one call on the slowest rank.
        before_us: the median in the last committed report of this GPU; None: there is none.
    """

    method: str
    op: str
    size: str
    world_size: int
    algorithm: str
    grid: str
    share: float
    calls: int
    time_us: Deciles
    wrong: int
    before_us: float | None = None

    @property
    def what(self) -> tuple[str, ...]:
        return self.op, self.size

    @property
    def key(self) -> tuple[int, str, str]:
        return self.world_size, self.op, self.size

    @property
    def of_before(self) -> float | None:
        return self.median / self.before_us if self.before_us and not self.wrong else None


class Process:
    """A process that times the calls of one checkout."""

    def __init__(self, checkout: Path) -> None:
        server = checkout / SERVER
        server = server if server.exists() else machine.ROOT / SERVER
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(server)],
            env=os.environ | {"PYTHONPATH": str(checkout)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, **asked: object) -> dict:
        """Returns the answer to a request; {"error": ...} if there is none."""
        timer = threading.Timer(LIMIT_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(f"{json.dumps(asked)}\n")
            self._process.stdin.flush()
            line = next((line for line in self._process.stdout if line.startswith("{")), None)
        except BrokenPipeError:
            line = None
        finally:
            timer.cancel()
        return json.loads(line) if line else {"error": "the process has ended"}

    def close(self) -> None:
        """Ends the process, which ends by itself where it waits for requests."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()


class LatencyPlan(NamedTuple):
    """What to measure.

    Attributes:
        checkouts: their folders by method, this one first.
        before: the medians of the last committed report, by what :attr:`LatencyRow.key` is.
    """

    cases: Sequence[Case]
    checkouts: dict[str, Path]
    repeats: int
    before: dict[tuple[int, str, str], float]


def rows_of(
    case: Case, processes: dict[str, Process], plan: LatencyPlan, seen: set[tuple]
) -> Iterator[LatencyRow | str]:
    """Yields the rows of one call. Sizes that are the same work on one GPU are measured once."""
    op, size = words_of(case)
    where = f"{op}, {size}, {plural(case.world_size, 'rank')}"
    made, amount = {}, None
    for method, process in processes.items():
        answer = process.ask(do="make", case=case, amount=amount)
        if "error" in answer:
            yield f"{where}, {method}: {answer['error']}"
            continue
        made[method], amount = answer, answer["amount"]
        work = (*case._replace(size=0), answer["algorithm"], answer["grid"], amount)
        if method == OWN and not case.columns:
            if work in seen:
                return
            seen.add(work)
    times: dict[str, list[float]] = {method: [] for method in made}
    for repeat in range(plan.repeats):
        for method in [*made][:: 1 if repeat % 2 == 0 else -1]:
            answer = processes[method].ask(do="time")
            if "error" in answer:
                yield f"{where}, {method}: {answer['error']}"
                break
            times[method].append(answer["time_us"])
    for method, call in made.items():
        wrong = processes[method].ask(do="verify")
        if "error" in wrong or not times[method]:
            yield f"{where}, {method}: {wrong.get('error', 'it was not timed')}"
            continue
        before = plan.before.get((case.world_size, op, size)) if method == OWN else None
        what = op, size, case.world_size, call["algorithm"], call["grid"], round(amount / case.amount, 4)
        yield LatencyRow(method, *what, call["calls"], deciles(times[method]), wrong["wrong"], before)


@dataclass
class Latency(Report):
    """The calls between ranks that share one GPU.

    Attributes:
        before: the commit and the date of the report that `before_us` is from; empty without one.
    """

    before: str = ""
    rows: list[LatencyRow] = field(default_factory=list)

    order: ClassVar[int] = 19
    # A run of all topics skips this one, because it measures no links.
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus=None, on_cpu=None, quick_on_gpus="--few --world-size 4", quick_on_cpu="--few --world-size 4"
    )
    has_spread: ClassVar[bool] = True

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        sizes = {"choices": WORLD_SIZES, "default": WORLD_SIZES, "help": "numbers of ranks, 2 to 4 (default: all)"}
        parser.add_argument("--world-size", type=int, nargs="+", metavar="N", **sizes)
        parser.add_argument("--few", action="store_true", help="a few sizes of the all-reduce")
        parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="calls whose words contain one")
        parser.add_argument("--baseline", type=Path, metavar="FOLDER", help="another checkout, timed in turn")
        repeats = "timings of each call (default: %(default)s)"
        parser.add_argument("--repeats", type=int, default=REPEATS, metavar="N", help=repeats)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> LatencyPlan:
        if not gpu_count:
            sys.exit(NEEDED)
        checkouts = {OWN: machine.ROOT}
        if options.baseline:
            if not (options.baseline / "graphar").is_dir():
                sys.exit(f"--baseline: {options.baseline} is no checkout of graphar")
            folder = options.baseline.resolve()
            known = machine.commit(folder) if (folder / ".git").exists() else None
            checkouts[f"{OWN} at {known or folder.name}"] = folder
        listed = few_cases if options.few else cases
        every = [case for world_size in options.world_size for case in listed(world_size)]
        wanted = [case for case in every if any(text in " ".join(words_of(case)) for text in options.only)]
        return LatencyPlan(wanted, checkouts, options.repeats, {})

    @classmethod
    def count(cls, plan: LatencyPlan) -> int:
        return len(plan.cases) * len(plan.checkouts)

    def measure(self, plan: LatencyPlan, start: Callable[[Path], Process] = Process) -> Iterator[LatencyRow | str]:
        self.before, medians = committed(machine.ROOT / "reports")
        plan, seen = plan._replace(before=medians), set()
        with contextlib.ExitStack() as stack:
            checkouts, opened = plan.checkouts.items(), stack.enter_context
            processes = {method: opened(contextlib.closing(start(checkout))) for method, checkout in checkouts}
            for case in plan.cases:
                yield from rows_of(case, processes, plan, seen)

    def line(self, row: LatencyRow) -> str:
        compared = f" {row.of_before:.3f} of before" if row.of_before else ""
        where = f"{row.world_size} ranks, {row.op}, {row.size}"
        return f"{where:<52} {row.method:<24} {row.median:>9.3f} us {row.wrong:>3} wrong{compared}"

    def findings(self) -> list[str]:
        sentences = [
            comparison(f"the last committed report ({self.before})", befores(self.rows)),
            *(comparison(other, ratios) for other, ratios in others(self.rows).items()),
        ]
        return list(filter(None, sentences))

    def sections(self) -> list[Section]:
        return [
            Section(f"{world_size} ranks", [latency_table(mine)])
            for world_size, mine in group(self.rows, lambda row: row.world_size).items()
        ]

    def glance(self) -> Glance:
        ratios = befores(self.rows)
        if ratios:
            mean = geometric_mean(ratios.values())
            return Glance(f"of the last committed report's times, by call; geometric mean {mean:.3f}", ratios)
        mine = [row for row in self.rows if row.method == OWN and not row.wrong]
        if not mine:
            return Glance("nothing was timed here", figure=NOT_SERVED)
        first = min(mine, key=lambda row: row.median)
        words = f"for {first.op} of {first.size} between {first.world_size} ranks that share a GPU"
        return Glance(words, figure=f"{number(first.median)} us")


def committed(reports: Path) -> tuple[str, dict[tuple[int, str, str], float]]:
    """Returns the commit and the date of the last committed report of this machine, and its medians."""
    try:
        stored = read(reports / machine.slug(machine.describe()), Latency)
    except FileNotFoundError:
        return "", {}
    rows = [row for row in stored.report.rows if row.method == OWN and not row.wrong]
    return f"{stored.machine['commit']}, {stored.machine['date']}", {row.key: row.median for row in rows}


def case_words(row: LatencyRow) -> str:
    return f"{row.op}, {row.size}, {plural(row.world_size, 'rank')}"


def befores(rows: Sequence[LatencyRow]) -> dict[str, float]:
    """Returns the time / the last committed report's, by call."""
    return {case_words(row): row.of_before for row in rows if row.of_before}


def others(rows: Sequence[LatencyRow]) -> dict[str, dict[str, float]]:
    """Returns this checkout's time / the other's, by the other and call."""
    ratios: dict[str, dict[str, float]] = {}
    for mine in group(rows, lambda row: row.key).values():
        ours = next((row for row in mine if row.method == OWN), None)
        for row in mine:
            if row is not ours and (value := ratio(ours, row)) is not None:
                ratios.setdefault(row.method, {})[case_words(row)] = value
    return ratios


def comparison(other: str, ratios: dict[str, float]) -> str:
    """Returns a sentence on times divided by another run's or checkout's; an empty string without ratios."""
    if not ratios:
        return ""
    slower = {case: value for case, value in ratios.items() if value > NOISE}
    worst = max(slower, key=slower.__getitem__, default="")
    tail = f" Slower by more than 3 %: {len(slower)}, the most {worst} ({slower[worst]:.3f})." if slower else ""
    mean = geometric_mean(ratios.values())
    return f"Of the time of {other}: {extent(ratios)}, geometric mean {mean:.3f}, {len(ratios)} calls.{tail}"


def latency_table(rows: Sequence[LatencyRow]) -> str:
    methods = [method for method in dict.fromkeys(row.method for row in rows) if method != OWN]
    lines = []
    for mine in group(rows, lambda row: row.key).values():
        by_method = {row.method: row for row in mine}
        ours = by_method.get(OWN)
        first = ours or mine[0]
        cells = [first.op, first.size, first.algorithm, first.grid or NOT_SERVED, f"{first.share:.2f}", time_cell(ours)]
        cells.append(f"{number(ours.time_us['p10'])} - {number(ours.time_us['p90'])}" if ours else NOT_SERVED)
        cells += [number(ours and ours.before_us), ratio_cell(ours and ours.of_before)]
        for method in methods:
            other = by_method.get(method)
            cells += [time_cell(other), ratio_cell(ratio(ours, other))]
        lines.append(cells)
    head = ["op", "size", "algorithm", "blocks x threads", "share", "time (us)", "p10 - p90", "before (us)"]
    head.append("of_before")
    return table([*head, *(name for method in methods for name in (f"{method} (us)", "of_other"))], lines)

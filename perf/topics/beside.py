"""`python -m perf beside`: times matmuls beside gathers and reduce-scatters, and reads which SMs these hold."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

import graphar
from graphar.plan.algorithms import COPYING
from graphar.plan.call import Call, Operands
from graphar.plan.sizes import MB
from graphar.plan.work import Parts
from perf.between_ranks import BetweenRanks
from perf.harness import ranks as ranks_of
from perf.harness.beside_one_gpu import SharedCalls, Sharing
from perf.harness.collectives import count_wrong
from perf.harness.ranks import ProcessRanks
from perf.md import NOT_SERVED, columns, plural
from perf.ratios import group
from perf.report import Arguments, Glance, Section, Timing

SHAPES = ((4096, 8192, 8192), (2048, 4096, 14336), (2048, 14336, 4096))  # M, N, K
SIZES_MB, REPEATS, MATMULS_MS, MOST_CALLS = (64, 128, 256, 512), 5, 8.0, 64
Runs = dict[str, Callable[[], object]]  # by method, a call of all ranks of this process
OPS = ("allgather", "reducescatter")
NCCL, KERNELS, COPIES = METHODS = "nccl", "graphar, 64 blocks", "graphar copies"
NEEDED, SHARED_RANKS = "matmuls beside collectives: need a GPU", 2


@dataclass(frozen=True)
class BesideRow(Timing):
    """One matmul beside one collective, as beside.md explains."""

    method: str
    op: str
    world_size: int
    size_mb: int
    shape: str  # MxNxK
    of_alone: float
    call_us: float
    sms: float
    wrong: int
    shares: bool  # whether the ranks share a GPU

    @property
    def what(self) -> tuple[str, ...]:
        return self.op, f"{self.size_mb} MB", self.shape

    @property
    def time_us(self) -> dict[str, float]:
        return {"median": self.call_us}

    @property
    def rate(self) -> float:
        """The GB/s that a rank sends."""
        return self.size_mb * MB * (self.world_size - 1) / self.world_size / self.call_us / 1e3


@dataclass(frozen=True)
class BesidePlan:
    world_size: int
    shares: bool
    sizes_mb: tuple[int, ...]
    repeats: int


class Collectives:
    """The calls of one op and size on this rank."""

    def __init__(self, op: str, size_mb: int, ranks: ProcessRanks, communicator: graphar.Communicator) -> None:
        count = size_mb * MB // 2 // ranks.size
        whole = communicator.empty(count * ranks.size, dtype=torch.bfloat16)
        part = torch.empty(count, dtype=torch.bfloat16, device=ranks.device)
        self._x, self._out = (part, whole) if op == "allgather" else (whole, part)
        self._op, self._ranks, self._engine = op, ranks, communicator.engine
        self._call = Call.of(Parts(op, (count,) * ranks.size), part)

    def _graphar(self, **how) -> Callable[[], object]:
        call, operands = self._call._replace(**how), [Operands((self._x,), (self._out,))]
        return lambda: self._engine.run(call, operands)

    def of(self, method: str) -> Callable[[], object]:
        if method == NCCL:
            run = dist.all_gather_into_tensor if self._op == "allgather" else dist.reduce_scatter_tensor
            return lambda: run(self._out, self._x)
        if method == KERNELS:
            return self._graphar(blocks=64)
        return self._graphar(algorithm=COPYING[self._op].value, symmetric=self._op == "allgather")

    def wrong(self, method: str) -> int:
        """Returns how many elements of all ranks differ from the specification's. Collective."""
        generator = torch.Generator(self._ranks.device).manual_seed(self._ranks.rank)
        self._x.copy_(torch.randn(len(self._x), generator=generator, device=self._x.device))
        self._out.fill_(7)
        self.of(method)()
        torch.cuda.synchronize()
        return self._ranks.total([count_wrong(self._op, self._x, self._out, self._ranks, exact=True)])[0]


def sms_of(run: Callable[[], object], device: torch.device) -> float:
    """Returns the SMs that kernels of a call hold, averaged over its time, as torch's profiler sees them."""
    run()  # the profiler is busy with its first events
    count, most = 4, torch.cuda.get_device_properties(device).multi_processor_count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        events = [event for event in json.loads(path.read_text())["traceEvents"] if "dur" in event]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    on_gpu = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    begin, end = min(event["ts"] for event in on_gpu), max(event["ts"] + event["dur"] for event in on_gpu)
    return sum(min(kernel["args"]["grid"][0], most) * kernel["dur"] for kernel in kernels) / (end - begin)


class Beside:
    """Matmuls of one shape, and a stream for a collective beside them."""

    def __init__(self, shape: tuple[int, int, int], ranks: ProcessRanks | Sharing) -> None:
        m, n, k = shape
        self._a, self._w = (torch.randn(rows, k, device=ranks.device, dtype=torch.bfloat16) for rows in (m, n))
        self._out: Tensor = self._a.new_empty(m, n)
        self._stream = ranks.streams[0] if isinstance(ranks, Sharing) else torch.cuda.Stream(priority=-1)
        self._ranks, self._count = ranks, 1
        self._count = max(1, round(MATMULS_MS / self.time_ms(None, 0)[0]))

    def time_ms(self, run: Callable[[], object] | None, calls: int) -> tuple[float, float]:
        """Returns the time of the matmuls, and of one of the calls that run beside them. Collective."""
        at = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        self._ranks.barrier()
        torch.cuda._sleep(1_000_000)  # until the host has queued all
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            at[0].record()
            for _ in range(calls):
                run()
            at[1].record()
        at[2].record()
        for _ in range(self._count):
            torch.mm(self._a, self._w.t(), out=self._out)
        at[3].record()
        torch.cuda.synchronize()
        return at[2].elapsed_time(at[3]), at[0].elapsed_time(at[1]) / max(1, calls)


def run_rank(plan: BesidePlan, rank: int, port: int) -> Iterator[BesideRow]:
    ranks = ranks_of.join(rank, plan.world_size, "cuda", port)
    communicator = graphar.Communicator(lossless=False)
    ranks.warm_up()

    def made(op: str, size_mb: int) -> tuple[Runs, dict[str, int]]:
        calls = Collectives(op, size_mb, ranks, communicator)
        wrong = {method: calls.wrong(method) * (method != NCCL) for method in METHODS}
        return {method: calls.of(method) for method in METHODS}, wrong

    yield from rows_of(plan, ranks, made)
    ranks.barrier()
    communicator.close()


def run_shared(plan: BesidePlan) -> Iterator[BesideRow]:
    """Yields the rows of ranks that share a GPU, in this process."""
    ranks = Sharing(plan.world_size)
    ranks_of.raise_clocks(ranks.device)

    def made(op: str, size_mb: int) -> tuple[Runs, dict[str, int]]:
        calls = SharedCalls(op, size_mb * MB, ranks)
        wrong = {method: calls.wrong(method == COPIES) for method in (KERNELS, COPIES)}
        return {method: calls.by(method == COPIES) for method in wrong}, wrong

    yield from rows_of(plan, ranks, made)


def rows_of(plan: BesidePlan, ranks: ProcessRanks | Sharing, made: Callable) -> Iterator[BesideRow]:
    """Yields the rows of all ops and sizes. ``made`` makes calls by method, and says how many elements are wrong."""
    matmuls = {shape: Beside(shape, ranks) for shape in SHAPES}
    for op in OPS:
        for size_mb in plan.sizes_mb:
            runs, wrong = made(op, size_mb)
            parts = ranks.size if plan.shares else 1  # the profiler sees the kernels of all ranks
            sms = {method: sms_of(run, ranks.device) / parts for method, run in runs.items()}
            for shape, matmul in matmuls.items():
                for method, (of_alone, call_ms) in beside(plan, matmul, runs, ranks).items():
                    measured = of_alone, call_ms * 1e3, sms[method], wrong[method]
                    words = "x".join(map(str, shape))
                    yield BesideRow(method, op, plan.world_size, size_mb, words, *measured, plan.shares)


def beside(
    plan: BesidePlan, matmul: Beside, runs: Runs, ranks: ProcessRanks | Sharing
) -> dict[str, tuple[float, float]]:
    """Returns, by method, the matmuls' time over their time alone, and milliseconds of a call. Collective."""
    counts = {}
    for method, run in runs.items():  # as many calls as last longer than the matmuls
        (call_ms,) = ranks.slowest([matmul.time_ms(run, 4)[1]])
        counts[method] = min(MOST_CALLS, int(2 * MATMULS_MS / call_ms) + 1)
    alone, turns = [], {method: [] for method in runs}
    for _ in range(plan.repeats):
        alone += ranks.slowest([matmul.time_ms(None, 0)[0]])
        for method, run in runs.items():
            turns[method].append(ranks.slowest(list(matmul.time_ms(run, counts[method]))))
    base = statistics.median(alone)
    medians = {method: [*map(statistics.median, zip(*times, strict=True))] for method, times in turns.items()}
    return {method: (beside_ms / base, call_ms) for method, (beside_ms, call_ms) in medians.items()}


@dataclass
class MatmulsBeside(BetweenRanks):
    rows: list[BesideRow] = field(default_factory=list)

    order: ClassVar[int] = 20
    # A run of all topics skips this one.
    arguments: ClassVar[Arguments] = Arguments(on_gpus=None, on_cpu=None)
    work: ClassVar = staticmethod(run_rank)
    cpu_world_size: ClassVar[int] = 0

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        sizes = "MB of the whole tensors (default: 64 128 256 512)"
        parser.add_argument("--size-mb", type=int, nargs="+", metavar="N", default=SIZES_MB, help=sizes)
        parser.add_argument("--repeats", type=int, metavar="N", default=REPEATS, help="repeats (default: %(default)s)")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[BesidePlan]:
        if gpu_count < 1:
            sys.exit(NEEDED)
        if min(*options.size_mb, options.repeats) < 1:
            sys.exit("--size-mb and --repeats must be at least 1")
        sizes, shares = tuple(options.size_mb), gpu_count < 2
        world_sizes = [SHARED_RANKS] if shares else cls.world_sizes(options, gpu_count)
        return [BesidePlan(world_size, shares, sizes, options.repeats) for world_size in world_sizes]

    def measure(self, plan: Sequence[BesidePlan]) -> Iterator:
        for world_plan in plan:
            yield from run_shared(world_plan) if world_plan.shares else super().measure([world_plan])

    @classmethod
    def count(cls, plan: Sequence[BesidePlan]) -> int:
        return sum(len(OPS) * len(world_plan.sizes_mb) * len(SHAPES) * len(METHODS) for world_plan in plan)

    def line(self, row: BesideRow) -> str:
        where = f"{plural(row.world_size, 'rank')} {', '.join(row.what):<40} {row.method:<20}"
        return f"{where} {row.of_alone:.2f} x alone, {row.call_us:.0f} us, {row.sms:.1f} SMs {row.wrong:>4} wrong"

    def sections(self) -> list[Section]:
        cells = {
            "matmul": lambda row: row.what[-1],
            "MB": lambda row: row.size_mb,
            "method": lambda row: row.method,
            "x alone": lambda row: f"{row.of_alone:.2f}",
            "collective (us)": lambda row: f"{row.call_us:.0f}",
            "GB/s": lambda row: f"{row.rate:.0f}",
            "SMs": lambda row: f"{row.sms:.1f}",
            "wrong": lambda row: f"**{row.wrong} WRONG**" if row.wrong else "0",
        }
        sections = []
        for (ranks, shares, op), rows in group(self.rows, lambda row: (row.world_size, row.shares, row.op)).items():
            title = f"{plural(ranks, 'rank')}{' that share a GPU' if shares else ''}, {op}"
            sections.append(Section(title, [columns(rows, cells)]))
        return sections

    def findings(self) -> list[str]:
        timed = [method for method in METHODS if any(row.method == method for row in self.rows)]
        return [f"{method}: matmuls take {self._extent(method)} of their time alone." for method in timed]

    def _extent(self, method: str) -> str:
        ratios = [row.of_alone for row in self.rows if row.method == method and not row.wrong]
        return f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else NOT_SERVED

    def glance(self) -> Glance:
        return Glance("time of matmuls beside graphar's copies / their time alone", figure=self._extent(COPIES))

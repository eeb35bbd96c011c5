"""python -m tests.soak: many mixed calls with one rank late at random; results right, memory as it was.

One process a GPU, or a few on the CPU where there are none. Every rank draws the same calls: any op, sizes mostly
small, eager or as a graph's replay, on one stream or two. A random sample of results is compared bit for bit.
"""

import argparse
import ctypes
import gc
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import graphar
from tests.cases import KERNEL_DTYPES, bit_patterns, integers, normal, same_bits
from tests.gpu import EXACT_ALGORITHMS, fits
from tests.processes import RankFailed, run_ranks

MIB = 1 << 20
GPU_CALLS, CPU_CALLS = 100_000, 2_000
CPU_RANKS = 3
CASES = 80  # fewer if fewer calls are made
NUMELS = {1: 4, 7: 4, 100: 8, 2048: 16, 8199: 16, 65541: 8, 262149: 4, MIB + 3: 2, 8 * MIB: 1}  # each with its weight
DTYPES = {torch.bfloat16: 6, torch.float16: 4, torch.float32: 4, torch.float64: 1, torch.int32: 1}
REPLAYED, ON_SIDE_STREAM, LATE, VERIFIED = 0.5, 0.1, 0.01, 0.02  # how often
LATE_S = 0.002  # at most
SYNCHRONIZED_EVERY = 256
NO_GROWTH_NBYTES = 16 * MIB  # Python and torch have ups and downs of their own


@dataclass(frozen=True)
class Memory:
    """Bytes in use: by this process on the host, and on its device."""

    host: int
    device: int


@dataclass(frozen=True)
class Report:
    """What one rank found: seconds, how many results it compared, and memory at the start, after 10 %, at the end."""

    seconds: float
    verified: int
    memory: list[Memory]


class Case:
    """A call that is repeated: its input, its result, and a CUDA graph of it if kernels run it."""

    def __init__(self, number: int, rank: int, world_size: int, communicator: graphar.Communicator, device) -> None:
        draw = random.Random(number)  # the same on every rank
        op = draw.choice(["allreduce", "allreduce", "reducescatter", "allgather"])
        (numel,) = draw.choices(list(NUMELS), NUMELS.values())
        (dtype,) = draw.choices(list(DTYPES), DTYPES.values())
        self.has_kernel = device.type == "cuda" and (dtype in KERNEL_DTYPES or op == "allgather")
        fill = draw.choice([integers, normal, bit_patterns] if dtype in KERNEL_DTYPES else [integers])
        sizes = [numel + (draw.randrange(9) if op == "allgather" else 0) for _ in range(world_size)]
        parts = [fill(world_size * number + r, size, dtype) for r, size in enumerate(sizes)]
        algorithms = [a for a in EXACT_ALGORITHMS if self.has_kernel and fits(a, world_size, numel, dtype)]
        options, expected = {
            "allreduce": lambda: (
                {"algorithm": draw.choice(["auto", *algorithms])},
                graphar.reference.allreduce(parts),
            ),
            "reducescatter": lambda: ({}, graphar.reference.reducescatter(parts)[rank]),
            "allgather": lambda: ({"sizes": sizes}, graphar.reference.allgather(parts)),
        }[op]()
        self._what = f"case {number}: {op} of {numel} {dtype} {options}"
        self._x, self._expected = parts[rank].to(device), expected.to(device)
        self._call = lambda: getattr(communicator, op)(self._x, **options)
        self._graph = self._captured = None
        self.check(self.run())
        if self.has_kernel:
            self._capture()

    def _capture(self) -> None:
        gc.collect()  # the end of an older graph would end this capture
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._captured = self._call()

    def run(self) -> torch.Tensor:
        return self._call()

    def replay(self) -> torch.Tensor:
        self._captured.zero_()
        self._graph.replay()
        return self._captured

    def check(self, y: torch.Tensor) -> None:
        wrong = same_bits(y, self._expected)
        if wrong:
            raise AssertionError(f"{self._what}: {wrong} elements are wrong")


def soak(rank: int, world_size: int, calls: int, seed: int) -> Report:
    """The calls of one rank; the last rank is the one that is late."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    with graphar.Communicator(timeout_s=30) as communicator:
        cases = [Case(number, rank, world_size, communicator, device) for number in range(min(CASES, calls))]
        side = torch.cuda.Stream() if device.type == "cuda" else None
        draw, verified, memory = random.Random(seed), 0, [memory_now(device)]
        begin = time.monotonic()
        for turn in range(calls):
            case, late_s = draw.choice(cases), draw.random() * LATE_S
            late, replayed, on_side, compared = (
                draw.random() < share for share in (LATE, REPLAYED, ON_SIDE_STREAM, VERIFIED)
            )
            if late and rank == world_size - 1:
                be_late(late_s, device)
            y = case.replay() if replayed and case.has_kernel else run_on(side if on_side else None, case)
            if compared:
                case.check(y)
                verified += 1
            del y
            if turn % SYNCHRONIZED_EVERY == 0:
                communicator.synchronize()
            if turn + 1 == calls // 10:
                memory.append(memory_now(device))
        communicator.synchronize()
        return Report(time.monotonic() - begin, verified, [*memory, memory_now(device)])


def run_on(side: torch.cuda.Stream | None, case: Case) -> torch.Tensor:
    """Makes an eager call, on the stream ``side`` if there is one. The current stream then waits for it."""
    if side is None:
        return case.run()
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        y = case.run()
    current.wait_stream(side)
    y.record_stream(current)
    return y


def be_late(seconds: float, device: torch.device) -> None:
    """Delays the host, and the device too if the delay is long."""
    time.sleep(seconds)
    if device.type == "cuda" and seconds > LATE_S / 2:
        torch.cuda._sleep(int(seconds * 1e9))  # in cycles of about 1 ns


def memory_now(device: torch.device) -> Memory:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # fragmented free memory is no leak
    on_device = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        on_device = total - free
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Memory(pages * os.sysconf("SC_PAGESIZE"), on_device)


def growth(memory: Sequence[Memory]) -> str:
    """Which memory grew since 10 % of the calls were made; an empty string if none did."""
    _, early, late = memory
    grown = {"host": late.host - early.host, "device": late.device - early.device}
    return ", ".join(f"{name} by {nbytes} bytes" for name, nbytes in grown.items() if nbytes > NO_GROWTH_NBYTES)


def show(rank: int, report: Report) -> str:
    stages = zip(("start", "10 %", "end"), report.memory, strict=True)
    memory = "; ".join(f"{name}: host {m.host / MIB:.1f}, device {m.device / MIB:.1f}" for name, m in stages)
    return f"rank {rank}: {report.verified} results compared; MiB in use at {memory}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 1 if a rank failed, a result was wrong, or memory grew."""
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=GPU_CALLS if gpus > 1 else CPU_CALLS, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if options.calls < 10:
        parser.error("--calls must be at least 10")
    world_size, backend = (min(gpus, 8), "cpu:gloo,cuda:nccl") if gpus > 1 else (CPU_RANKS, "gloo")
    limit_s = 120 + options.calls / 100
    try:
        reports = run_ranks(soak, world_size, options.calls, options.seed, backend=backend, timeout_s=limit_s)
    except RankFailed as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(show(rank, report) for rank, report in enumerate(reports)))
    grown = {rank: growth(report.memory) for rank, report in enumerate(reports)}
    for rank, what in grown.items():
        if what:
            print(f"rank {rank}: memory grew: {what}", file=sys.stderr)
    seconds = max(report.seconds for report in reports)
    where = f"{world_size} {'GPUs' if gpus > 1 else 'ranks on the CPU'}"
    print(f"{options.calls} calls on {where} in {seconds:.1f} s, seed {options.seed}")
    return 1 if any(grown.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

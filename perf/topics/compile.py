"""`python -m perf compile`: compiles every kernel with NVRTC, and reports times, registers and memory."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from graphar.cli.options import count
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import compile_kernel, nvrtc_version
from perf.cubin import resources
from perf.kernels import catalogue
from perf.md import columns
from perf.ratios import group
from perf.report import Arguments, Glance, Report, Section, Timing

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled for one architecture.

    Attributes:
        compile_s: the time from source to cubin, in seconds.
    """

    file: str
    kernel: str
    arch: str
    compile_s: float
    nbytes: int
    registers: int
    stack_nbytes: int
    shared_nbytes: int


def compile_all(every: int) -> Iterator[Compiled]:
    # The cache starts empty, so every kernel is compiled. Processes are spawned, because torch's threads do not survive
    # a fork.
    with tempfile.TemporaryDirectory() as cache:
        pool = ProcessPoolExecutor(
            mp_context=multiprocessing.get_context("spawn"), initializer=use_cache, initargs=(cache,)
        )
        with pool:
            jobs = [pool.submit(compile_one, source, arch) for source, arch in cases(every)]
            for job in as_completed(jobs):
                yield job.result()


def cases(every: int = 1) -> list[tuple[KernelSource, str]]:
    """Returns pairs of a kernel and an architecture that can run it: every ``every``-th pair."""
    return [(source, arch) for source in catalogue() for arch in ARCHITECTURES if source.runs_on(arch)][::every]


def use_cache(folder: str) -> None:
    os.environ["GRAPHAR_CACHE_DIR"] = folder


def compile_one(source: KernelSource, arch: str) -> Compiled:
    begin = time.perf_counter()
    cubin = compile_kernel(source, arch)
    compile_s = time.perf_counter() - begin
    need = resources(cubin.image, cubin.symbol)
    return Compiled(source.file, source.name, arch, round(compile_s, 4), len(cubin.image), **asdict(need))


@dataclass
class Compile(Report):
    """The compilation of all kernels.

    Attributes:
        wall_s: the time to compile all kernels, in seconds.
    """

    nvrtc: str = ""
    wall_s: float = 0.0
    kernels: list[Compiled] = field(default_factory=list)

    order: ClassVar[int] = 23
    arguments: ClassVar[Arguments] = Arguments("--every 4", "--every 10", "--every 30", "--every 100")

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--every", type=count, default=1, metavar="N", help="compile every Nth kernel (default: 1)")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> int:
        return options.every

    @classmethod
    def count(cls, plan: int) -> int:
        return len(cases(plan))

    def measure(self, plan: int) -> Iterator[Compiled]:
        self.nvrtc = ".".join(str(part) for part in nvrtc_version())
        begin = time.perf_counter()
        for compiled in compile_all(plan):
            self.wall_s = round(time.perf_counter() - begin, 1)
            yield compiled
        self.kernels.sort(key=lambda kernel: (kernel.file, kernel.arch, kernel.kernel))

    def verified(self) -> Sequence[Timing]:
        """Returns no rows, because a kernel that does not compile ends the run."""
        return []

    def verdict(self) -> str:
        if not self.kernels:
            return "Nothing was compiled."
        return f"{len(self.kernels)} kernels compiled in {self.wall_s:.0f} s by NVRTC {self.nvrtc}."

    def sections(self) -> list[Section]:
        return [Section("By file", [summary_table(self.kernels)])] if self.kernels else []

    def glance(self) -> Glance:
        slowest = max((kernel.compile_s for kernel in self.kernels), default=0.0)
        words = f"to compile {len(self.kernels)} kernels with NVRTC; the slowest takes {slowest:.2g} s"
        return Glance(words, figure=f"{self.wall_s:.0f} s")


def summary_table(compiled: Sequence[Compiled]) -> str:
    known = sorted(compiled, key=lambda kernel: (kernel.file, ARCHITECTURES.index(kernel.arch)))
    cells = {
        "file": lambda kernels: kernels[0].file,
        "architecture": lambda kernels: kernels[0].arch,
        "kernels": len,
        "compile (s)": lambda kernels: f"{statistics.median(kernel.compile_s for kernel in kernels):.2f}",
        "longest (s)": lambda kernels: f"{max(kernel.compile_s for kernel in kernels):.2f}",
        "cubin (KB)": lambda kernels: f"{statistics.median(kernel.nbytes for kernel in kernels) / 1024:.1f}",
        "registers": lambda kernels: "{}-{}".format(*(of(kernel.registers for kernel in kernels) for of in (min, max))),
        "stack (B)": lambda kernels: max(kernel.stack_nbytes for kernel in kernels),
        "shared (B)": lambda kernels: max(kernel.shared_nbytes for kernel in kernels),
    }
    return columns(group(known, lambda kernel: (kernel.file, kernel.arch)).values(), cells)

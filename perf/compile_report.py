"""Compiles every kernel of the catalogue and reports what that took: compile.json and compile.md."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from graphar.runtime.catalogue import KernelSource, catalogue
from graphar.runtime.compiler import compile_kernel, nvrtc_version
from perf import files
from perf.cubin import resources
from perf.machine import one_line
from perf.tables import table

ARCHITECTURES = ("sm_80", "sm_90a", "sm_100a")

NOTES = """\
One line a file and architecture, over all its kernels (element types and world sizes).

- compile: seconds from source to cubin, one kernel at a time on each core, with an empty cache; median and longest.
- cubin: KB (2^10 B), median.
- registers: 32-bit registers a thread, fewest and most.
- stack: bytes of local memory a thread, most; spilled registers are in it.
- shared: bytes of static shared memory a block, most."""


@dataclass(frozen=True)
class Compiled:
    """One kernel compiled for one architecture.

    Attributes:
        compile_s: seconds from source to cubin.
        nbytes: the cubin's size.
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
    """The kernels of :func:`cases`, as they are done."""
    # With an empty cache, or cubins would be found and not compiled; spawned, since torch's threads do not fork.
    with tempfile.TemporaryDirectory() as cache:
        pool = ProcessPoolExecutor(
            mp_context=multiprocessing.get_context("spawn"), initializer=use_cache, initargs=(cache,)
        )
        with pool:
            jobs = [pool.submit(compile_one, source, arch) for source, arch in cases(every)]
            for job in as_completed(jobs):
                yield job.result()


def cases(every: int = 1) -> list[tuple[KernelSource, str]]:
    """Kernels with the architectures that can run them; each Nth of these."""
    return [(source, arch) for source in catalogue() for arch in ARCHITECTURES if source.runs_on(arch)][::every]


def use_cache(folder: str) -> None:
    os.environ["GRAPHAR_CACHE_DIR"] = folder


def compile_one(source: KernelSource, arch: str) -> Compiled:
    begin = time.perf_counter()
    cubin = compile_kernel(source, arch)
    compile_s = time.perf_counter() - begin
    need = resources(cubin.image, cubin.symbol)
    return Compiled(source.file, source.name, arch, round(compile_s, 4), len(cubin.image), **asdict(need))


def write(folder: Path, machine: dict[str, object], compiled: Sequence[Compiled], wall_s: float, command: str) -> Path:
    """Both files, into the folder. Returns the one for people."""
    nvrtc = ".".join(str(part) for part in nvrtc_version())
    ordered = sorted(compiled, key=lambda one: (one.file, one.arch, one.kernel))
    content = {
        "machine": machine,
        "command": command,
        "nvrtc": nvrtc,
        "wall_s": round(wall_s, 1),
        "kernels": [asdict(one) for one in ordered],
    }
    return files.write(folder, "compile", content, markdown(content))


def verdict(count: int, wall_s: float) -> str:
    return f"{count} kernels compiled in {wall_s:.0f} s."


def markdown(content: dict) -> str:
    """The report for people, from that for machines."""
    machine, compiled = content["machine"], [Compiled(**one) for one in content["kernels"]]
    parts = [
        "# Compiling every kernel",
        f"{one_line(machine)}, NVRTC {content['nvrtc']}.",
        f"{len(compiled)} kernels in {content['wall_s']:.0f} s on {machine['cpu_count']} cores.",
        summary_table(compiled),
        NOTES,
        f"## How to reproduce\n\n```\n{content['command']}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def summary_table(compiled: Sequence[Compiled]) -> str:
    header = [
        "file",
        "architecture",
        "kernels",
        "compile (s)",
        "longest (s)",
        "cubin (KB)",
        "registers",
        "stack",
        "shared",
    ]
    lines = []
    for file in sorted({one.file for one in compiled}):
        for arch in ARCHITECTURES:
            kernels = [one for one in compiled if (one.file, one.arch) == (file, arch)]
            if kernels:
                lines.append([file, arch, *summary(kernels)])
    return table(header, lines)


def summary(kernels: Sequence[Compiled]) -> list[str]:
    """The cells of one file on one architecture."""
    registers = [one.registers for one in kernels]
    return [
        str(len(kernels)),
        f"{statistics.median(one.compile_s for one in kernels):.2f}",
        f"{max(one.compile_s for one in kernels):.2f}",
        f"{statistics.median(one.nbytes for one in kernels) / 1024:.1f}",
        f"{min(registers)}-{max(registers)}",
        str(max(one.stack_nbytes for one in kernels)),
        str(max(one.shared_nbytes for one in kernels)),
    ]

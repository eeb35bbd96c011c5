"""Compiles kernels for the host: cuda_src as it is, but for the files in twin/, which stand in for the PTX."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphar.compiler import source_directory
from graphar.kernels import KernelSource

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "host"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare", "-Wno-clobbered")
FLAGS = ("-std=c++20", "-O1", "-g", "-ffp-contract=off", "-fno-strict-aliasing", *WARNINGS)
SANITIZERS = {
    "plain": (),
    "thread": ("-fsanitize=thread", "-Wno-tsan"),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}


@dataclass(frozen=True)
class Mutation:
    """A text of a file in cuda_src that is replaced, once.

    Attributes:
        file: as in "device/sentinel.cuh".
        old: stands in it exactly once.
        new: what stands there instead.
    """

    file: str
    old: str
    new: str

    def apply(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} stands there {text.count(self.old)} times, not once")
        return text.replace(self.old, self.new)


def compiler() -> str:
    """The C++ compiler, or an error that says what to install."""
    found = os.environ.get("CXX") or shutil.which("g++")
    if not found:
        raise RuntimeError("the kernels need g++ 12 or newer to run on the host: install it (Debian: apt install g++)")
    return found


# A block of 640 threads is more than the sanitizers can take at 3 ranks: two channels instead of four.
TMA_CHANNELS = 2
_SMALLER = Mutation("two_shot_tma.cu", "constexpr int channels = 4;", f"constexpr int channels = {TMA_CHANNELS};")


@functools.cache
def build(sources: tuple[KernelSource, ...], sanitizer: str, mutation: Mutation | None = None) -> Path:
    """The program that runs kernels of one file, in the order in which a case numbers them. Built once for its text."""
    (file,) = {source.file for source in sources}
    files = _files(mutation)
    table = "".join(f"&{source.name},\n" for source in sources)
    key = hashlib.sha256("\0".join([compiler(), sanitizer, file, table, *map("".join, sorted(files.items()))]).encode())
    program = CACHE / key.hexdigest()[:32]
    if program.exists():
        return program
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        for name, text in (files | {"kernels.inc": table}).items():
            path = Path(folder, name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        made = Path(folder, "program")
        _compile(Path(folder), file, SANITIZERS[sanitizer], made)
        made.replace(program)
    return program


def _files(mutation: Mutation | None) -> dict[str, str]:
    """What is compiled, by name: the sources, with the twins in place of their originals, and the simulator."""
    sources = source_directory()
    files = {str(path.relative_to(sources)): path.read_text() for path in sources.rglob("*.cu*")}
    for change in (_SMALLER, mutation):
        if change:
            files[change.file] = change.apply(files[change.file])
    files |= {f"device/{path.name}": path.read_text() for path in (HERE / "twin").iterdir()}
    return files | {path.name: path.read_text() for path in (HERE / "simulator").iterdir()}


def _compile(folder: Path, file: str, sanitizer: Sequence[str], made: Path) -> None:
    defines = [f'-DKERNEL_FILE="{file}"', *(["-DWITH_MULTIMEM"] if file.startswith("multimem") else [])]
    includes = ["-I", str(folder), "-I", str(folder / "device")]
    scheduler = folder / "scheduler.o"
    _run([compiler(), "-std=c++20", "-O2", *WARNINGS, "-c", str(folder / "scheduler.cpp"), "-o", str(scheduler)])
    objects = [str(folder / "run.cpp"), str(scheduler)]
    _run([compiler(), *FLAGS, *sanitizer, *defines, *includes, *objects, "-o", str(made)])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")

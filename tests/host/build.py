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

from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import source_directory

HERE = Path(__file__).parent
CACHE = HERE.parents[1] / "build" / "host"
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare", "-Wno-clobbered")
FLAGS = ("-std=c++20", "-O1", "-g1", "-ffp-contract=off", "-fno-strict-aliasing", *WARNINGS)
SANITIZERS = {
    "plain": (),
    "thread": ("-fsanitize=thread", "-Wno-tsan"),
    "address": ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}


@dataclass(frozen=True)
class Mutation:
    """A text of a file in cuda_src that is replaced.

    Attributes:
        file: as in "device/sync/sentinel.cuh".
        old: stands in it.
        new: what stands there instead.
        times: how often.
    """

    file: str
    old: str
    new: str
    times: int = 1

    def apply(self, text: str) -> str:
        if text.count(self.old) != self.times:
            raise ValueError(f"{self.file}: {self.old!r} stands there {text.count(self.old)} times, not {self.times}")
        return text.replace(self.old, self.new)


def compiler() -> str:
    """The C++ compiler, or an error that says what to install."""
    found = os.environ.get("CXX") or shutil.which("g++")
    if not found:
        raise RuntimeError("the kernels need g++ 12 or newer to run on the host: install it (Debian: apt install g++)")
    return found


# A block of 640 threads takes the sanitizers too long: two channels instead of four.
TMA_CHANNELS = 2
NORM_SLOTS = 64  # so that rows of few packs take several rounds
_SMALLER = (
    Mutation("allreduce/two_shot_tma.cu", "constexpr int channels = 4;", f"constexpr int channels = {TMA_CHANNELS};"),
    Mutation("device/rms_norm.cuh", "constexpr int slots = 1024;", f"constexpr int slots = {NORM_SLOTS};"),
)


@functools.cache
def build(sources: tuple[KernelSource, ...], sanitizer: str, mutation: Mutation | None = None) -> Path:
    """The program that runs kernels of one file, in the order in which a case numbers them. Built once for its text."""
    (file,) = {source.file for source in sources}
    simulator = {path.name: path.read_text() for path in (HERE / "simulator").iterdir()}
    unobserved = _compile(simulator, ("-std=c++20", "-O2", *WARNINGS, "-r", "-nostdlib", "scheduler.cpp", "views.cpp"))
    files = simulator | _sources(mutation) | {"kernels.inc": "".join(f"&{source.name},\n" for source in sources)}
    files["generated.inc"] = "".join(dict.fromkeys(source.generated for source in sources))
    defines = (f'-DKERNEL_FILE="{file}"', *(["-DWITH_MULTIMEM"] if "multimem" in file else []))
    flags = (*FLAGS, *SANITIZERS[sanitizer], *defines, "-I.")
    return _compile(files, (*flags, "run.cpp", str(unobserved)))


def _sources(mutation: Mutation | None) -> dict[str, str]:
    """The kernels' files by name, with the twins in place of their originals."""
    sources = source_directory()
    files = {str(path.relative_to(sources)): path.read_text() for path in sources.rglob("*.cu*")}
    for change in (*_SMALLER, mutation):
        if change:
            files[change.file] = change.apply(files[change.file])
    twins = {path.relative_to(HERE / "twin"): path.read_text() for path in (HERE / "twin").rglob("*.cuh")}
    return files | {f"device/{path}": text for path, text in twins.items()}


def _compile(files: dict[str, str], arguments: Sequence[str]) -> Path:
    """What the compiler makes of these arguments in a folder of these files; made once."""
    command = [compiler(), *arguments]
    key = hashlib.sha256("\0".join([*command, *map("\0".join, sorted(files.items()))]).encode())
    kept = CACHE / key.hexdigest()[:32]
    if kept.exists():
        return kept
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        for name, text in files.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        made = Path(folder, "made")
        done = subprocess.run([*command, "-o", made.name], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")
        made.replace(kept)
    return kept

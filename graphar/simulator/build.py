"""Builds programs that run kernels: cuda_src as it is, but for the files in twin/, which stand in for the PTX."""

from __future__ import annotations

import functools
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphar.plan.sources import files_of
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.compiler import check_libraries, compile_file, has_library
from graphar.simulator.simulation import structures

HERE = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare", "-Wno-clobbered")
FLAGS = ("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", *WARNINGS)
FLAGS += ("-mf16c",) if platform.machine() == "x86_64" else ()  # converts halves by an instruction, not by a call
UNOBSERVED = ("-std=c++20", "-O2", *WARNINGS)
# -Og compiles in two thirds of the time of -O1, and runs take a fifth longer. With ThreadSanitizer it has the views of
# a thread (sources/views.hpp) pass things to one another on its stack, which look like races. Numbers of lines, which
# sanitizers report, take a fifth of a compilation.
SANITIZERS = {
    "plain": ("-Og",),
    "thread": ("-O1", "-g1", "-fsanitize=thread", "-Wno-tsan"),
    "address": ("-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}
LIBRARIES = {"plain": (), "thread": ("libtsan",), "address": ("libasan", "libubsan")}
# Functions of ThreadSanitizer that give way to those of sources/views.cpp.
_WRAPPED = ("21MmapOrDieOnFatalErrorEmPKc", "15internal_memsetEPvim")


@dataclass(frozen=True)
class Mutation:
    """A replacement of text in a file of cuda_src, or of an algorithm from outside.

    Attributes:
        file: path below cuda_src, such as "device/sync/sentinel.cuh", or below the folder of the algorithm's file.
        old: the text to replace.
        new: its replacement.
        times: how often the old text occurs.
    """

    file: str
    old: str
    new: str
    times: int = 1

    def apply(self, text: str) -> str:
        if text.count(self.old) != self.times:
            raise ValueError(f"{self.file}: {self.old!r} stands there {text.count(self.old)} times, not {self.times}")
        return text.replace(self.old, self.new)


@functools.cache
def build(
    sources: tuple[KernelSource, ...], sanitizer: str, mutations: tuple[Mutation, ...] = (), folder: Path | None = None
) -> Path:
    """Returns the program that runs ``sources``, kernels of one file. A case names a kernel by its index in them.

    ``folder`` has more files beside those of cuda_src, which ``sources`` and files may name. CompileError if one does
    not compile; UnsupportedError without g++ 12 or newer, or the sanitizer's library.
    """
    check_libraries(LIBRARIES[sanitizer])
    (file,) = {source.file for source in sources}
    outside = _files_from_outside(Path(file)) if sources[0].digest else {}
    files = _files(mutations, folder, outside)
    included = Path(file).name if outside else file
    files["kernels.cpp"] = f'#include "first.hpp"\n#include "{included}"\n#include "kernels.hpp"\n{_table(sources)}'
    flags = (*FLAGS, *SANITIZERS[sanitizer])
    unobserved = ("scheduler", "views")
    linked = {f"{name}.o": compile_file(files, f"{name}.cpp", (*UNOBSERVED, "-c")) for name in unobserved}
    linked["run.o"] = compile_file(files, "run.cpp", (*flags, "-c"))
    precompiled = {"first.hpp.gch": compile_file(files, "first.hpp", (*flags, "-x", "c++-header"))}
    options = (*flags, *(_options_of_fibers() if sanitizer == "thread" else ()), *linked)
    return compile_file(files, "kernels.cpp", options, precompiled | linked)


@functools.cache
def _options_of_fibers() -> tuple[str, ...]:
    """Options with which ThreadSanitizer's fibers take less time, where its library can be linked statically."""
    if not has_library("libtsan.a"):
        return ()
    return ("-static-libtsan", *(f"-Wl,--wrap=_ZN11__sanitizer{name}" for name in _WRAPPED))


def _table(sources: tuple[KernelSource, ...]) -> str:
    """The C++ text of the kernels' epilogues, and a table of the kernels."""
    generated = "".join(dict.fromkeys(source.generated for source in sources))
    names = ", ".join(f"simulator::entry<{source.name}>" for source in sources)
    return f"{generated}void (*const kernels[])(Arguments) = {{{names}}};\n"


def _files_from_outside(file: Path) -> dict[str, str]:
    """The texts of a file from outside cuda_src, and of those that it includes from its folder, by path below it."""
    beside = {Path(name): text.decode() for name, text in files_of(file).items()}
    return {str(path.relative_to(file.parent)): text for path, text in beside.items() if file.parent in path.parents}


def _files(mutations: tuple[Mutation, ...], folder: Path | None, outside: Mapping[str, str]) -> dict[str, str]:
    """The texts of the simulator and of cuda_src by file name, and ``outside``. Twins replace their originals."""
    cuda_src = source_directory()
    files = {str(path.relative_to(cuda_src)): path.read_text() for path in cuda_src.rglob("*.cu*")}
    files |= {f"device/{path.relative_to(HERE / 'twin')}": path.read_text() for path in (HERE / "twin").rglob("*.cuh")}
    for beside in (HERE / "sources", folder) if folder else (HERE / "sources",):
        files |= {path.name: path.read_text() for path in beside.iterdir()}
    files |= {**outside, "case.hpp": structures()}
    for change in mutations:
        if change.file not in files:
            raise ValueError(f"there is no {change.file} in {cuda_src}, nor beside the kernel")
        files[change.file] = change.apply(files[change.file])
    return files

"""Builds programs that run kernels: cuda_src as it is, but for the files in twin/, which stand in for the PTX.

What g++ made of sources is kept in a folder of the kernel cache.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphar.errors import CompileError, UnsupportedError
from graphar.plan.sources import files_of
from graphar.runtime import cache
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import source_directory
from graphar.simulator.simulation import structures

HERE = Path(__file__).parent
WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-Wno-sign-compare", "-Wno-clobbered")
FLAGS = ("-std=c++20", "-ffp-contract=off", "-fno-strict-aliasing", *WARNINGS)
FLAGS += ("-mf16c",) if platform.machine() == "x86_64" else ()  # converts halves by an instruction, not by a call
UNOBSERVED = ("-std=c++20", "-O2", *WARNINGS)
# -Og compiles in two thirds of the time of -O1, and runs take a fifth longer. With ThreadSanitizer it has the views of
# a thread (sources/views.hpp) pass values to one another on its stack, which look like races. Numbers of lines, which
# sanitizers report, take a fifth of a compilation.
SANITIZERS = {
    "plain": ("-Og",),
    "thread": ("-O1", "-g1", "-fsanitize=thread", "-Wno-tsan"),
    "address": ("-Og", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"),
}
LIBRARIES = {"plain": (), "thread": ("libtsan",), "address": ("libasan", "libubsan")}
# Functions of ThreadSanitizer that sources/views.cpp replaces.
_WRAPPED = ("21MmapOrDieOnFatalErrorEmPKc", "15internal_memsetEPvim")
FOLDER = "simulator"  # of the kernel cache
KEPT_S = 30 * 24 * 3600  # how long an output is kept after its last use
OLDEST = 12  # of g++

_ERROR = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):(\d+:)? (fatal )?error:", re.MULTILINE)
_REQUIRED = (
    f"the simulator needs g++ {OLDEST} or newer, which CXX may name (Debian, Ubuntu: apt install g++;"
    " Fedora: dnf install gcc-c++ libtsan libasan libubsan)"
)


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

    ``folder`` has files besides cuda_src's, which ``sources`` and files may name. CompileError if one does
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


@functools.cache
def compiler() -> tuple[str, ...]:
    """Returns the command of the C++ compiler: ``$CXX``, or g++.

    UnsupportedError if there is none, or it is not g++ 12 or newer.
    """
    asked = os.environ.get("CXX")
    command = tuple(shlex.split(asked)) if asked else ("g++",)
    name = f"CXX={asked}" if asked else "g++"
    if not shutil.which(command[0]):
        raise UnsupportedError(f"{_REQUIRED}; {name} is not there")
    told = subprocess.run([*command, "-dM", "-E", "-x", "c++", os.devnull], capture_output=True, text=True, check=False)
    macros = dict(re.findall(r"^#define (\w+) (\S+)$", told.stdout, re.MULTILINE))
    if "__clang__" in macros or "__GNUC__" not in macros:
        raise UnsupportedError(f"{_REQUIRED}; {name} is another compiler")
    if int(macros["__GNUC__"]) < OLDEST:
        raise UnsupportedError(f"{_REQUIRED}; {name} is version {macros['__GNUC__']}")
    return command


@functools.cache
def _version() -> str:
    return subprocess.run([*compiler(), "--version"], capture_output=True, text=True, check=True).stdout


def has_library(name: str) -> bool:
    """Returns whether the compiler has a library, by the name of its file."""
    command = [*compiler(), f"-print-file-name={name}"]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()).is_absolute()


def check_libraries(names: Sequence[str]) -> None:
    """Raises UnsupportedError if the compiler lacks one of these libraries, such as "libtsan"."""
    for name in names:
        if not has_library(f"{name}.so") and not has_library(f"{name}.a"):
            raise UnsupportedError(f"{_REQUIRED}; {compiler()[0]} has no {name}")


def compile_file(
    files: Mapping[str, str], name: str, options: Sequence[str], made: Mapping[str, Path] | None = None
) -> Path:
    """Returns the compiler's output for one of ``files``, which are texts by file name, from the cache if it is there.

    ``made`` are earlier outputs that the file needs, by name. CompileError if it does not compile.
    """
    command, needed, made = [*compiler(), *options, "-I.", name], _with_included(files, name), made or {}
    links = [f"{link} {path}" for link, path in made.items()]
    texts = [_version(), *command, *map("\0".join, sorted(needed.items())), *links]
    kept = _folder() / hashlib.sha256("\0".join(texts).encode()).hexdigest()[:32]
    if kept.exists():
        os.utime(kept)
        return kept
    _forget_old(kept.parent)
    with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
        for path, text in needed.items():
            Path(folder, path).parent.mkdir(parents=True, exist_ok=True)
            Path(folder, path).write_text(text)
        for link, path in made.items():
            Path(folder, link).symlink_to(path)
        done = subprocess.run([*command, "-o", "made"], cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            first = _ERROR.search(done.stderr)
            file, line = (first["file"], int(first["line"])) if first else (name, 0)
            raise CompileError(file, line, f"{shlex.join(command)}\n{done.stderr}")
        Path(folder, "made").chmod(0o700)
        Path(folder, "made").replace(kept)
    return kept


def _folder() -> Path:
    """Returns the folder of programs in the kernel cache; without one to trust and to write, one of this process."""
    with contextlib.suppress(OSError):
        if os.access(folder := cache.folder_of(FOLDER), os.W_OK):
            return folder
    return Path(_folder_of_process().name)


@functools.cache
def _folder_of_process() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="graphar-", ignore_cleanup_errors=True)


def _forget_old(folder: Path) -> None:
    """Deletes what has not been used for KEPT_S."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may have deleted it
            if path.is_file() and time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()


def _with_included(files: Mapping[str, str], name: str) -> dict[str, str]:
    """Returns a file and all files that it includes, directly or not. g++ says what is missing."""
    included, left = {}, [name]
    while left:
        name = left.pop()
        if name in files and name not in included:
            included[name] = files[name]
            left += re.findall(r'^ *# *include "(.+)"', files[name], re.MULTILINE)
    return included

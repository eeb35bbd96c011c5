"""g++, and what it made of sources, which is kept in a folder of the kernel cache."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from graphar.errors import CompileError, UnsupportedError
from graphar.runtime import cache

FOLDER = "simulator"  # of the kernel cache
KEPT_S = 30 * 24 * 3600  # how long an output is kept after its last use
OLDEST = 12  # of g++

_ERROR = re.compile(r"^(?P<file>[^\s:]+):(?P<line>\d+):(\d+:)? (fatal )?error:", re.MULTILINE)
_REQUIRED = (
    f"the simulator needs g++ {OLDEST} or newer, which CXX may name (Debian, Ubuntu: apt install g++;"
    " Fedora: dnf install gcc-c++ libtsan libasan libubsan)"
)


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
    """Returns the folder of programs in the kernel cache; without one to trust, a folder of this process."""
    try:
        return cache.folder_of(FOLDER)
    except OSError:
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

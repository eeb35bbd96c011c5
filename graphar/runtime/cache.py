"""The kernel cache on disk: compiled kernels, shared by the processes of one user.

Trust: a cubin runs with the user's rights. A directory or an entry is used only if it belongs to the user, and if
neither group nor world may write it. Without a directory to trust, kernels stay in memory.

Folders beside the kernels hold files that the user may read and edit, such as tuning tables, and the programs of
graphar.simulator. They are trusted by the same rules.

Format: an entry is a file named by its key. It holds a line with the key and the content's hash, then the content. It
is written to a temporary file and renamed, so any number of processes may load and store at once; the last store wins.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import stat
import tempfile
import warnings
from pathlib import Path
from typing import NamedTuple

from graphar.errors import Reason

_KEY = re.compile("[0-9a-f]{64}")
_UNFINISHED = "unfinished-"


def load(key: str) -> bytes | None:
    """Returns the content stored under `key`; None if there is none, or if it is damaged or not trusted."""
    try:
        header, line_end, content = (load_file("", key) or b"").partition(b"\n")
    except OSError:
        return None
    return content if header + line_end == _header(key, content) else None


def store(key: str, content: bytes) -> None:
    """Stores `content` under `key`, and replaces an entry that is there. Warns if it cannot be written."""
    directory = _directory()
    if directory is None:
        return
    try:
        _replace(directory / key, _header(key, content) + content)
    except OSError as error:
        _warn_once(directory, f"cannot be written: {error.strerror}")


def load_file(folder: str, name: str) -> bytes | None:
    """Returns a file's content in a folder of the cache, or "": the cache; None: no file. OSError if not trusted."""

    def open_no_link(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening a named pipe would block

    directory = _directory()
    if directory is None:
        return None
    try:
        _check(directory / folder)
        with open(directory / folder / name, "rb", opener=open_no_link) as file:
            if distrust := _distrust(os.fstat(file.fileno())):
                raise PermissionError(f"it {distrust}")
            return file.read()
    except FileNotFoundError:
        return None


def store_file(folder: str, name: str, content: bytes) -> Path:
    """Writes or replaces a file in a folder of the cache, atomically, and returns its path. OSError if it cannot."""
    path = folder_of(folder) / name
    _replace(path, content)
    return path


def folder_of(name: str) -> Path:
    """Returns a folder of the cache, made if missing. OSError if there is no directory to trust, or it is not."""
    directory = _directory()
    if directory is None:
        raise PermissionError("there is no cache directory to trust")
    path = directory / name
    path.mkdir(mode=0o700, exist_ok=True)
    _check(path)
    return path


def _check(folder: Path) -> None:
    if distrust := _distrust(folder.stat()):
        raise PermissionError(f"{folder} {distrust}")


def _directory() -> Path | None:
    """Returns the cache's directory, and makes it if missing; warns and returns None if it cannot be used."""
    directory, problem = place()
    if problem:
        _warn_once(directory, problem)
        return None
    return directory


def place() -> tuple[Path | None, Reason | None]:
    """Returns the cache's directory, made if missing, and why it cannot be used."""
    directory = None
    try:
        chosen, caches = os.environ.get("GRAPHAR_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME")
        directory = Path(chosen) if chosen else Path(caches or Path.home() / ".cache") / "graphar"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        return directory, _distrust(directory.stat())
    except RuntimeError:
        return None, "cannot be placed: no home directory is known"
    except OSError as error:
        return directory, f"cannot be made: {error.strerror}"


class Survey(NamedTuple):
    keys: list[str]  # the keys of the entries that load
    damaged: list[str]  # the keys of the entries that do not load
    unfinished: list[str]  # the names of temporary files, which are being written now or were left by a killed process


def survey() -> Survey:
    directory = _directory()
    names = sorted(os.listdir(directory)) if directory else []
    loads = {key: load(key) is not None for key in filter(_KEY.fullmatch, names)}
    kept, damaged = ([key for key in loads if loads[key] is wanted] for wanted in (True, False))
    return Survey(kept, damaged, [name for name in names if name.startswith(_UNFINISHED)])


def _distrust(status: os.stat_result) -> Reason | None:
    """Returns why other users may have written a directory or an entry."""
    if status.st_uid != os.geteuid():
        return "is not trusted: it must belong to the user of this process"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "is not trusted: group and world must not be able to write it"
    return None


def _header(key: str, content: bytes) -> bytes:
    return f"graphar {key} {hashlib.sha256(content).hexdigest()}\n".encode()


def _replace(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_UNFINISHED)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@functools.cache
def _warn_once(directory: Path | None, reason: str) -> None:
    message = f"the kernel cache {directory or ''} {reason}. Kernels stay in memory; GRAPHAR_CACHE_DIR names another."
    warnings.warn(message, RuntimeWarning, stacklevel=2)

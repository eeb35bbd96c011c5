"""Identifies processes, and tells whether a process has ended: for ranks that wait for another rank."""

from __future__ import annotations

import os
from pathlib import Path

_PROC = Path("/proc")


def identify() -> str:
    """Returns a unique name of this process: boot and namespace, process number, and start time."""
    return f"{_where()} {os.getpid()} {_start_of(os.getpid())}"


def has_ended(identity: str) -> bool:
    """Returns whether the process is known to have ended; False if it cannot be seen from this process."""
    where, number, start = identity.rsplit(" ", 2)
    return bool(where) and where == _where() and _start_of(int(number)) != start


def _where() -> str:
    """Returns the boot id and the namespace of process numbers; an empty string if the system does not provide them."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _start_of(number: int) -> str:
    """Returns when a process started, in ticks since boot; an empty string if it has ended or is a zombie."""
    try:
        stat = (_PROC / str(number) / "stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()  # the process name before it may contain any character
    return "" if state in "ZX" else rest[18]

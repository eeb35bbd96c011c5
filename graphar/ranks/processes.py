"""Which process a rank is, and whether it still runs: what a wait asks about a rank that does not come."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")


def identify() -> str:
    """This process in words that no other has: where process numbers count, its number, and when it started."""
    return f"{_where()} {os.getpid()} {_start_of(os.getpid())}"


def host() -> str:
    """This host, told apart from containers and machines of the same name by its boot."""
    boot = _PROC / "sys/kernel/random/boot_id"
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else os.uname().release}"


def has_ended(identity: str) -> bool:
    """Whether that process is known to have ended; False also where it cannot be seen from here."""
    where, number, start = identity.rsplit(" ", 2)
    return bool(where) and where == _where() and _start_of(int(number)) != start


def _where() -> str:
    """This boot of this host, and the namespace of its process numbers; nothing where the system does not say."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return ""


def _start_of(number: int) -> str:
    """When a process started, in ticks since boot; nothing where it has ended, waited for by its parent or not."""
    try:
        stat = (_PROC / str(number) / "stat").read_text()
    except OSError:
        return ""
    state, *rest = stat.rpartition(")")[2].split()  # the name before may hold anything
    return "" if state in "ZX" else rest[18]

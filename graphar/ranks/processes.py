"""Identifies hosts and processes, and tells whether a process has ended: for ranks that wait for another rank."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from pathlib import Path

from graphar.ranks.descriptors import DIRECTORY_SWITCH, directory

_PROC = Path("/proc")


def identify() -> str:
    """Returns a unique name of this process: boot and namespace, process number, and start time."""
    return f"{_where()} {os.getpid()} {_start_of(os.getpid())}"


def host() -> str:
    """Returns a name of this host, and after a "/" the boot id, which tells machines with equal host names apart.

    Containers of one host have host names of their own. A folder that GRAPHAR_SOCKET_DIR names takes their place:
    ranks with the same folder run on one kernel.
    """
    boot = _PROC / "sys/kernel/random/boot_id"
    name = _common_folder() or socket.gethostname()
    return f"{name}/{boot.read_text().strip() if boot.exists() else os.uname().release}"


def _common_folder() -> str:
    """Returns which folder GRAPHAR_SOCKET_DIR names, whatever its path; an empty string without one."""
    try:
        found = directory().stat() if os.environ.get(DIRECTORY_SWITCH) else None
    except OSError:  # ranks cannot pass anything over it
        return ""
    return f"{found.st_dev}:{found.st_ino}" if found else ""


def why_apart(hosts: Iterable[str]) -> str:
    """Returns why ranks on these hosts, named by :func:`host`, share no memory; an empty string if they may."""
    names = set(hosts)
    if len(names) == 1:
        return ""
    containers = ", or in containers of one, which must share a folder that GRAPHAR_SOCKET_DIR names"
    boots = {name.rpartition("/")[2] for name in names}
    return f"the ranks are on {len(names)} hosts{containers if len(boots) == 1 else ''}"


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

"""Names the hosts of ranks, and their processes, and tells whether a process has ended.

Hosts are machines, and on one machine containers that share no directory.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from graphar.errors import Reason
from graphar.ranks.descriptors import DIRECTORY_SWITCH, directory

_PROC = Path("/proc")
_BOOT = _PROC / "sys/kernel/random/boot_id"


def host() -> str:
    """Returns a name of this process's host. It ends in the boot id, since machines may have equal host names.

    Containers of one machine have host names of their own. A directory of sockets that they share makes them one host.
    """
    name = socket.gethostname()
    if os.environ.get(DIRECTORY_SWITCH):
        with contextlib.suppress(OSError):
            status = directory().stat()  # its path may differ between containers
            name = f"directory {status.st_dev}:{status.st_ino}"
    return f"{name}/{_BOOT.read_text().strip() if _BOOT.exists() else os.uname().release}"


def several_hosts(names: Iterable[str]) -> Reason | None:
    """Returns that ranks whose hosts have these names are on several, and what to do."""
    distinct = set(names)
    if len(distinct) == 1:
        return None
    said = f"the ranks are on {len(distinct)} hosts"
    if len({name.rpartition("/")[2] for name in distinct}) == 1:
        said += f" by name, but on one machine; containers must share a directory: name it in {DIRECTORY_SWITCH}"
    return said


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
        return f"{_BOOT.read_text().strip()} {os.readlink(_PROC / 'self/ns/pid')}"
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

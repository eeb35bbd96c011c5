"""Names the hosts of ranks: machines, and on one machine containers that share no directory."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from graphar.errors import Reason
from graphar.ranks.descriptors import DIRECTORY_SWITCH, directory

_BOOT = Path("/proc/sys/kernel/random/boot_id")


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

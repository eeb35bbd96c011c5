"""The doctor's sections about memory that processes share, the kernel cache and the tuning table."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from graphar.cli.doctor.findings import Finding, note, problem
from graphar.cli.doctor.gpus import gpu_count
from graphar.plan import tables
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.sizes import GB, MB
from graphar.ranks import descriptors
from graphar.runtime import cache, user_tables
from graphar.runtime.availability import missing_software
from graphar.runtime.memory import virtual_memory

_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_NBYTES = 64 * MB  # the default of container engines
_HOST_NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}  # Linux's inode numbers of the host's namespaces
_LISTED = 5


def sharing() -> Iterator[Finding]:
    """Yields the state of shared memory, temporary files, and how ranks in processes share GPU memory."""
    yield _shared_memory()
    yield _temporary_files()
    if reason := _why_no_sockets() or _why_no_virtual_memory():
        text = f"by CUDA IPC, and `suspend` is refused, since {reason}"
        yield note("GPU memory of ranks", text)
        yield _namespaces()
    else:
        text = f"by file descriptors over sockets in {descriptors.directory()}, "
        text += f"where ranks in several containers need a common directory, named in {descriptors.DIRECTORY_SWITCH}"
        yield Finding("GPU memory of ranks", text)


def _why_no_sockets() -> str:
    try:
        descriptors.directory()
    except OSError as error:
        return str(error)
    return ""


def _why_no_virtual_memory() -> str:
    """Returns why memory of this machine's GPUs cannot be given back while its addresses stay, or an empty string."""
    usable = 0 if missing_software() else gpu_count()
    return next(filter(None, map(virtual_memory.why_not, range(usable))), "")


def _namespaces() -> Finding:
    own = [kind for kind, host in _HOST_NAMESPACES.items() if _namespace(kind) not in (None, host)]
    if own:
        text = f"own {' and '.join(own)} namespace, as in a container: all ranks of a host must share it "
        return note("CUDA IPC", text + f"(`{' '.join(f'--{kind}=host' for kind in own)}` where each has a container)")
    return Finding("CUDA IPC", "the host's namespaces")


def _shared_memory() -> Finding:
    name = str(_SHARED_MEMORY)
    try:
        status = os.statvfs(_SHARED_MEMORY)
        with tempfile.TemporaryFile(dir=_SHARED_MEMORY):
            pass
    except OSError as error:
        advice = (
            "graphar does without, NCCL and torch do not: mount a tmpfs there, or run the container with --ipc=host"
        )
        return problem(name, f"cannot be used: {error.strerror}", advice)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{total / GB:.1f} GB, {free / GB:.1f} GB free"
    if total <= _LITTLE_NBYTES:
        return note(name, f"{text}: little for NCCL and data loaders; --ipc=host or --shm-size=1g gives more")
    return Finding(name, text)


def _temporary_files() -> Finding:
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"graphar")
        return Finding("temporary files", f"in {tempfile.gettempdir()}")
    except OSError as error:
        advice = "graphar does without, torch.compile does not: name a directory you may write in TMPDIR"
        return problem("temporary files", f"cannot be made: {error.strerror}", advice)


def _namespace(kind: str) -> int | None:
    try:
        return os.stat(f"/proc/self/ns/{kind}").st_ino
    except OSError:
        return None


def kernel_cache() -> Iterator[Finding]:
    """Yields the directory of the kernel cache, whether it can be written, and damaged entries."""
    directory, reason = cache.place()
    if directory is None or reason:
        advice = "every process recompiles its kernels: name a directory that you can write in GRAPHAR_CACHE_DIR"
        if reason and "not trusted" in reason:
            advice += ", or `chmod go-w` this one if it is yours"
        yield problem("directory", f"{directory or ''} {reason}".strip(), advice)
        return
    status = directory.stat()
    yield Finding("directory", f"{directory}, of user {status.st_uid}, mode {status.st_mode & 0o777:o}")
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        advice = "kernels that are not there yet are compiled by every process: make it writable, or name another in "
        yield problem("writable", f"no: {error.strerror}", advice + "GRAPHAR_CACHE_DIR")
    found = cache.survey()
    yield Finding("entries", f"{len(found.keys)} compiled kernels")
    if found.damaged:
        listed = " ".join(found.damaged[:_LISTED]) + (" ..." if len(found.damaged) > _LISTED else "")
        advice = f"they are not used; if nobody else may have written them, delete them: cd {directory} && rm {listed}"
        yield problem("damaged", f"{len(found.damaged)} entries", advice)
    if found.unfinished:
        text = f"{len(found.unfinished)} files, being written now or left by killed processes: these can be deleted"
        yield note("unfinished", text)


def tuning() -> Iterator[Finding]:
    """Yields the tuning table of this machine's calls, and where it comes from."""
    if gpu_count() == 0:
        yield note("table", "none is needed without GPUs")
        return
    name = tables.slug(torch.cuda.get_device_name(0))
    table, origin = None, f"the cache, {user_tables.FOLDER}/{name}.json"
    try:
        table = user_tables.user_table(name)
    except (OSError, ValueError) as error:
        yield problem(f"{name}.json", f"ignored: {error}", "`python -m graphar tune` writes another; or delete it")
    if table is None:
        table, origin = user_tables.find_table(torch.cuda.get_device_name(0)), "the package"
    yield Finding("table", f"{table.name} from {origin}: {table.machine}, {table.date}")
    ranks = min(gpu_count(), MAX_RANKS)
    if table.name == tables.DEFAULT or (ranks > 1 and ranks not in table.rows):
        unmeasured = "this GPU was" if table.name == tables.DEFAULT else f"{ranks} ranks were"
        yield note("tune", f"{unmeasured} not measured yet: `python -m graphar tune` takes about a minute")

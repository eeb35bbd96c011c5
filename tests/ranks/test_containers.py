"""Ranks in containers of one machine: each has its own user, IPC, PID, mount, UTS and network namespace."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from graphar.errors import UnsupportedError
from graphar.ranks.rendezvous import StoreRendezvous
from graphar.runtime.memory.peer_memory import ProcessMemory
from tests.fake_gpu import FakeDriver, installed, tensor_at

NAMESPACES = ("--user", "--map-root-user", "--ipc", "--pid", "--fork", "--mount", "--mount-proc", "--uts", "--net")
# "$1" is a folder of the container's own, "$2" one that all have in common, at a place of its own in each.
SCRIPT = """
set -e
mount -t tmpfs -o mode=700 tmpfs "$1"
mkdir "$1/volume of rank $3"
mount --bind "$2" "$1/volume of rank $3"
echo "container$3" > /proc/sys/kernel/hostname
export TMPDIR="$1"
shift 3
exec "$@"
"""
RANK = "import sys; from tests.ranks.test_containers import be_rank; be_rank(int(sys.argv[1]), sys.argv[2])"
TIMEOUT_S = 60


def in_container(rank, own, common, *command):
    """A process that runs the command in namespaces of its own."""
    script = ("sh", "-c", SCRIPT, "sh", own, common, str(rank), *command)
    return subprocess.Popen(
        ["unshare", *NAMESPACES, "--kill-child", *script],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def be_rank(rank, own):
    """Prints what comes of sharing memory in each case."""
    volume = Path(own, f"volume of rank {rank}")
    store = dist.FileStore(str(volume / "store"), 2)
    found = {}
    for case, directory in {"common": volume / "sockets", "own": Path(own, "sockets"), "unnamed": None}.items():
        found[case] = share(StoreRendezvous(store, case, rank, 2, TIMEOUT_S), directory)
    socket.sethostname("one name")
    found["own, with one host name"] = share(StoreRendezvous(store, "one name", rank, 2, TIMEOUT_S), None)
    print(json.dumps(found))


def share(meet, directory):
    """What a rank finds in the memory of all ranks, each of which wrote its number there; or why there is none."""
    os.environ.pop("GRAPHAR_SOCKET_DIR", None)
    if directory:
        os.environ["GRAPHAR_SOCKET_DIR"] = str(directory)
    with installed(FakeDriver()):
        memory = ProcessMemory(meet.rank, meet)
        try:
            memory.check()
        except UnsupportedError as error:
            return str(error)
        if memory.why_stays:
            return memory.why_stays
        buffer = memory.allocate(1000)
        tensor_at(buffer.pointers[meet.rank], 1000).fill_(meet.rank)
        meet.exchange("written", b"")
        read = [tensor_at(pointer, 1000).unique().tolist() for pointer in buffer.pointers]
        meet.exchange("read", b"")
        memory.close()
        return read


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each of two ranks in containers prints."""
    common, *own = (str(tmp_path_factory.mktemp(name)) for name in ("common", "own", "own"))
    if not shutil.which("unshare"):
        pytest.skip("needs unshare(1)")
    _, refused = (probe := in_container(0, own[0], common, "true")).communicate(timeout=TIMEOUT_S)
    if probe.returncode:
        pytest.skip(f"needs the right to make namespaces: {refused.strip()}")
    ranks = [in_container(rank, own[rank], common, sys.executable, "-c", RANK, str(rank), own[rank]) for rank in (0, 1)]
    ended = [one.communicate(timeout=2 * TIMEOUT_S) for one in ranks]
    assert [one.returncode for one in ranks] == [0, 0], ended
    return [json.loads(printed.splitlines()[-1]) for printed, _ in ended]


def test_containers_with_a_common_directory_share_memory(found):
    assert [one["common"] for one in found] == [[[0], [1]]] * 2


@pytest.mark.parametrize("directories", ["own", "unnamed"])
def test_containers_without_a_common_directory_are_told_what_to_do(found, directories):
    said = "the ranks are on 2 hosts by name, but on one machine; containers must share a directory: name it in GRAPHAR"

    assert [one[directories].startswith(said) for one in found] == [True, True]


def test_containers_of_one_host_name_without_a_common_directory_are_told_what_to_do(found):
    for one in found:
        assert "the socket of rank 1, " in one["own, with one host name"]
        assert one["own, with one host name"].endswith("must share a directory: name it in GRAPHAR_SOCKET_DIR")

"""Ranks in containers of one host, with namespaces of their own: they share a folder, and find out that they do."""

from __future__ import annotations

import functools
import os
import shutil
import socket
import subprocess
import sys

import pytest

from graphar.ranks import processes
from graphar.ranks.processes import host, why_apart

CONTAINER = ("unshare", "--uts", "--ipc", "--pid", "--fork", "--net", "--mount-proc")
USERS = {"one user namespace": (), "user namespaces of their own": ("--user", "--map-root-user")}

# What a rank prints: its process number, whether the ranks are on one host, what the other one sent, and whether the
# other one is thought to have ended.
RANK = """
import os, socket, sys
import torch.distributed as dist
from graphar.ranks import processes
from graphar.ranks.descriptors import Channel
from graphar.ranks.rendezvous import StoreRendezvous

rank, folder = int(sys.argv[1]), sys.argv[2]
socket.sethostname(f"container{rank}")
ranks = StoreRendezvous(dist.FileStore(f"{folder}/store", 2), "t", rank, 2, timeout_s=60)
hosts = [one.decode() for one in ranks.exchange("hosts", processes.host().encode())]
seen = [one.decode() for one in ranks.exchange("processes", processes.identify().encode())]
channel = Channel(rank, 2)
channel.connect([one.decode() for one in ranks.exchange("addresses", channel.address.encode())])
ranks.exchange("connected", b"")
file = os.memfd_create("memory")
os.write(file, f"memory of {rank}".encode())
channel.send(0, [file])
((descriptor,),) = channel.receive(0, 1).values()
ended = processes.has_ended(seen[1 - rank])
print(os.getpid(), processes.why_apart(hosts), os.pread(descriptor, 99, 0).decode(), ended, sep="|")
ranks.exchange("done", b"")
"""


@functools.cache
def why_no_containers():
    if shutil.which("unshare") is None:
        return "there is no unshare"
    for flags in USERS.values():
        done = subprocess.run([*CONTAINER, *flags, "true"], capture_output=True, text=True, check=False)
        if done.returncode:
            return f"namespaces cannot be made here: {done.stderr.strip()}"
    return ""


def say(folder, *flags):
    """What two ranks print that have a container each."""
    if reason := why_no_containers():
        pytest.skip(reason)
    command = [*CONTAINER, *flags, sys.executable, "-c", RANK]
    made = [
        subprocess.Popen([*command, str(rank), str(folder)], stdout=subprocess.PIPE, text=True, env=environment(folder))
        for rank in range(2)
    ]
    return [one.communicate(timeout=120)[0].strip().split("|") for one in made]


def environment(folder):
    return os.environ | {"GRAPHAR_SOCKET_DIR": str(folder / "sockets")}


@pytest.mark.parametrize("flags", USERS.values(), ids=USERS)
def test_ranks_in_containers_with_a_common_folder_are_on_one_host_and_pass_descriptors(tmp_path, flags):
    assert say(tmp_path, *flags) == [
        ["1", "", "memory of 1", "False"],
        ["1", "", "memory of 0", "False"],
    ]


# ---- names of hosts -------------------------------------------------------------------------------------------------


def test_without_a_folder_a_host_has_its_own_name(monkeypatch):
    monkeypatch.delenv("GRAPHAR_SOCKET_DIR", raising=False)

    assert host().startswith(f"{socket.gethostname()}/")


def test_a_folder_is_the_same_by_all_its_paths_and_another_is_another(monkeypatch, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    found = []
    for path in (tmp_path / "a", tmp_path / "link" / "a", tmp_path / "b"):
        monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(path))
        found.append(host())

    assert found[0] == found[1] != found[2]


def test_a_folder_that_is_not_trusted_names_no_host(monkeypatch, tmp_path):
    tmp_path.chmod(0o777)
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(tmp_path))

    assert host().startswith(f"{socket.gethostname()}/")


def test_machines_with_equal_names_are_apart(monkeypatch, tmp_path):
    boot = tmp_path / "sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    monkeypatch.setattr(processes, "_PROC", tmp_path)
    found = []
    for text in ("1", "2"):
        boot.write_text(text)
        found.append(host())

    assert why_apart(found) == "the ranks are on 2 hosts"


def test_containers_of_one_host_are_told_what_they_need():
    assert why_apart(["a/1", "a/1"]) == ""
    assert why_apart(["a/1", "b/1"]) == (
        "the ranks are on 2 hosts, or in containers of one, which must share a folder that GRAPHAR_SOCKET_DIR names"
    )
    assert why_apart(["a/1", "b/2", "a/2"]) == "the ranks are on 3 hosts"

"""What set-up says if the kernels cannot reach all ranks. The GPUs are stand-ins."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from graphar.errors import UnsupportedError
from graphar.ranks.rendezvous import StoreRendezvous
from graphar.runtime import peer_memory
from graphar.runtime.peer_memory import LocalMemory, ProcessMemory

NO_PROBLEM = ""


@pytest.fixture
def machine(monkeypatch):
    """Sets the host, the GPU and the unreachable peers that each rank finds. Ranks are threads."""

    def set_up(hosts, gpus, problems):
        mine = threading.local()

        def check(rank, store):
            mine.rank = rank
            try:
                ProcessMemory(rank, StoreRendezvous(store, "t", rank, 2, timeout_s=5)).check()
            except (UnsupportedError, ValueError) as error:
                return error

        monkeypatch.setattr(peer_memory, "host", lambda: hosts[mine.rank])
        monkeypatch.setattr(peer_memory, "_gpu", lambda index: gpus[mine.rank])
        monkeypatch.setattr(peer_memory, "_unreachable", lambda device, gpus: problems[mine.rank])
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(check, range(2), [store, store]))

    return set_up


def test_ranks_on_several_hosts_are_told_so(machine):
    for error in machine(hosts=["a", "b"], gpus=["0", "1"], problems=[NO_PROBLEM] * 2):
        assert isinstance(error, UnsupportedError)
        assert str(error) == "the ranks are on 2 hosts"


def test_two_ranks_of_one_gpu_are_named_on_both(machine):
    for error in machine(hosts=["a", "a"], gpus=["7", "7"], problems=[NO_PROBLEM] * 2):
        assert isinstance(error, ValueError)
        assert str(error) == "ranks 0 and 1 both use GPU 7; call torch.cuda.set_device(local_rank)"


def test_a_peer_that_one_rank_cannot_reach_is_known_to_all(machine):
    missing = "cuda:1 has no peer access to cuda:0"
    for error in machine(hosts=["a", "a"], gpus=["0", "1"], problems=[NO_PROBLEM, missing]):
        assert isinstance(error, UnsupportedError)
        assert str(error) == f"rank 1: {missing}"


def test_devices_without_peer_access_are_named(monkeypatch):
    monkeypatch.setattr(peer_memory, "call", lambda function, *args: 0)
    with pytest.raises(UnsupportedError, match=r"cuda:0 has no peer access to cuda:1 .*topo -p2p r` says why"):
        LocalMemory([0, 1]).check()

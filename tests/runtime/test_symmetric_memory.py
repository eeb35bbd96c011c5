"""What set-up says if the kernels cannot reach all ranks. The GPUs are stand-ins."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from graphar.errors import UnsupportedError
from graphar.ranks.rendezvous import StoreRendezvous
from graphar.runtime import availability
from graphar.runtime.memory import peer_memory, virtual_memory
from graphar.runtime.memory.peer_memory import LocalMemory, ProcessMemory

NO_PROBLEM = None


@pytest.fixture
def machine(monkeypatch):
    """Sets the host, the GPU, the unreachable peers and the leave to share that each rank finds. Ranks are threads."""

    def set_up(hosts, gpus, problems, may_share=(False, False)):
        mine = threading.local()

        def check(rank, store):
            mine.rank = rank
            try:
                ProcessMemory(rank, StoreRendezvous(store, "t", rank, 2, timeout_s=5)).check()
            except (UnsupportedError, ValueError) as error:
                return error

        monkeypatch.setattr(virtual_memory, "why_not", lambda device: "there is no GPU")
        monkeypatch.setattr(peer_memory, "host", lambda: hosts[mine.rank])
        monkeypatch.setattr(peer_memory, "_gpu", lambda index: gpus[mine.rank])
        monkeypatch.setattr(peer_memory, "_unreachable", lambda device, gpus: problems[mine.rank])
        monkeypatch.setattr(peer_memory, "may_share_gpu", lambda: may_share[mine.rank])
        store = dist.HashStore()
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(check, range(2), [store, store]))

    return set_up


def test_ranks_on_several_hosts_are_told_so(machine):
    for error in machine(hosts=["a", "b"], gpus=["0", "1"], problems=[NO_PROBLEM] * 2):
        assert isinstance(error, UnsupportedError)
        assert str(error) == "the ranks are on 2 hosts"


@pytest.mark.parametrize("may_share", [(False, False), (True, False)], ids=["no switch", "a switch on one rank alone"])
def test_two_ranks_of_one_gpu_are_named_on_both(machine, may_share):
    for error in machine(hosts=["a", "a"], gpus=["7", "7"], problems=[NO_PROBLEM] * 2, may_share=may_share):
        assert isinstance(error, ValueError)
        assert str(error) == "ranks 0 and 1 both use GPU 7; call torch.cuda.set_device(local_rank)"


def test_ranks_that_may_share_a_gpu_are_accepted(machine):
    found = machine(hosts=["a", "a"], gpus=["7", "7"], problems=[NO_PROBLEM] * 2, may_share=(True, True))

    assert found == [None, None]


def test_ranks_that_share_a_gpu_need_no_peer_access(monkeypatch):
    """The driver denies a GPU peer access to itself."""
    answers = {peer_memory.driver.cuDeviceGetCount: 1, peer_memory.driver.cuDeviceCanAccessPeer: 0}
    monkeypatch.setattr(peer_memory, "call", lambda function, *args: answers[function])
    monkeypatch.setattr(peer_memory, "_gpu", lambda index: "7")

    assert peer_memory._unreachable(0, ["7", "7"]) == NO_PROBLEM


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_the_environment_says_whether_ranks_may_share_a_gpu(monkeypatch, value, expected):
    monkeypatch.delenv("GRAPHAR_TEST_SHARE_GPU", raising=False)
    if value is not None:
        monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", value)

    assert availability.may_share_gpu() is expected


def test_a_peer_that_one_rank_cannot_reach_is_known_to_all(machine):
    missing = "cuda:1 has no peer access to cuda:0"
    for error in machine(hosts=["a", "a"], gpus=["0", "1"], problems=[NO_PROBLEM, missing]):
        assert isinstance(error, UnsupportedError)
        assert str(error) == f"rank 1: {missing}"


def test_devices_without_peer_access_are_named(monkeypatch):
    monkeypatch.setattr(peer_memory, "call", lambda function, *args: 0)
    with pytest.raises(UnsupportedError, match=r"cuda:0 has no peer access to cuda:1 .*topo -p2p r` says why"):
        LocalMemory([0, 1]).check()

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


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Sets what each rank finds, and returns why its memory stays, or the error. Ranks are threads, with a GPU each."""
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(tmp_path / "sockets"))

    def set_up(trials=("there is no GPU",) * 2, hosts="aaa", gpus="012", problems=(None,) * 3, may_share=(False,) * 3):
        mine, store = threading.local(), dist.HashStore()

        def check(rank):
            mine.rank = rank
            memory = ProcessMemory(rank, StoreRendezvous(store, "t", rank, len(trials), timeout_s=5))
            try:
                memory.check()
            except (UnsupportedError, ValueError) as error:
                return error
            memory.close()
            return memory.why_stays

        monkeypatch.setattr(virtual_memory, "why_not", lambda device: trials[mine.rank])
        monkeypatch.setattr(peer_memory, "host", lambda: hosts[mine.rank])
        monkeypatch.setattr(peer_memory, "_gpu", lambda index: gpus[mine.rank])
        monkeypatch.setattr(peer_memory, "_unreachable", lambda device, gpus: problems[mine.rank])
        monkeypatch.setattr(peer_memory, "may_share_gpu", lambda: may_share[mine.rank])
        with ThreadPoolExecutor(len(trials)) as pool:
            return list(pool.map(check, range(len(trials))))

    return set_up


def test_ranks_on_several_hosts_are_told_so(machine):
    for error in machine(hosts="ab"):
        assert isinstance(error, UnsupportedError)
        assert str(error) == "the ranks are on 2 hosts"


@pytest.mark.parametrize("may_share", [(False, False), (True, False)], ids=["no switch", "a switch on one rank alone"])
def test_two_ranks_of_one_gpu_are_named_on_both(machine, may_share):
    for error in machine(gpus="77", may_share=may_share):
        assert isinstance(error, ValueError)
        assert str(error) == "ranks 0 and 1 both use GPU 7; call torch.cuda.set_device(local_rank)"


def test_ranks_that_may_share_a_gpu_are_accepted(machine):
    assert machine(gpus="77", may_share=(True, True)) == ["rank 0: there is no GPU"] * 2


def test_ranks_that_share_a_gpu_need_no_peer_access(monkeypatch):
    """The driver denies a GPU peer access to itself."""
    answers = {peer_memory.driver.cuDeviceGetCount: 1, peer_memory.driver.cuDeviceCanAccessPeer: 0}
    monkeypatch.setattr(peer_memory, "call", lambda function, *args: answers[function])
    monkeypatch.setattr(peer_memory, "_gpu", lambda index: "7")

    assert peer_memory._unreachable(0, ["7", "7"]) is None


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_the_environment_says_whether_ranks_may_share_a_gpu(monkeypatch, value, expected):
    monkeypatch.delenv("GRAPHAR_TEST_SHARE_GPU", raising=False)
    if value is not None:
        monkeypatch.setenv("GRAPHAR_TEST_SHARE_GPU", value)

    assert availability.may_share_gpu() is expected


def test_a_peer_that_one_rank_cannot_reach_is_known_to_all(machine):
    missing = "cuda:1 has no peer access to cuda:0"
    for error in machine(problems=(None, missing)):
        assert isinstance(error, UnsupportedError)
        assert str(error) == f"rank 1: {missing}"


def test_devices_without_peer_access_are_named(monkeypatch):
    monkeypatch.setattr(peer_memory, "call", lambda function, *args: 0)
    with pytest.raises(UnsupportedError, match=r"cuda:0 has no peer access to cuda:1 .*topo -p2p r` says why"):
        LocalMemory([0, 1]).check()


def test_if_one_rank_cannot_share_so_that_addresses_stay_no_rank_does(machine):
    assert machine(("", "it is a sandbox", "")) == ["rank 1: it is a sandbox"] * 3


def test_a_directory_that_is_not_trusted_is_the_reason(machine, tmp_path):
    (tmp_path / "sockets").mkdir(mode=0o755)

    for found in machine(("", "")):
        assert found.startswith("rank 0: ")
        assert "is not trusted" in found


def test_where_all_ranks_can_there_is_no_reason(machine):
    assert machine(("", "")) == [None, None]

"""NVLink multicast is off without an opt-in, and torch's symmetric memory is not used while it is off.

Nothing here sets GRAPHAR_MULTICAST: environments are dictionaries, and torch's symmetric memory is stood in for.
"""

import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

import graphar
from graphar.errors import CommunicatorError, UnsupportedError
from graphar.plan.algorithms import Algorithm, kernels_that
from graphar.plan.call import Call
from graphar.plan.slices import Slice
from graphar.plan.tables import shipped_table
from graphar.plan.work import Sum
from graphar.ranks.rendezvous import StoreRendezvous
from graphar.runtime.catalogue import kernel_source
from graphar.runtime.engine import Engine
from graphar.runtime.member import Member
from graphar.runtime.memory import multicast
from graphar.runtime.memory.multicast import TorchMemory
from graphar.runtime.runner import COUNTERS_NBYTES, Runner

PACKAGE = Path(graphar.__file__).parent
OPEN = {"GRAPHAR_MULTICAST": "1"}
SHUT = [
    ({}, "NVLink multicast needs the opt-in GRAPHAR_MULTICAST=1"),
    ({"GRAPHAR_MULTICAST": "0"}, "NVLink multicast needs the opt-in GRAPHAR_MULTICAST=1"),
    (OPEN | {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}, "TORCH_SYMM_MEM_DISABLE_MULTICAST=1 forbids NVLink multicast"),
    (OPEN | {"NCCL_NVLS_ENABLE": "0"}, "NCCL_NVLS_ENABLE=0 forbids NVLink multicast"),
    (OPEN | {"NVSHMEM_DISABLE_NVLS": "true"}, "NVSHMEM_DISABLE_NVLS=true forbids NVLink multicast"),
]
every_shut_environment = pytest.mark.parametrize(("environment", "reason"), SHUT)
every_multimem_kernel = pytest.mark.parametrize("algorithm", kernels_that(lambda row: not row.exact))
why_not = multicast.why_not  # some tests put another in its place


def test_deterministic_algorithms_forbid_multicast():
    torch.use_deterministic_algorithms(True)
    try:
        assert (
            why_not(OPEN)
            == "torch.use_deterministic_algorithms forbids NVLink multicast, which adds in no defined order"
        )
    finally:
        torch.use_deterministic_algorithms(False)
    assert why_not(OPEN) is None


@pytest.mark.promise("Multicast is off unless you ask for it and no rank forbids it.")
def test_the_gate_opens_for_one_row_of_its_truth_table_only():
    values = (None, "", "0", "1", "2", "00", "no", "yes", "true", " 1")
    names = ("GRAPHAR_MULTICAST", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS")
    silent, nvls = (None, "", "0"), (None, "", "1", "2")
    opening = set(itertools.product(("1",), silent, nvls, silent))

    opened = {
        row
        for row in itertools.product(values, repeat=len(names))
        if not why_not({name: value for name, value in zip(names, row, strict=True) if value is not None})
    }

    assert opened == opening


@every_shut_environment
def test_the_gate_says_what_shuts_it(environment, reason):
    assert why_not(environment) == reason


def test_the_tests_environment_has_not_opted_in():
    assert why_not(os.environ) == "NVLink multicast needs the opt-in GRAPHAR_MULTICAST=1"


@pytest.mark.promise("Multicast is off unless you ask for it and no rank forbids it.")
def test_graphar_makes_no_multicast_object_and_asks_torch_for_memory_in_one_file_only():
    texts = {path.name: path.read_text() for path in PACKAGE.glob("**/*.py")}

    assert len(texts) > 15
    assert [name for name, text in texts.items() if "cuMulticast" in text] == []
    assert [name for name, text in texts.items() if "_symmetric_memory" in text] == ["multicast.py"]


class Torch:
    """Stands in for torch's symmetric memory, for ranks that are threads. Records what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.supports = {0: True, 1: True}
        self.multicast_ptr = {0: 0x7000, 1: 0x9000}
        self.offset = 0
        self.failing_rank: int | None = None
        self.rank = threading.local()
        self._SymmetricMemory = self  # so that this one object stands for the module and the class

    def has_multicast_support(self, device_type, index):
        self.asked.append("has_multicast_support")
        return self.supports[index]

    def empty_strided_p2p(self, size, stride, dtype, device):
        self.asked.append("empty")
        return SimpleNamespace(nbytes=size[0])

    def rendezvous(self, tensor, group_name):
        self.asked.append("rendezvous")
        if self.failing_rank == self.rank.value:
            raise RuntimeError("CUDA driver error: invalid argument")
        pointer = self.multicast_ptr[self.rank.value]
        return SimpleNamespace(buffer_ptrs=[0x1000, 0x2000], multicast_ptr=pointer, offset=self.offset)


@pytest.fixture
def fake_torch(monkeypatch):
    fake = Torch()
    for name in ("_SymmetricMemory", "rendezvous", "empty", "get_symm_mem_workspace"):
        monkeypatch.setattr(_symmetric_memory, name, getattr(fake, name, fake))
    return fake


@pytest.fixture
def on_two_ranks(fake_torch, monkeypatch):
    """Runs a function of each rank's TorchMemory: results, or what was raised. Each rank has an environment."""
    environment = threading.local()
    monkeypatch.setattr(multicast, "why_not", lambda _: why_not(environment.value))
    store, group = dist.HashStore(), SimpleNamespace(group_name="g")

    def one(rank, mine, function):
        fake_torch.rank.value, environment.value = rank, mine
        try:
            return function(TorchMemory(group, rank, StoreRendezvous(store, "t", rank, 2, timeout_s=5)))
        except graphar.GrapharError as error:
            return error

    def both(function, environments=(OPEN, OPEN)):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, range(2), environments, [function] * 2))

    return both


def allocate(memory):
    return memory.allocate(64)


@pytest.mark.promise("Multicast is off unless you ask for it and no rank forbids it.")
@every_shut_environment
@pytest.mark.parametrize("shut_rank", [0, 1])
def test_a_rank_that_forbids_multicast_keeps_all_ranks_from_torch(
    on_two_ranks, fake_torch, environment, reason, shut_rank
):
    environments = [environment if rank == shut_rank else OPEN for rank in range(2)]

    for error in on_two_ranks(allocate, environments):
        assert isinstance(error, UnsupportedError)
        assert str(error) == f"rank {shut_rank}: {reason}"

    assert fake_torch.asked == []


def test_a_device_without_multicast_is_known_to_all_before_any_memory_is(on_two_ranks, fake_torch):
    fake_torch.supports[1] = False

    for error in on_two_ranks(allocate):
        assert isinstance(error, UnsupportedError)
        assert str(error) == "rank 1: torch finds no NVLink multicast on cuda:1"

    assert set(fake_torch.asked) == {"has_multicast_support"}


def test_every_rank_gets_its_own_multicast_address(on_two_ranks):
    regions = on_two_ranks(allocate)

    assert [region.multicast_pointer for region in regions] == [0x7000, 0x9000]
    assert [region.pointers for region in regions] == [[0x1000, 0x2000]] * 2
    assert [region.nbytes for region in regions] == [64, 64]


@pytest.mark.parametrize("missing", ["an object", "the whole allocation"])
def test_a_rank_that_got_no_multicast_object_is_known_to_all_and_remembered(on_two_ranks, fake_torch, missing):
    if missing == "an object":
        fake_torch.multicast_ptr[0] = 0
    else:
        fake_torch.offset = 512

    def allocate_then_ask(memory):
        with pytest.raises(UnsupportedError):
            memory.allocate(64)
        return memory.why_not()

    assert on_two_ranks(allocate_then_ask) == ["rank 0: torch's symmetric memory made no multicast object"] * 2


def test_what_torch_raises_on_one_rank_is_known_to_the_other(on_two_ranks, fake_torch):
    fake_torch.failing_rank = 1

    other, failing = on_two_ranks(allocate)

    assert isinstance(failing, UnsupportedError)
    assert str(failing) == "torch's symmetric memory failed: CUDA driver error: invalid argument"
    assert isinstance(other, CommunicatorError)
    assert "rank 1: UnsupportedError: torch's symmetric memory failed" in str(other)


def test_the_reason_is_found_once(on_two_ranks, fake_torch):
    on_two_ranks(lambda memory: [memory.why_not() for _ in range(3)])

    assert fake_torch.asked == ["has_multicast_support"] * 2


@pytest.fixture
def communicator(fake_torch):
    """Makes a communicator that believes it has kernels. Its two GPUs need not exist."""

    def make(group=None, stand_in=False):
        made = graphar.Communicator(devices=["cuda:0", "cuda:1"])
        made.engine.table, made.engine.multimem_stand_in = shipped_table("nvidia_h200"), stand_in
        rendezvous = StoreRendezvous(dist.HashStore(), "t", 0, 1, timeout_s=5)
        memory = None if stand_in else TorchMemory(group, 0, rendezvous)
        made.engine.runner = Runner([], 2, made.engine.table.chip, None, rendezvous, memory)
        all_made.append(made)
        return made

    all_made = []
    yield make
    for made in all_made:
        made.engine.runner = None
        made.close()


def explained(communicator, algorithm, numel=8192):
    x = SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda", 0))  # what choosing looks at
    return communicator.engine.explain(Call(Sum(numel), x.dtype, 0, algorithm), x)


@every_multimem_kernel
@every_shut_environment
def test_a_call_with_the_gate_shut_says_why(communicator, fake_torch, monkeypatch, algorithm, environment, reason):
    """And so does one process with all ranks, which has no multicast however open the gate."""
    of_one = "NVLink multicast joins one process a rank, and this process holds all ranks"
    for gate, group, said in (
        (why_not(environment), SimpleNamespace(group_name="g"), reason),
        ("", None, of_one),
    ):
        monkeypatch.setattr(multicast, "why_not", lambda _, gate=gate: gate)
        with pytest.raises(UnsupportedError) as raised:
            explained(communicator(group=group), algorithm)
        assert str(raised.value) == f"allreduce: {algorithm} cannot serve this call: {said}"
    assert fake_torch.asked == []


@every_multimem_kernel
def test_with_the_gate_open_the_algorithm_asked_for_is_taken(communicator, monkeypatch, algorithm):
    monkeypatch.setattr(multicast, "why_not", lambda _: "")

    said = explained(communicator(group=SimpleNamespace(group_name="g")), algorithm)

    assert said.algorithm == algorithm
    assert said.reason.startswith("asked for")


def test_auto_takes_an_exact_algorithm_and_does_not_ask_whatever_the_gate(communicator, fake_torch, monkeypatch):
    monkeypatch.setattr(multicast, "why_not", lambda _: "")
    open_communicator = communicator(group=SimpleNamespace(group_name="g"))

    for power in range(4, 32):
        assert Algorithm(explained(open_communicator, "auto", 1 << power).algorithm).exact

    assert fake_torch.asked == []


@every_multimem_kernel
def test_the_stand_in_is_not_called_multimem(communicator, algorithm):
    said = explained(communicator(stand_in=True), algorithm)

    assert said.algorithm == f"stand-in for {algorithm}"


def test_no_communicator_has_the_stand_in_of_itself(communicator):
    assert Engine.multimem_stand_in is communicator().engine.multimem_stand_in is False
    assert "Hardware" in kernel_source(Algorithm.MULTIMEM_TWO_SHOT, torch.bfloat16, 4).name


@pytest.mark.parametrize(("algorithm", "address"), [(Algorithm.MULTIMEM_TWO_SHOT, 0x7000), (Algorithm.ONE_SHOT, 0)])
def test_a_kernel_gets_its_scratch_by_rank_by_distance_and_by_multicast(communicator, algorithm, address):
    runner = communicator().engine.runner
    runner.world_size = 4
    member = Member.__new__(Member)
    member.rank, member.device, member.abort, member.record_pointer = 3, 0, 0xA, 0xB
    pointers = [0x1000, 0x2000, 0x3000, 0x4000]
    runner.regions[algorithm] = SimpleNamespace(pointers=pointers, multicast_pointer=address)

    given = runner.arguments(member, algorithm, Slice(8), 1.0, "a call")

    assert given.multicast == (address and address + COUNTERS_NBYTES)
    assert [pointer - COUNTERS_NBYTES for pointer in given.scratch[:4]] == pointers
    assert [pointer - COUNTERS_NBYTES for pointer in given.ring[:4]] == [0x4000, 0x1000, 0x2000, 0x3000]

"""Memory that ranks share at addresses that stay, on a driver on the CPU: tests/fake_gpu.py."""

import random
from collections import Counter
from itertools import pairwise

import pytest
import torch.distributed as dist

from graphar.errors import CommunicatorError, DriverError
from graphar.ranks.rendezvous import StoreRendezvous
from graphar.runtime.memory import peer_memory, virtual_memory
from graphar.runtime.memory.peer_memory import LocalMemory, ProcessMemory, SharedBuffer
from graphar.runtime.memory.virtual_memory import Guard, VirtualBuffer
from tests.fake_gpu import GRANULE_NBYTES, OK, OUT_OF_MEMORY, FakeDriver, descriptors, installed, open_files, tensor_at
from tests.processes import on_ranks, run_ranks

NBYTES = 3 * GRANULE_NBYTES - 5


@pytest.fixture
def fake():
    with installed(FakeDriver()) as driver:
        yield driver


@pytest.fixture(autouse=True)
def sockets(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(tmp_path / "sockets"))


def test_each_rank_of_a_process_has_memory_of_its_own(fake):
    buffer = LocalMemory([0, 1, 1]).allocate(NBYTES)

    for rank, pointer in enumerate(buffer.pointers):
        tensor_at(pointer, NBYTES).fill_(rank)

    assert [tensor_at(pointer, NBYTES).unique().tolist() for pointer in buffer.pointers] == [[0], [1], [2]]
    assert fake.handles == {}  # mappings keep the memory


def test_memory_that_was_given_back_comes_to_the_same_addresses(fake):
    memory = LocalMemory([0, 1])
    buffer = memory.allocate(NBYTES)
    before = list(buffer.pointers)

    buffer.clear()
    assert (buffer.resident, fake.mapped) == (False, {})
    memory.fill([buffer])

    assert (buffer.resident, buffer.pointers) == (True, before)
    assert [tensor_at(pointer, NBYTES).count_nonzero().item() for pointer in before] == [0, 0]


def test_the_end_gives_addresses_back_too(fake):
    buffer = LocalMemory([0, 1]).allocate(NBYTES)

    buffer.free()
    buffer.free()

    assert (fake.mapped, fake.reserved, fake.handles) == ({}, {}, {})


@pytest.mark.parametrize("room", [0, 1], ids=["for no rank", "for one rank"])
def test_without_room_for_all_ranks_nothing_is_left(fake, room):
    fake.left_nbytes = room * 3 * GRANULE_NBYTES

    with pytest.raises(DriverError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        LocalMemory([0, 1]).allocate(NBYTES)

    assert (fake.mapped, fake.reserved, fake.handles) == ({}, {}, {})


def test_a_mapping_that_fails_leaves_nothing(fake, monkeypatch):
    refused = iter([False, True])

    def give_access(*asked):
        return (OUT_OF_MEMORY,) if next(refused) else fake.cuMemSetAccess(*asked)

    monkeypatch.setattr(virtual_memory.driver, "cuMemSetAccess", give_access)

    with pytest.raises(DriverError, match="give_access: CUDA_ERROR_OUT_OF_MEMORY"):
        LocalMemory([0, 1]).allocate(NBYTES)

    assert (fake.mapped, fake.reserved, fake.handles) == ({}, {}, {})


def test_a_guard_lies_all_over_every_allocation(fake):
    buffer = LocalMemory([0, 1]).allocate(NBYTES)
    guard = Guard(0, [0, 1])

    buffer.map_guard(guard)
    guard.free()

    a, b = (tensor_at(pointer, NBYTES) for pointer in buffer.pointers)
    assert a[:8].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]  # epoch 0, aborted
    a[0] = 7
    assert [one[at].item() for one in (a, b) for at in (0, GRANULE_NBYTES, 2 * GRANULE_NBYTES)] == [7] * 6  # one guard
    assert (buffer.resident, fake.handles, set(fake.mapped.values())) == (False, {}, {GRANULE_NBYTES})


def test_what_copy_engines_write_into_a_guard_leaves_all_counters_as_they_are(fake):
    buffer = LocalMemory([0, 1]).allocate(NBYTES)

    buffer.map_guard(Guard(0, [0, 1]), copied=True)

    a, b = (tensor_at(pointer, NBYTES) for pointer in buffer.pointers)
    behind = slice(GRANULE_NBYTES, NBYTES)
    for one in (a, b):
        one[behind] = 7
    assert [one[:8].tolist() for one in (a, b)] == [[0, 0, 0, 0, 1, 0, 0, 0]] * 2


def test_allocations_of_all_ranks_lie_side_by_side_in_one_range(fake):
    memory = LocalMemory([0, 1])
    pointers = sorted(pointer for _ in range(5) for pointer in memory.allocate(NBYTES).pointers)

    assert [after - before for before, after in pairwise(pointers)] == [3 * GRANULE_NBYTES] * 9
    assert fake.reserved == {pointers[0]: virtual_memory.RANGE_NBYTES}
    assert pointers[0] % GRANULE_NBYTES == 0


@pytest.mark.parametrize(("recommended", "expected"), [(64 << 10, 2 << 20), (32 << 20, 32 << 20)])
def test_an_allocation_is_whole_granules_as_recommended_and_of_the_largest_page(fake, recommended, expected):
    fake.granule_nbytes = recommended
    buffers = [LocalMemory([0, 1]).allocate(nbytes) for nbytes in (1, expected + 1)]

    assert sorted(fake.mapped.values()) == [expected] * 2 + [2 * expected] * 2
    assert {pointer % expected for buffer in buffers for pointer in buffer.pointers} == {0}


def test_addresses_that_were_given_back_are_taken_again_and_none_twice(fake, monkeypatch):
    monkeypatch.setattr(virtual_memory, "RANGE_NBYTES", 16 * GRANULE_NBYTES)
    choices, held, most = random.Random(5), {}, 0
    for _ in range(2000):
        if held and choices.random() < 0.5:
            virtual_memory.ranges.give_back(address := choices.choice([*held]))
            del held[address]
        else:
            nbytes = choices.randint(1, 20 if choices.random() < 0.1 else 5) * GRANULE_NBYTES
            held[virtual_memory.ranges.take(nbytes)] = nbytes
        parts = sorted((address, address + nbytes) for address, nbytes in held.items())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(parts))
        ranges = [(begin, begin + nbytes) for begin, nbytes in fake.reserved.items()]
        assert all(any(first <= begin and end <= last for first, last in ranges) for begin, end in parts)
        most = max(most, len(ranges))

    for address in held:
        virtual_memory.ranges.give_back(address)

    assert (fake.reserved, virtual_memory.ranges.taken) == ({}, {})
    assert most < 60


def test_a_driver_that_says_no_gives_plain_memory_and_the_reason(fake, monkeypatch):
    monkeypatch.setattr(virtual_memory.driver, "cuMemAlloc", lambda nbytes: (OK, 4096), raising=False)
    monkeypatch.setattr(virtual_memory, "attribute", lambda name, device: 0)
    monkeypatch.setattr(peer_memory, "_enable_peer_access", lambda device, peer: None)
    memory = LocalMemory([0, 1])

    memory.check()
    buffer = memory.allocate(NBYTES)

    assert isinstance(buffer, SharedBuffer)
    assert memory.why_stays == "the driver says so: VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED is 0 for cuda:0"


def test_a_sandbox_that_fails_at_the_trial_is_told_and_the_trial_leaves_nothing(fake, monkeypatch):
    def refuse(memory, kind, flags):
        return (OUT_OF_MEMORY,)

    monkeypatch.setattr(virtual_memory.driver, "cuMemExportToShareableHandle", refuse)

    assert virtual_memory.why_not(0).startswith("a trial on cuda:0 failed: refuse: ")
    assert (fake.mapped, fake.reserved, fake.handles) == ({}, {}, {})


def test_where_it_works_the_trial_leaves_nothing(fake):
    before = descriptors()

    assert virtual_memory.why_not(0) is None
    assert (fake.mapped, fake.reserved, fake.handles, descriptors()) == ({}, {}, {}, before)


@pytest.mark.parametrize("world_size", [2, 4])
@on_ranks()
def test_processes_share_memory_whose_addresses_stay(rank, world_size):
    """Writes into every rank's memory, twice with a withdrawal between: what this rank then finds in its own."""
    found = []
    with installed(FakeDriver()) as fake:
        meet = StoreRendezvous(dist.distributed_c10d._get_default_store(), "t", rank, world_size, timeout_s=20)
        memory = ProcessMemory(rank, meet)
        memory.check()
        buffer = memory.allocate(NBYTES)
        before = open_files()  # threads of earlier tests may still close some
        pointers = list(buffer.pointers)
        for turn in range(2):
            for peer, pointer in enumerate(buffer.pointers):
                tensor_at(pointer, NBYTES)[peer * 100 + rank] = 10 * turn + rank + 1
            meet.exchange(f"written {turn}", b"")
            own = tensor_at(buffer.pointers[rank], NBYTES)[100 * rank : 100 * rank + world_size].tolist()
            found.append(own)
            meet.exchange(f"read {turn}", b"")
            buffer.clear()
            meet.exchange(f"cleared {turn}", b"")
            memory.fill([buffer])
        assert buffer.pointers == pointers
        left = open_files() - before
        buffer.free()
        memory.close()
        held, is_virtual = (fake.mapped, fake.reserved, fake.handles), isinstance(buffer, VirtualBuffer)
        assert found == [[10 * turn + rank + 1 for rank in range(world_size)] for turn in range(2)]
        assert (left, held, is_virtual) == (Counter(), ({}, {}, {}), True)


def fill_without_room(rank, world_size, poor, lacks_memory):
    """What a rank's allocation raised, whether it left something, and whether the next one worked.

    The ``poor`` rank has no memory, or else no file descriptors.
    """
    with installed(FakeDriver()) as fake:
        meet = StoreRendezvous(dist.distributed_c10d._get_default_store(), "t", rank, world_size, timeout_s=20)
        memory = ProcessMemory(rank, meet)
        memory.check()
        fake.left_nbytes = 0 if rank == poor and lacks_memory else 1 << 40
        send = memory._channel.send
        if rank == poor and not lacks_memory:
            memory._channel.send = refuse_to_send
        try:
            memory.allocate(NBYTES)
        except (DriverError, CommunicatorError) as error:
            said = str(error)
        left = {**fake.mapped}, {**fake.reserved}, {**fake.handles}
        fake.left_nbytes, memory._channel.send = 1 << 40, send
        works = memory.allocate(NBYTES).resident
        memory.close()
        return said, left, works


def refuse_to_send(*given):
    raise OSError("too many open files")


@pytest.mark.parametrize(
    ("lacks_memory", "why"),
    [
        (True, "DriverError: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"),
        (False, "CommunicatorError: sharing memory between processes: too many open files"),
    ],
    ids=["no memory", "no descriptors"],
)
def test_a_rank_without_room_is_named_on_the_others_and_the_next_allocation_works(lacks_memory, why):
    said, left, works = zip(*run_ranks(fill_without_room, 3, 1, lacks_memory), strict=True)

    assert why.endswith(said[1].partition(": out of")[0])
    for other in (said[0], said[2]):
        assert other.startswith(f"allocating failed on another rank\nrank 1: {why}")
    assert left == (({}, {}, {}),) * 3
    assert works == (True,) * 3

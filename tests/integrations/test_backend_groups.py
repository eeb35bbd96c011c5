"""Groups with the backend "graphar": their names, how they are split and end, and ranks that do not come."""

import os
import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.integrations import backend
from graphar.runtime import engine
from tests.integrations.entry_points import values
from tests.integrations.programs import WHOLE_GROUP, total
from tests.processes import on_ranks, run_ranks

BACKEND = "cpu:graphar"


@pytest.fixture
def port():
    """Of a store that outlives the ranks' first group, by which they can make another."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store  # ends it


def check_a_sum_and_meet(rank, world_size):
    x, integers = values(rank), values(rank, dtype=torch.int64)
    dist.all_reduce(x)
    dist.all_reduce(integers)
    dist.barrier()
    assert torch.equal(x, total(world_size))
    assert torch.equal(integers.float(), total(world_size))


def test_the_backend_is_known_after_import():
    assert "graphar" in dist.Backend.backend_list

    backend.register()  # once more does nothing

    assert dist.Backend.backend_list.count("graphar") == 1


def check_the_backend(rank, world_size, name):
    check_a_sum_and_meet(rank, world_size)
    assert dist.get_backend() == name


@pytest.mark.parametrize("name", ["graphar", "cpu:graphar"])
def test_a_group_has_the_backend_by_every_name(name):
    run_ranks(check_the_backend, 2, name, backend=name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the group has a backend for CUDA")
@on_ranks(2, backend=BACKEND)
def test_a_group_without_a_backend_for_cuda_says_so_and_is_aborted(rank, world_size):
    """Aborts the default group, for which torch asks it for its backend for CUDA."""
    dist.all_reduce(values(rank))
    with pytest.raises(RuntimeError, match=r"(?i)no backend"):
        dist.group.WORLD._get_backend(torch.device("cuda"))
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()


@on_ranks(2)
def test_cpu_tensors_stay_with_gloo_where_the_backend_has_only_cuda(rank, world_size, port):
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("cpu:gloo,cuda:graphar", store=store, rank=rank, world_size=world_size)
    check_a_sum_and_meet(rank, world_size)
    assert not engine.open_engines


@on_ranks(2, backend=BACKEND)
def test_a_group_is_served_in_torchs_debug_mode(rank, world_size):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group, x = dist.new_group(), values(rank)
    dist.all_reduce(x, group=group)
    dist.destroy_process_group(group)
    assert (torch.equal(x, total(world_size)), len(engine.open_engines)) == (True, 0)


@on_ranks(2, backend=BACKEND)
def test_torchs_debug_mode_names_both_of_two_calls_that_do_not_match(rank, world_size):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    x, part, said = torch.ones(3), torch.ones(world_size), []
    calls = [
        (lambda: dist.broadcast(x, 0, group=group), lambda: dist.all_reduce(x, dist.ReduceOp.MAX, group=group)),
        (lambda: dist.broadcast(x, 0, group=group), lambda: dist.all_reduce(x, group=group)),  # by gloo, by graphar
        (lambda: dist.barrier(group), lambda: dist.all_gather_into_tensor(torch.empty(2), x[:1], group=group)),
        (lambda: dist.all_to_all_single(part.clone(), part, group=group), lambda: dist.broadcast(x, 0, group=group)),
    ]
    for of_ranks in calls if WHOLE_GROUP else calls[:2]:  # later torch names the wrong call beside one without sizes
        group = dist.new_group()
        with pytest.raises(RuntimeError) as raised:
            of_ranks[rank]()
        said.append(str(raised.value).lower())
    both = [
        ("broadcast", "all_?reduce"),
        ("broadcast", "all_?reduce"),
        ("barrier", "gather"),
        ("all_?to_?all", "broadcast"),
    ]
    for message, (one, other) in zip(said, both if WHOLE_GROUP else both[:2], strict=True):
        assert re.search(rf"rank 0\b.*{one}[\s\S]*rank 1\b.*{other}|rank 1\b.*{other}.*rank 0\b.*{one}", message)


def call_alike_in_debug_mode(rank, world_size):
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group()
    if rank < 2:
        x = values(rank)
        dist.send(x, 1, group=group) if rank == 0 else dist.recv(x, 0, group=group)  # of two ranks alone
    sizes = [one + 1 for one in range(world_size)]
    parts = [torch.empty(size) for size in sizes]
    if WHOLE_GROUP:  # later torch compares the lengths, too
        dist.all_gather(parts, torch.full((rank + 1,), float(rank)), group=group)
    dist.broadcast(values(rank), 0, group=group)
    found = [None] * world_size if rank == 0 else None
    dist.gather_object("x" * rank, found, group=group)
    dist.barrier(group)
    return found


def test_torchs_debug_mode_lets_calls_pass_that_match():
    assert run_ranks(call_alike_in_debug_mode, 3, backend=BACKEND) == [["", "x", "xx"], None, None]


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch before 2.15 splits no group of CPU tensors")
@on_ranks(3)
def test_a_group_is_split(rank, world_size, port):
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    place = {"store": store, "rank": rank, "world_size": world_size, "device_id": torch.device("cpu:0")}
    dist.init_process_group(BACKEND, **place)
    for parts in ([[0, 1], [2]], [[2, 0], [1]]):
        mine = next(part for part in parts if rank in part)
        group, x = dist.split_group(None, parts), values(rank)
        dist.all_reduce(x, group=group)
        dist.barrier(group=group)
        assert torch.equal(x, sum(values(one) for one in mine))
        assert group.rank() == mine.index(rank)
    if rank == 1:
        with pytest.raises(graphar.UnsupportedError, match=r"rank 1 of \w+ must be in one of the groups"):
            dist.split_group(None, [[0, 2]])
    else:
        dist.split_group(None, [[0, 2]])


@on_ranks(2, backend=BACKEND)
def test_destroying_a_group_closes_its_communicator_and_another_can_be_made(rank, world_size, port):
    counts = []
    x = values(rank)
    dist.all_reduce(x)
    part = dist.new_group([0, 1])
    dist.all_reduce(x, group=part)
    counts.append(len(engine.open_engines))
    dist.destroy_process_group(part)
    counts.append(len(engine.open_engines))
    dist.destroy_process_group()
    counts.append(len(engine.open_engines))
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=world_size)
    x = values(rank)
    dist.all_reduce(x)
    assert counts == [2, 1, 0]
    assert torch.equal(x, total(world_size))


def call_without_rank_1(rank, world_size, how):
    group, store = dist.new_group(timeout=timedelta(seconds=2)), dist.distributed_c10d._get_default_store()
    x = values(rank)
    dist.all_reduce(x, group=group)
    if rank == 1:
        if how == "killed":
            os._exit(0)
        store.wait(["gave up 0", "gave up 2"])
        return None
    begin = time.monotonic()
    with pytest.raises(graphar.CollectiveTimeout) as raised:
        dist.all_reduce(x, group=group)
    took_s = time.monotonic() - begin
    store.set(f"gave up {rank}", "")
    return raised.value.record.peer, took_s, str(raised.value)


@pytest.mark.parametrize("how", ["killed", "absent"])
def test_a_rank_that_does_not_come_is_named_in_time(how):
    lost = [1] if how == "killed" else []

    found = run_ranks(call_without_rank_1, 3, how, backend=BACKEND, lost=lost)

    for rank in (0, 2):
        peer, took_s, text = found[rank]
        assert peer == 1, text
        assert took_s < 10


def miss_a_barrier(rank, world_size, connected):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if connected:
        dist.barrier(group)
    if rank == 1:
        time.sleep(2.5)
        return None
    begin = time.monotonic()
    with pytest.raises(graphar.CollectiveTimeout, match=r"barrier call \d .* rank\(s\) \[1\] failed, or did") as raised:
        dist.barrier(group)
    return raised.value.record.peer, time.monotonic() - begin < 3


@pytest.mark.parametrize("connected", [False, True], ids=["the first", "a later"])
def test_a_barrier_names_the_rank_that_misses_it(connected):
    assert run_ranks(miss_a_barrier, 3, connected, backend=BACKEND) == [(1, True), None, (1, True)]

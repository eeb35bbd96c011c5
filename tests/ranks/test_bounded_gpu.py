"""One process per GPU: calls that cannot finish say why in bounded time, also in graphs and after ranks have died."""

import gc
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import CollectiveTimeout, CommunicatorError
from graphar.plan.algorithms import Algorithm
from tests.cases import normal
from tests.gpu import EXACT_ALGORITHMS
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import GPU_WORLD_SIZES

NUMEL = 8199
# Elements of an input that takes each algorithm. All-reduces name their algorithm and take any input.
NUMELS = {
    **dict.fromkeys(EXACT_ALGORITHMS, NUMEL),
    "reducescatter_push": NUMEL,
    "allgather_flagged": NUMEL,
    "allgather_push": 1 << 20,
}
PATIENCE_S = 30.0  # time-out of set-up, which may compile a kernel
SHORT_S = 0.5

every_world_size = pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)


def run(function, world_size, *args, timeout_s=240.0, lost=()):
    return run_on_gpus(function, world_size, *args, timeout_s=timeout_s, lost=lost)


def caller(communicator, algorithm):
    """A call by ``algorithm``, and the same with a short deadline."""
    op = Algorithm(algorithm).op
    options = {"algorithm": algorithm} if op == "allreduce" else {}
    method = getattr(communicator, op)
    return lambda x: method(x, **options), lambda x: method(x, timeout_s=SHORT_S, **options)


def assert_timeout(error, algorithm, rank, world_size, sequence):
    record, absent = error.record, world_size - 1
    assert (record.op, record.algorithm) == (Algorithm(algorithm).op, algorithm)
    assert (record.sequence, record.rank, record.peer) == (sequence, rank, absent)
    assert f"{algorithm} call {sequence}" in record.last_calls[rank]
    assert f"{algorithm} call {sequence - 1}" in record.last_calls[absent]
    assert f"for rank {absent} " in str(error)


def assert_refused(communicator, error):
    x = torch.ones(8, device="cuda")
    for refused in (
        lambda: communicator.allreduce(x),
        lambda: communicator.allreduce(x.double()),
        lambda: communicator.allgather(x),
        lambda: communicator.empty(8),
        lambda: communicator.prepare(),
        communicator.synchronize,
    ):
        with pytest.raises(CollectiveTimeout) as again:
            refused()
        assert str(again.value) == str(error)
    assert x.sum().item() == 8


@pytest.mark.promise("A wait ends at its deadline with a record of who is missing; torch goes on working.")
@every_world_size
@pytest.mark.parametrize("in_a_graph", [False, True], ids=["eager", "graph"])
@on_ranks(by=run)
def test_every_algorithm_names_the_rank_that_never_calls_and_can_be_used_again(rank, world_size, in_a_graph):
    for algorithm, numel in NUMELS.items():
        x = normal(rank, numel, torch.bfloat16).cuda()
        communicator = graphar.Communicator(timeout_s=PATIENCE_S)
        call, call_in_vain = caller(communicator, algorithm)
        call(x)
        times = 1
        if in_a_graph:
            gc.collect()
            graph, times = torch.cuda.CUDAGraph(), 100  # those behind the first end at once
            with torch.cuda.graph(graph):
                call_in_vain(x)
            graph.replay()
        communicator.synchronize()
        if rank < world_size - 1:
            begin = time.monotonic()
            for _ in range(times):
                graph.replay() if in_a_graph else call_in_vain(x)
            with pytest.raises(CollectiveTimeout) as raised:
                communicator.synchronize()
            assert SHORT_S <= time.monotonic() - begin < 5, algorithm
            assert_timeout(raised.value, algorithm, rank, world_size, sequence=2 if in_a_graph else 1)
            assert_refused(communicator, raised.value)
        if in_a_graph:
            del graph
        communicator.close()


@pytest.mark.gpu
@on_ranks(2, by=run)
def test_ranks_that_call_different_algorithms_are_told_what_each_called(rank, world_size):
    x = torch.ones(NUMEL, device="cuda")
    communicator = graphar.Communicator(timeout_s=PATIENCE_S)
    for algorithm in ("one_shot_push", "two_shot_push"):
        communicator.allreduce(x, algorithm=algorithm)
    communicator.synchronize()
    algorithm = "two_shot_push" if rank == world_size - 1 else "one_shot_push"
    communicator.allreduce(x, algorithm=algorithm, timeout_s=SHORT_S)
    with pytest.raises(CommunicatorError) as raised:
        communicator.synchronize()
    communicator.close()
    said = str(raised.value)
    call = f"allreduce of [{NUMEL}] torch.float32"
    assert f"rank 0: {call} by one_shot_push" in said
    assert f"rank 1: {call} by two_shot_push" in said


def call_until_the_last_rank_is_gone(rank, world_size, number, replayed):
    communicator = graphar.Communicator(timeout_s=PATIENCE_S)
    x = torch.ones(NUMEL, dtype=torch.bfloat16, device="cuda")
    communicator.allreduce(x)
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        communicator.allreduce(x, timeout_s=2)
    step = graph.replay if replayed else lambda: communicator.allreduce(x, timeout_s=2)
    try:
        for turn in range(1_000_000):
            step()
            if turn % 50 == 0:
                begin = time.monotonic()
                communicator.synchronize()
            if rank == world_size - 1 and turn == 500:
                os.kill(os.getpid(), number)
                time.sleep(60)
    except CollectiveTimeout as error:
        took_s = time.monotonic() - begin
        record = error.record
    del graph
    begin = time.monotonic()
    communicator.close()
    return took_s, time.monotonic() - begin, record.peer, record.last_calls[-1], x.float().sum().item()


@pytest.mark.promise("A killed rank is named; closing and exiting end in bounded time and free all memory.")
@every_world_size
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("replayed", [False, True], ids=["eager", "graph"])
def test_a_killed_rank_is_named_and_closing_does_not_wait_for_it(world_size, number, replayed):
    *survivors, _ = run(call_until_the_last_rank_is_gone, world_size, number, replayed, lost=[world_size - 1])

    for took_s, closed_s, peer, last_call, total in survivors:
        assert took_s < 6
        assert closed_s < 10
        assert peer == world_size - 1
        assert last_call.endswith("its process has ended")
        assert total == NUMEL


def end_amid_a_call(rank, world_size):
    """The first ranks return, and their processes end, while their kernels wait for the last one."""
    communicator = graphar.Communicator(timeout_s=PATIENCE_S)
    x = torch.ones(NUMEL, device="cuda")
    communicator.allreduce(x)
    communicator.synchronize()
    if rank < world_size - 1:
        communicator.allreduce(x, timeout_s=3)


@pytest.mark.promise("A killed rank is named; closing and exiting end in bounded time and free all memory.")
@every_world_size
def test_a_process_ends_in_bounded_time_though_a_kernel_waits(world_size):
    begin = time.monotonic()
    run(end_amid_a_call, world_size, timeout_s=60)
    assert time.monotonic() - begin < 40


@pytest.mark.gpu
@on_ranks(2, by=run)
def test_closing_alone_ends_at_the_deadline(rank, world_size):
    x = torch.ones(NUMEL, device="cuda")
    with graphar.Communicator(timeout_s=PATIENCE_S) as patient:
        patient.allreduce(x)
    communicator = graphar.Communicator(timeout_s=2)
    communicator.allreduce(x)
    if rank == 0:
        begin = time.monotonic()
        with pytest.raises(CommunicatorError, match=r"closing: rank 0 waited 2 s for rank\(s\)"):
            communicator.close()
        assert time.monotonic() - begin < 5
    dist.barrier(group=dist.new_group(backend="gloo"))


@pytest.mark.promise("A killed rank is named; closing and exiting end in bounded time and free all memory.")
@pytest.mark.gpu
@on_ranks(2, by=run)
def test_closing_gives_all_memory_back(rank, world_size):
    used = []
    for _ in range(4):
        with graphar.Communicator(timeout_s=PATIENCE_S) as communicator:
            communicator.empty(1 << 20)
            for op in ("allreduce", "reducescatter", "allgather"):
                getattr(communicator, op)(torch.ones(NUMEL, device="cuda"))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    assert used[1] == used[2] == used[3]

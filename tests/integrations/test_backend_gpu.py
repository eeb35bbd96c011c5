"""The process group backend "graphar" with one process a GPU: every entry point, streams, graph capture, late ranks."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.integrations.entry_points import ENTRIES
from tests.integrations.every_call import FOR_ONE_RANK, by_rank, check, check_entry, check_program
from tests.integrations.models import MODELS
from tests.integrations.programs import PROGRAMS
from tests.processes import on_ranks, run_ranks
from tests.worlds import GPU_COUNTS, GPU_WORLD_SIZES

BACKEND = "cpu:gloo,cuda:graphar"
NOT_OF_NCCL = ("all_reduce of bits", "recv from any rank")
CALLS = [name for name in ENTRIES if name not in NOT_OF_NCCL]
RUNS = [name for name in (*PROGRAMS, *MODELS) if name not in NOT_OF_NCCL]
# A group of one GPU is served by NCCL, which refuses tensors with gaps and lists of several, and has errors of its own.
WITH_KERNELS = (
    "results with gaps",
    "coalesced calls",
    "wrong sizes",
    "all_reduce of a transposed tensor",
    "all_gather_coalesced",
)
ON_ONE_GPU = [name for name in (*FOR_ONE_RANK, *MODELS) if name not in (*NOT_OF_NCCL, *WITH_KERNELS)]
every_world_size = pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)


@pytest.fixture(scope="module")
def of_ranks():
    return by_rank(GPU_COUNTS[-1], BACKEND, [*CALLS, *RUNS], "cuda")


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", CALLS)
def test_an_entry_point_gives_what_gloo_gives(of_ranks, name):
    check_entry(of_ranks, name)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("name", RUNS)
def test_a_program_gives_what_it_gives_elsewhere(of_ranks, name):
    check_program(of_ranks, name)


@pytest.fixture(scope="module")
def of_one_rank():
    return by_rank(1, BACKEND, ON_ONE_GPU, "cuda")


@pytest.mark.gpu(1)
@pytest.mark.parametrize("name", ON_ONE_GPU)
def test_a_group_of_one_gpu_gives_what_gloo_gives(of_one_rank, name):
    check(of_one_rank, name)


def total(world_size, numel):
    return torch.full((numel,), world_size * (world_size + 1) / 2)


@every_world_size
@pytest.mark.parametrize("numel", [1000, 4 << 20])
@on_ranks(backend=BACKEND, timeout_s=120)
def test_waiting_orders_the_current_stream_behind_an_asynchronous_call(rank, world_size, numel):
    rounds = 20
    other, found = torch.cuda.Stream(), []
    for _ in range(rounds):
        x = torch.full((numel,), rank + 1.0, device="cuda")
        work = dist.all_reduce(x, async_op=True)
        with torch.cuda.stream(other):
            work.wait()
            y = x.clone()
        x.record_stream(other)  # the reader's part; the call's own is to keep its tensors until it has ended
        del x, work
        torch.full((numel,), -1.0, device="cuda")
        other.synchronize()
        found.append(torch.equal(y.cpu(), total(world_size, numel)))
    assert all(found)


@every_world_size
@on_ranks(backend=BACKEND, timeout_s=120)
def test_calls_are_captured_in_a_graph(rank, world_size):
    numel = 1000
    x, out = torch.empty(numel, device="cuda"), torch.empty(numel * world_size, device="cuda")

    def step():
        dist.all_reduce(x)
        dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True).wait()
        dist.all_gather_into_tensor(out, x)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    found = []
    for begin in (1.0, 3.0):
        x.fill_(begin * (rank + 1))
        graph.replay()
        found.append(torch.equal(out.cpu(), begin * total(world_size, numel).repeat(world_size)))
    assert all(found)


def call_without_rank_1(rank, world_size):
    group = dist.new_group(timeout=timedelta(seconds=2))
    x = torch.ones(1000, device="cuda")
    dist.all_reduce(x, group=group)
    if rank == 1:
        time.sleep(6)
        return None
    try:
        dist.all_reduce(x, group=group)
        torch.cuda.synchronize()
        dist.all_reduce(x, group=group)
    except graphar.CollectiveTimeout as error:
        return error.record.peer
    return None


@every_world_size
def test_a_rank_that_does_not_come_is_named(world_size):
    found = run_ranks(call_without_rank_1, world_size, backend=BACKEND, timeout_s=120)

    assert [peer for rank, peer in enumerate(found) if rank != 1] == [1] * (world_size - 1)

"""One process a GPU: the same bits, in groups of any shape, under torch.compile, in graphs; and ranks that fail."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch.library import opcheck

import graphar
from graphar.ops import allreduce
from tests.cases import integers, normal, parts_of, same_bits
from tests.gpu import kernel_calls
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

BACKEND = "cpu:gloo,cuda:nccl"


def run(function, world_size, *args, timeout_s=120.0):
    return run_on_gpus(function, world_size, *args, timeout_s=timeout_s)


def assert_reduced(y, parts, what=""):
    assert same_bits(y.cpu(), graphar.reference.allreduce(parts)) == 0, what


def a_hundred_calls(rank, world_size):
    calls = [[normal(100 * seed + r, 262149, torch.bfloat16) for r in range(world_size)] for seed in range(3)]
    xs = [parts[rank].cuda() for parts in calls]
    results = [graphar.allreduce(xs[turn % 3]) for turn in range(105)]
    for turn, y in enumerate(results):
        assert_reduced(y, calls[turn % 3], f"call {turn}")
    x, parts = xs[0], calls[0]
    assert_reduced(graphar.allreduce(torch._neg_view(x)), [-part for part in parts])
    graphar.allreduce(x, out=x)
    assert_reduced(x, parts)
    assert kernel_calls() == 107


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_calls_back_to_back_and_in_place(world_size):
    run(a_hundred_calls, world_size)


def subgroups(rank, world_size):
    groups = [dist.new_group(ranks) for ranks in ([1, 3], [0, 2, 3], [0, 1, 2, 3])]
    members = [(1, 3), (0, 2, 3), (0, 1, 2, 3)]
    for turn in range(20):
        for group, ranks in zip(groups, members, strict=True):
            if rank in ranks:
                parts = [normal(100 * turn + r, 8192, torch.bfloat16) for r in ranks]
                assert_reduced(graphar.allreduce(parts[ranks.index(rank)].cuda(), group), parts, f"{ranks}")


@pytest.mark.gpu(4, shared=True)
def test_overlapping_subgroups_in_turn():
    run(subgroups, 4)


def skewed_start(rank, world_size):
    with graphar.Communicator(timeout_s=20) as communicator:
        time.sleep(rank)
        parts = parts_of(normal, world_size, 8192, torch.bfloat16)
        assert_reduced(communicator.allreduce(parts[rank].cuda()), parts)
        with graphar.Communicator(timeout_s=20) as other:
            assert_reduced(other.allreduce(parts[rank].cuda()), parts)
            assert_reduced(communicator.allreduce(parts[rank].cuda()), parts)


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_ranks_that_come_seconds_apart(world_size):
    run(skewed_start, world_size)


def load_while_spinning(rank, world_size):
    """Rank 0 spins in a collective while it and the others load another kernel."""
    with graphar.Communicator(timeout_s=20) as communicator:
        parts = parts_of(integers, world_size, 8192, torch.bfloat16)
        communicator.prepare(dtypes=[torch.bfloat16])
        if rank > 0:
            time.sleep(1)
        y = communicator.allreduce(parts[rank].cuda())
        communicator.prepare(dtypes=[torch.float32])
        assert_reduced(y, parts)


@pytest.mark.promise("Kernels are loaded before they are launched, and never during a capture.")
@pytest.mark.gpu
def test_a_plan_made_while_a_collective_spins_does_not_hang():
    begin = time.monotonic()
    run(load_while_spinning, 2)
    assert time.monotonic() - begin < 60


def compiled(rank, world_size):
    def model(x):
        return graphar.allreduce(torch.relu(x) * 2) + 1

    eager = torch.compile(model, fullgraph=True, dynamic=True)
    for numel in (8192, 8199, 100):
        parts = parts_of(integers, world_size, numel, torch.float32)
        expected = graphar.reference.allreduce([torch.relu(part) * 2 for part in parts]) + 1
        assert torch.equal(eager(parts[rank].cuda()).cpu(), expected)
    replayed = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    parts = parts_of(integers, world_size, 8192, torch.float32)
    expected = graphar.reference.allreduce([torch.relu(part) * 2 for part in parts]) + 1
    for _ in range(5):
        assert torch.equal(replayed(parts[rank].cuda()).cpu(), expected)


@pytest.mark.promise("The CPU gives the same bits, and so do compiled, captured and replayed calls.")
@pytest.mark.gpu(2, shared=True)
def test_torch_compile_takes_it_whole_also_in_cuda_graphs():
    run(compiled, 2, timeout_s=300)


class Model(torch.nn.Module):
    def forward(self, x):
        return graphar.allreduce(x * 2)


def operators(rank, world_size):
    opcheck(allreduce.OP.one, (torch.ones(9, device="cuda", requires_grad=True), *allreduce.OP.arguments()))
    x = integers(rank, 100, torch.float32).cuda().requires_grad_()
    weight = integers(rank + 5, 100, torch.float32).cuda()
    (graphar.allreduce(x) * weight).sum().backward()
    assert_reduced(x.grad, parts_of(lambda r, n, d: integers(r + 5, n, d), world_size, 100, torch.float32))
    exported = torch.export.export(Model(), (torch.ones(64, device="cuda"),)).module()
    assert torch.equal(exported(torch.ones(64, device="cuda")), torch.full((64,), 2.0 * world_size, device="cuda"))


@pytest.mark.gpu(2, shared=True)
def test_the_operator_checks_differentiates_and_exports():
    run(operators, 2, timeout_s=300)


def graph_replays(rank, world_size):
    parts = parts_of(normal, world_size, 8199, torch.bfloat16)
    x = parts[rank].cuda()
    graphar.allreduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = graphar.allreduce(x)
        z = graphar.allreduce(y)
    gc.collect()
    torch.cuda.empty_cache()
    junk = torch.full((1 << 28,), 0x55, dtype=torch.uint8, device="cuda")
    total = graphar.reference.allreduce(parts)
    for turn in range(1000):
        if turn % 100 == 99:
            y.fill_(torch.nan)
            z.fill_(torch.nan)
        graph.replay()
        if turn % 100 == 99:
            assert_reduced(y, parts, f"turn {turn}")
            assert_reduced(z, [total] * world_size, f"turn {turn}")
            assert_reduced(graphar.allreduce(x), parts, f"turn {turn}, eager")
    assert bool((junk == 0x55).all())


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_a_thousand_graph_replays_between_eager_calls(world_size):
    run(graph_replays, world_size)


def expandable(rank, world_size):
    parts = parts_of(normal, world_size, 1 << 20, torch.bfloat16)
    assert_reduced(graphar.allreduce(parts[rank].cuda()), parts)


@pytest.mark.promise("Any strides, alignment and allocator work, and nothing is written beside the result.")
@pytest.mark.gpu(2, shared=True)
def test_expandable_segments(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run(expandable, 2)


def loop_until_killed(rank, port, number, verdicts):
    """Rank 1 kills itself amid a loop of calls; rank 0 says what became of its own."""
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(BACKEND, store=store, rank=rank, world_size=2)
    communicator = graphar.Communicator(timeout_s=2)
    x = torch.ones(8192, dtype=torch.bfloat16, device="cuda")
    try:
        for call in range(1_000_000):
            communicator.allreduce(x)
            if call % 50 == 0:
                communicator.synchronize()
            if rank == 1 and call == 500:
                os.kill(os.getpid(), number)
    except graphar.CollectiveTimeout as error:
        verdicts.send((error.record.peer, x.sum().item()))
    os._exit(0)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_rank_is_noticed_by_the_others(number):
    spawn = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    verdicts, sender = spawn.Pipe(duplex=False)
    processes = [spawn.Process(target=loop_until_killed, args=(r, store.port, number, sender)) for r in range(2)]
    for process in processes:
        process.start()
    try:
        assert verdicts.poll(60), "no rank raised"
        assert verdicts.recv() == (1, 8192)  # it names the rank, and torch still computes
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.gpu
def test_availability_says_what_it_found():
    assert graphar.is_available()
    assert graphar.is_available().reason == f"{torch.cuda.device_count()} GPUs with peer access between all pairs"

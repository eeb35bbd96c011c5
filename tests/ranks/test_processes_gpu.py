"""One process a GPU: the same bits, in groups of any shape, under torch.compile, in graphs; and ranks that fail."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import integers, normal, parts_of, same_bits
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

BACKEND = "cpu:gloo,cuda:nccl"


def run(function, world_size, *args, timeout_s=120.0):
    return run_on_gpus(function, world_size, *args, timeout_s=timeout_s)


def assert_reduced(y, parts, what=""):
    assert same_bits(y.cpu(), graphar.reference.allreduce(parts)) == 0, what


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

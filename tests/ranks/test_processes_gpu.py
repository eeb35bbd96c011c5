"""One process a GPU: the same bits, in groups of any shape, under torch.compile, in graphs; and ranks that fail."""

import time

import pytest
import torch

import graphar
from tests.cases import integers, normal, parts_of, same_bits
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES


def assert_reduced(y, parts, what=""):
    assert same_bits(y.cpu(), graphar.reference.allreduce(parts)) == 0, what


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
@on_ranks(by=run_on_gpus)
def test_ranks_that_come_seconds_apart(rank, world_size):
    with graphar.Communicator(timeout_s=20) as communicator:
        time.sleep(rank)
        parts = parts_of(normal, world_size, 8192, torch.bfloat16)
        assert_reduced(communicator.allreduce(parts[rank].cuda()), parts)
        with graphar.Communicator(timeout_s=20) as other:
            assert_reduced(other.allreduce(parts[rank].cuda()), parts)
            assert_reduced(communicator.allreduce(parts[rank].cuda()), parts)


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
    run_on_gpus(load_while_spinning, 2)
    assert time.monotonic() - begin < 60


def expandable(rank, world_size):
    parts = parts_of(normal, world_size, 1 << 20, torch.bfloat16)
    assert_reduced(graphar.allreduce(parts[rank].cuda()), parts)


@pytest.mark.promise("Any strides, alignment and allocator work, and nothing is written beside the result.")
@pytest.mark.gpu(2, shared=True)
def test_expandable_segments(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    run_on_gpus(expandable, 2)


@pytest.mark.gpu
def test_availability_says_what_it_found():
    assert graphar.is_available()
    assert graphar.is_available().reason == f"{torch.cuda.device_count()} GPUs with peer access between all pairs"

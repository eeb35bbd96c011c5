"""Ranks that make different calls: every rank gets an error that names each rank's call, and no data."""

from __future__ import annotations

import re

import pytest
import torch

import graphar
from graphar import CommunicatorError
from tests.processes import run_ranks

F32, I32 = torch.float32, torch.int32


def vector(count=6, dtype=F32):
    return torch.arange(count).to(dtype)


# What rank 0 calls, and what rank 1 does.
UNLIKE = {
    "sizes": (lambda: graphar.allreduce(vector(6)), lambda: graphar.allreduce(vector(5))),
    "dtypes of equal bytes": (lambda: graphar.allreduce(vector(6)), lambda: graphar.allreduce(vector(6, I32))),
    "codecs": (lambda: graphar.allreduce(vector(64)), lambda: graphar.allreduce(vector(64), codec="int8")),
    "formats": (
        lambda: graphar.allreduce(vector(64), codec="int6"),
        lambda: graphar.allreduce(vector(64), codec="int8"),
    ),
    "epilogues": (
        lambda: graphar.allreduce(vector(), epilogue="v + 1"),
        lambda: graphar.allreduce(vector(), epilogue="v"),
    ),
    "epilogues of gathered rows": (
        lambda: graphar.fused_allgather_matmul(torch.ones(2, 3), torch.ones(4, 3), epilogue="v + 1"),
        lambda: graphar.fused_allgather_matmul(torch.ones(2, 3), torch.ones(4, 3), epilogue="v"),
    ),
    "an epilogue of gathered rows and none": (
        lambda: graphar.fused_allgather_matmul(torch.ones(2, 3), torch.ones(4, 3), epilogue="v"),
        lambda: graphar.fused_allgather_matmul(torch.ones(2, 3), torch.ones(4, 3)),
    ),
    "ops": (lambda: graphar.reducescatter(vector(6)), lambda: graphar.allreduce(vector(6))),
    "ops with parts": (lambda: graphar.allgather(vector(3)), lambda: graphar.reducescatter(vector(6))),
    "parts": (lambda: graphar.reducescatter(vector(6)), lambda: graphar.reducescatter(vector(8))),
    "parts that are gathered": (lambda: graphar.allgather(vector(2)), lambda: graphar.allgather(vector(1))),
    "columns of a tuple": (
        lambda: graphar.allgather((torch.ones(2, 8), torch.ones(2, 1))),
        lambda: graphar.allgather((torch.ones(2, 8), torch.ones(2, 2))),
    ),
    "tensors of a tuple": (
        lambda: graphar.allgather((torch.ones(2, 8), torch.ones(2, 1))),
        lambda: graphar.allgather((torch.ones(2, 8), torch.ones(2, 1), torch.ones(2, 1))),
    ),
    "a tuple and a tensor": (
        lambda: graphar.allgather((torch.ones(2, 8), torch.ones(2, 1))),
        lambda: graphar.allgather(torch.ones(2, 8)),
    ),
    "matmuls": (
        lambda: graphar.fused_matmul_allreduce(torch.ones(2, 3), torch.ones(4, 3)),
        lambda: graphar.fused_matmul_allreduce(torch.ones(2, 3), torch.ones(8, 3)),
    ),
    "norms": (
        lambda: graphar.allreduce_residual_rmsnorm(torch.ones(2, 8), torch.ones(2, 8), torch.ones(8)),
        lambda: graphar.allreduce_residual_rmsnorm(torch.ones(1, 8), torch.ones(1, 8), torch.ones(8)),
    ),
    "norms of parts": (
        lambda: graphar.reducescatter_residual_rmsnorm(torch.ones(2, 8), torch.ones(1, 8), torch.ones(8)),
        lambda: graphar.reducescatter_residual_rmsnorm(torch.ones(4, 8), torch.ones(2, 8), torch.ones(8)),
    ),
}


def tell_what_is_raised(rank, world_size):
    told = []
    for calls in UNLIKE.values():
        with pytest.raises(CommunicatorError) as raised:
            calls[rank]()
        told.append(str(raised.value))
    assert graphar.allreduce(vector(3)).tolist() == [0, 2, 4]  # nothing was sent, so the communicator goes on
    return told


def test_processes_that_call_different_things_are_both_told_and_get_no_data():
    told, same = run_ranks(tell_what_is_raised, 2, timeout_s=60)

    assert told == same
    for name, message in zip(UNLIKE, told, strict=True):
        calls = re.findall(r"^rank [01]: (.*)$", message, re.MULTILINE)
        assert "ranks must make the same graphar calls in the same order" in message, name
        assert len(set(calls)) == 2, name
        assert ("need sizes=" in message) == (name == "parts that are gathered"), name


def gather_uneven_parts(rank, world_size):
    part = graphar.reducescatter(torch.arange(3.0))
    with pytest.raises(
        CommunicatorError, match=r"rank 0: allgather of parts of \[2, 2\] elements.*\nrank 1: .*\[1, 1\].*\n.*sizes="
    ):
        graphar.allgather(part)
    return graphar.allgather(part, sizes=[2, 1]).tolist()


def test_uneven_parts_are_gathered_by_their_sizes_or_refused():
    assert run_ranks(gather_uneven_parts, 2, timeout_s=60) == [[0, 2, 4]] * 2

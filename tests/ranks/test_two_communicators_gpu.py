"""Kernels of two communicators of the same processes make progress together, in whatever order ranks launch them."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import normal, same_bits
from tests.processes import run_ranks

pytestmark = pytest.mark.gpu

MB = 1 << 20
ROUNDS, CHAIN, TIMEOUT_S = 10, 3, 5.0


def sums(nbytes):
    return lambda x, group: graphar.allreduce(x[: nbytes // 2], group)


def norm(rows):
    def call(x, group):
        x = x[: rows * 8192].view(rows, 8192)
        return graphar.allreduce_residual_rmsnorm(x, x, x[0], group=group)[0]

    return call


CALLS = {
    "2 KB": sums(2 << 10),
    "256 KB": sums(MB // 4),
    "2 MB": sums(2 * MB),
    "4 MB": sums(4 * MB),
    "64 MB": sums(64 * MB),
    "192 MB": sums(192 * MB),
    "norm of 4 rows": norm(4),
    "norm of 60 rows": norm(60),
    "norm of 512 rows": norm(512),
    "reduce-scatter": lambda x, group: graphar.reducescatter(x[: 4 * MB], group),
    "all-gather": lambda x, group: graphar.allgather(x[: 4 * MB], group),
}


def cross(rank, world_size, names):
    """How many elements are wrong of calls of two groups on two streams, which odd ranks launch in the other order."""
    groups = [graphar.Communicator(dist.new_group(), timeout_s=TIMEOUT_S) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = normal(rank, 96 * MB, torch.bfloat16).cuda()
    calls = [CALLS[name] for name in names]
    expected = [call(x, group) for call, group in zip(calls, groups, strict=True)]
    torch.cuda.synchronize()
    dist.barrier()
    for _ in range(ROUNDS):
        found = [None, None]
        for at in (0, 1) if rank % 2 else (1, 0):
            with torch.cuda.stream(streams[at]):
                for _ in range(CHAIN):
                    found[at] = calls[at](x, groups[at])
            time.sleep(2e-3)  # by then it waits for its peers
        torch.cuda.synchronize()
    for group in groups:
        group.synchronize()
    return [same_bits(*pair) for pair in zip(found, expected, strict=True)]


@pytest.mark.promise("Calls of two communicators end in whatever order ranks launch them, but for two pairs of ops.")
@pytest.mark.parametrize("names", list(itertools.combinations_with_replacement(CALLS, 2)), ids=" and ".join)
def test_calls_in_opposite_orders_end(names):
    for wrong in run_ranks(cross, 2, names, backend="cpu:gloo,cuda:nccl", timeout_s=120):
        assert wrong == [0, 0]

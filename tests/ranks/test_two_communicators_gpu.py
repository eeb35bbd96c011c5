"""Kernels of two communicators of the same processes make progress together, in whatever order ranks launch them."""

import itertools
import time

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import normal, same_bits
from tests.processes import run_on_gpus

pytestmark = pytest.mark.gpu

MB = 1 << 20
COLUMNS = 8192
ROUNDS, CHAIN, TIMEOUT_S = 10, 3, 5.0


def sums(nbytes, **options):
    return lambda x, group: graphar.allreduce(x[: nbytes // 2], group, **options)


def norm(rows):
    def call(x, group):
        x = x[: rows * COLUMNS].view(rows, COLUMNS)
        return graphar.allreduce_residual_rmsnorm(x, x, x[0], group=group)[0]

    return call


def norm_of_parts(rows):
    def call(x, group):
        x = x[: rows * COLUMNS].view(rows, COLUMNS)
        own = x.tensor_split(group.world_size)[group.rank]
        return graphar.reducescatter_residual_rmsnorm(x, own, x[0], group=group)[0]

    return call


def matmul(rows, op=graphar.fused_matmul_allreduce):
    def call(x, group):
        a, w = x[: rows * 1024].view(rows, 1024), x[: COLUMNS * 1024].view(COLUMNS, 1024)
        return op(a, w, group=group, partition="tiles")

    return call


CALLS = {
    "2 KB": sums(2 << 10),
    "256 KB": sums(MB // 4),
    "2 MB": sums(2 * MB),
    "4 MB": sums(4 * MB),
    "64 MB": sums(64 * MB),
    "192 MB": sums(192 * MB),
    "norm of 4 rows": norm(4),
    "norm of 16 rows": norm(16),  # in clusters of 8
    "norm of 32 rows": norm(32),  # in clusters of 4
    "norm of 60 rows": norm(60),  # in clusters of 2
    "norm of 512 rows": norm(512),
    "norm of parts of 30 rows": norm_of_parts(60),  # in clusters
    "norm of parts of 2000 rows": norm_of_parts(4000),  # in several launches
    "reduce-scatter": lambda x, group: graphar.reducescatter(x[: 4 * MB], group),
    "all-gather": lambda x, group: graphar.allgather(x[: 4 * MB], group),
    "int8 of 2 MB": sums(2 * MB, codec="int8"),
    "int8 of 64 MB": sums(64 * MB, codec="int8"),
    "int4 of 192 MB": sums(192 * MB, codec="int4"),
    "int8 reduce-scatter": lambda x, group: graphar.reducescatter(x[: 4 * MB], group, codec="int8"),
    "lossless": sums(64 * MB, algorithm="two_shot_lossless"),
    "bulk copies": sums(64 * MB, algorithm="two_shot_tma"),
    "matmul of 8 rows": matmul(8),
    "matmul of 64 rows": matmul(64),
    "matmul of 2048 rows": matmul(2048),
    "matmul of 2048 gathered rows": matmul(1024, graphar.fused_allgather_matmul),
}
PAIRS = list(itertools.combinations_with_replacement(CALLS, 2))


def cross(x, groups, names, order, rounds=ROUNDS, pause_s=2e-3):
    """How many elements of each group's calls are wrong. ``order``: the places of groups, as their calls are launched.

    The calls of a group are on a stream of its own.
    """
    streams = [torch.cuda.Stream() for _ in groups]
    calls = [CALLS[name] for name in names]
    expected = [call(x, group) for call, group in zip(calls, groups, strict=True)]
    torch.cuda.synchronize()
    dist.barrier()
    found = [None for _ in groups]
    for _ in range(rounds):
        for at in order:
            with torch.cuda.stream(streams[at]):
                for _ in range(CHAIN):
                    found[at] = calls[at](x, groups[at])
            time.sleep(pause_s)  # by then the kernels wait for their peers
        torch.cuda.synchronize()
    for group in groups:
        group.synchronize()
    return [same_bits(*pair) for pair in zip(found, expected, strict=True)]


def cross_each_pair(rank, world_size):
    """The outcome of cross for each pair, or the error of the first wait that expired."""
    groups, outcomes = [], {}
    x = normal(rank, 96 * MB, torch.bfloat16).cuda()
    for names in PAIRS:
        groups = groups or [graphar.Communicator(dist.new_group(), timeout_s=TIMEOUT_S) for _ in range(2)]
        try:
            outcomes[names] = cross(x, groups, names, (0, 1) if rank % 2 else (1, 0))
        except graphar.CollectiveTimeout as error:
            groups, outcomes[names] = [], str(error)
    return outcomes


@pytest.fixture(scope="module")
def outcomes():
    return run_on_gpus(cross_each_pair, 2, timeout_s=600)


@pytest.mark.promise(
    "Calls of two communicators, or as many as declared, end in any order, if a matmul's K is equal on all ranks."
)
@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_calls_in_opposite_orders_end(names, outcomes):
    assert [of_rank[names] for of_rank in outcomes] == [[0, 0], [0, 0]]

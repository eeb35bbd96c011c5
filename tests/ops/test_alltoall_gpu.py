"""All-to-all's kernels with one process per rank: every byte is in its place, whatever the sizes and dimensions."""

from __future__ import annotations

import random
import time

import pytest
import torch

import graphar
from graphar.plan.scratch import PUSH_DEPTH
from tests.cases import normal, raw, same_bits
from tests.gpu import kernel_calls
from tests.ops.conformance import MOVED
from tests.ops.gpu_cases import LAST_FLAGGED, STEP_NBYTES
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

every_shared_world_size = pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
KERNELS = ("alltoall_flagged", "alltoall_push")
HEADS = (((2, 6, 8, 16), 2, 1), ((2, 12, 4, 16), 1, 2), ((3, 4, 5), 1, 0), ((12, 7), 0, 1), ((1, 96, 24, 128), 2, 1))
MANY_STEPS = (2 * PUSH_DEPTH + 1) * STEP_NBYTES + 7


def run(function, world_size, *args, timeout_s=120.0):
    return run_on_gpus(function, world_size, *args, timeout_s=timeout_s)


def assert_exchanged(y, rank, xs, scatter_dim=0, gather_dim=0, sizes=None, what=""):
    assert y.is_contiguous(), what
    assert same_bits(y.cpu(), graphar.reference.alltoall(xs, scatter_dim, gather_dim, sizes)[rank]) == 0, what


def equal_parts(rank, world_size):
    for nbytes in (1, 15, 16, 17, 2048, 2049, LAST_FLAGGED - 1, LAST_FLAGGED, LAST_FLAGGED + 1, STEP_NBYTES + 1):
        xs = [raw(one, world_size * nbytes, torch.uint8) for one in range(world_size)]
        assert_exchanged(graphar.alltoall(xs[rank].cuda()), rank, xs, what=nbytes)
    for dtype in MOVED:
        xs = [raw(one, world_size * 5 * 33, dtype).view(world_size * 5, 33) for one in range(world_size)]
        for algorithm in KERNELS:
            assert_exchanged(graphar.alltoall(xs[rank].cuda(), algorithm=algorithm), rank, xs, what=dtype)
    return kernel_calls()


@every_shared_world_size
def test_equal_parts_of_every_size_and_dtype(world_size):
    assert run(equal_parts, world_size) == [10 + 2 * len(MOVED)] * world_size


def many_steps(rank, world_size):
    x = torch.arange(world_size * MANY_STEPS // 4, dtype=torch.int32, device="cuda") * (2 * rank + 1)
    for _ in range(3):
        y = graphar.alltoall(x[: len(x) // world_size * world_size])
        part = len(y) // world_size
        for source, mine in enumerate(y.split(part)):
            expected = torch.arange(rank * part, (rank + 1) * part, dtype=torch.int32, device="cuda") * (2 * source + 1)
            assert torch.equal(mine, expected), source


@pytest.mark.gpu(2, shared=True)
def test_large_parts_take_many_steps():
    run(many_steps, 2)


def heads(rank, world_size):
    for (shape, scatter, gather), dtype in ((one, dtype) for one in HEADS for dtype in (torch.bfloat16, torch.uint8)):
        shape = [world_size * n if at == scatter else n for at, n in enumerate(shape)]
        xs = [raw(one, torch.Size(shape).numel(), dtype).view(shape) for one in range(world_size)]
        for algorithm in KERNELS if xs[0].nbytes <= world_size * LAST_FLAGGED else KERNELS[1:]:
            how = {"scatter_dim": scatter, "gather_dim": gather, "algorithm": algorithm}
            y = graphar.alltoall(xs[rank].cuda(), **how)
            assert_exchanged(y, rank, xs, scatter, gather, what=(shape, dtype, algorithm))
            back = graphar.alltoall(y, scatter_dim=gather, gather_dim=scatter, algorithm=algorithm)
            assert same_bits(back.cpu(), xs[rank]) == 0, (shape, dtype, algorithm)
    lengths = [3 + 2 * one for one in range(world_size)]  # of packed sequences
    xs = [raw(one, n * world_size * 32, torch.float16).view(n, world_size * 2, 16) for one, n in enumerate(lengths)]
    sizes = [2] * world_size, lengths
    y = graphar.alltoall(xs[rank].cuda(), scatter_dim=1, gather_dim=0, sizes=sizes)
    assert_exchanged(y, rank, xs, 1, 0, what="packed")


@every_shared_world_size
def test_dimensions_are_exchanged_and_come_back(world_size):
    run(heads, world_size)


def uneven(rank, world_size):
    choices = random.Random(3)
    for turn in range(24):
        largest = choices.choice([3, 300, 70_000])
        ranks = range(world_size)
        sends = [[choices.choice([0, 0, 1, choices.randrange(largest)]) for _ in ranks] for _ in ranks]
        width, dtype = choices.choice([(1, torch.uint8), (3, torch.float16), (8, torch.bfloat16), (1, torch.int64)])
        xs = [raw(one, sum(own) * width, dtype).view(-1, width) for one, own in enumerate(sends)]
        sizes = sends[rank], [own[rank] for own in sends]
        assert_exchanged(graphar.alltoall(xs[rank].cuda(), sizes=sizes), rank, xs, sizes=sends, what=(turn, sends))
    nothing = torch.empty(0, 4, device="cuda")
    for _ in range(2):
        assert graphar.alltoall(nothing, sizes=[[0] * world_size] * 2).shape == (0, 4)
    torch.cuda.synchronize()  # else the last calls may not have begun
    return kernel_calls()


@every_shared_world_size
def test_uneven_parts_of_any_rows_and_of_none(world_size):
    assert run(uneven, world_size) == [26] * world_size


def unlike_sizes(rank, world_size):
    graphar.alltoall(torch.ones(2, device="cuda"), sizes=[[1, 1], [1, 1]])
    x = torch.ones(5, device="cuda")
    try:
        graphar.alltoall(x, sizes=[[2, 3], [2, 3]] if rank == 0 else [[4, 1], [3, 1]])
        graphar.alltoall(x, sizes=[[2, 3], [2, 3]])
        torch.cuda.synchronize()
        graphar.alltoall(x, sizes=[[2, 3], [2, 3]])
    except graphar.CommunicatorError as error:
        return str(error)
    return ""


@pytest.mark.gpu(2, shared=True)
def test_ranks_that_disagree_on_a_size_are_told_which():
    for said in run(unlike_sizes, 2):
        assert "3 from rank 1 to rank 0" in said or "3 from rank 0 to rank 1" in said, said
        assert "4 from rank 1 to rank 0" in said, said


def late_and_captured(rank, world_size):
    xs = [normal(one, 8 * world_size * 48, torch.bfloat16).view(8 * world_size, 48) for one in range(world_size)]
    large = [normal(one, world_size * (1 << 18), torch.float32) for one in range(world_size)]
    sizes = [[0] * (world_size - 1) + [8 * world_size], [0] * world_size]
    sends = [sizes[0]] * world_size
    sizes[1] = [8 * world_size] * world_size if rank == world_size - 1 else [0] * world_size
    x, y = xs[rank].cuda(), large[rank].cuda()
    calls = [
        lambda: graphar.alltoall(x),
        lambda: graphar.alltoall(x, scatter_dim=1, gather_dim=0) if 48 % world_size == 0 else x,
        lambda: graphar.alltoall(y),
        lambda: graphar.alltoall(x, sizes=sizes),
        lambda: graphar.alltoall(y, algorithm="alltoall_copies"),
    ]
    for call in calls:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [call() for call in calls]
    for turn in range(60):
        if turn % 20 == 7 and rank == turn % world_size:
            time.sleep(0.2)
        for one in found:
            if one is not x:
                one.fill_(0)
        graph.replay()
        eager = calls[turn % len(calls)]()
        assert torch.equal(eager, found[turn % len(calls)]), turn
    assert_exchanged(found[0], rank, xs)
    if 48 % world_size == 0:
        assert_exchanged(found[1], rank, xs, 1, 0)
    assert_exchanged(found[2], rank, large)
    assert torch.equal(found[4], found[2])
    assert_exchanged(found[3], rank, xs, sizes=sends)
    out = torch.empty_like(x)
    for _ in range(4):
        assert graphar.alltoall(x, out=out) is out
    assert_exchanged(out, rank, xs)


@every_shared_world_size
def test_a_late_rank_and_replayed_graphs_between_eager_calls(world_size):
    run(late_and_captured, world_size)

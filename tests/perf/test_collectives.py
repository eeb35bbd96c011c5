"""perf's measurement of one collective: the input, the methods that take turns, and the check of their results."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import graphar
from graphar.plan.sizes import KB, MB
from perf.harness import collectives, ranks
from perf.harness.cases import Case

OPS = ("allreduce", "reducescatter", "allgather")
NBYTES = 64 * KB


def flip_one_bit(call, x):
    """A method that has one wrong element on the first rank."""
    result = call(x).clone()
    result.view(torch.int16)[0, 0] ^= 1 - torch.distributed.get_rank()
    return result


def leave_out_a_rank(op, x):
    """A peer that sums without the last rank's input."""
    mine = x * (torch.distributed.get_rank() == 0)
    result = collectives.call_backend(op, mine)
    return x.copy_(result) if op == "allreduce" else result


def normal_input(op, mine):
    part = torch.randn(5000, generator=torch.Generator().manual_seed(mine.rank)).bfloat16()
    return collectives.input_of(op, NBYTES, part, mine.size)


def measure_right_and_wrong(rank, port):
    mine = ranks.join(rank, 2, "cpu", port)
    for op in OPS:
        exact, x = getattr(graphar, op), normal_input(op, mine)
        calls = {"plain": exact, "flipped": partial(flip_one_bit, exact), "nccl": partial(collectives.call_backend, op)}
        yield op, *collectives.measure(op, NBYTES, x, calls, mine)
        if op != "allgather":
            yield op, *collectives.measure(op, NBYTES, x, {"nccl": partial(leave_out_a_rank, op)}, mine)


@pytest.mark.usefixtures("forked_ranks")
def test_every_op_is_timed_and_a_wrong_bit_of_graphars_and_a_wrong_sum_of_a_peers_are_counted():
    rows = list(ranks.run(2, measure_right_and_wrong))

    of_all, of_peers = ([row for row in rows if (len(row[1]) == 3) is several] for several in (True, False))
    assert [(op, wrong) for op, _, wrong in of_all] == [(op, {"plain": 0, "flipped": 1, "nccl": 0}) for op in OPS]
    assert all(times[method] > 0 for _, times, _ in of_all for method in times)
    numel = {"allreduce": NBYTES, "reducescatter": NBYTES // 2}  # of both ranks' results
    assert [op for op, _, _ in of_peers] == list(numel)
    assert all(wrong["nccl"] > 0.5 * numel[op] for op, _, wrong in of_peers)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("op", OPS)
def test_an_input_is_rows_of_a_tensor_that_parts_evenly(op, world_size):
    part = torch.arange(3000).bfloat16()

    x = collectives.input_of(op, MB, part, world_size)

    whole = x.nbytes * (world_size if op == "allgather" else 1)
    assert MB - world_size * 2 * collectives.COLUMNS < whole <= MB
    assert x.shape[1] == collectives.COLUMNS
    assert op == "allgather" or len(x) % world_size == 0
    assert torch.equal(x.flatten()[:6000], torch.cat([part, part]))


def test_sums_in_place_between_8_ranks_stay_finite():
    most = max(Case(8, "process", "graph", "bfloat16", nbytes).iterations for nbytes in (8 * MB, 64 * MB, 128 * MB))

    assert 8.0**most * 2**16 < torch.finfo(torch.bfloat16).max

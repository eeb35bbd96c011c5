"""What calls of the backend "graphar" leave behind: works, deadlines, coalescing windows, and negative views."""

from __future__ import annotations

import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager

import graphar
from graphar.integrations.works import combined
from tests.integrations.entry_points import values
from tests.integrations.every_call import by_rank, check
from tests.integrations.programs import PROGRAMS, total
from tests.processes import run_ranks

BACKEND = "cpu:graphar"


def wait_for_two_calls(rank, world_size):
    """Rank 0 makes two calls as one, and rank 1 the second one a second later."""
    xs = [values(rank, dtype=torch.int64), values(rank + 5, dtype=torch.int64)]  # these go to gloo
    outs = [torch.zeros(3, dtype=torch.int64) for _ in xs]
    if rank == 1:
        for x, out, pause_s in zip(xs, outs, (0, 1), strict=True):
            time.sleep(pause_s)
            dist.reduce_scatter_tensor(out, x)
        return None
    with coalescing_manager(async_ops=True) as manager:
        for x, out in zip(xs, outs, strict=True):
            dist.reduce_scatter_tensor(out, x)
    manager.wait()
    return [out.tolist() for out in outs]


def test_calls_that_are_one_are_all_waited_for():
    assert run_ranks(wait_for_two_calls, 2, backend=BACKEND)[0] == [[10, 12, 14], [110, 112, 114]]


class Call(dist.Work):
    def __init__(self, is_done: bool) -> None:
        super().__init__()
        self.is_completed = self.is_success = lambda: is_done


@pytest.mark.parametrize("done", [(True, True), (True, False), (False, True), (False, False)])
def test_calls_that_are_one_are_complete_when_all_are(done):
    work = combined([Call(one) for one in done])

    assert work.is_completed() == work.is_success() == all(done)


def call_with_a_deadline(rank, world_size):
    x, options = values(rank), dist.AllreduceOptions()
    dist.all_reduce(x)
    if rank == 1:
        time.sleep(3)
        return None
    options.timeout, begin = timedelta(seconds=1), time.monotonic()
    with pytest.raises(graphar.CollectiveTimeout):
        dist.group.WORLD.allreduce([x], options).wait()
    return time.monotonic() - begin < 2.5


def test_a_calls_own_timeout_is_its_deadline():
    assert run_ranks(call_with_a_deadline, 2, backend=BACKEND) == [True, None]


def call_behind_a_window(rank, world_size):
    with coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(values(rank))
    x = values(rank)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    alive, same = weakref.ref(x), torch.equal(x, total(world_size))
    del work, x
    return same, alive() is None


def test_nothing_keeps_the_tensors_of_calls_behind_a_coalescing_window():
    assert run_ranks(call_behind_a_window, 2, backend=BACKEND) == [(True, True)] * 2


def call_with_negative_views(rank, world_size):
    x = torch._neg_view(values(rank) + 1)  # contiguous, unlike the imaginary part of a conjugate
    assert x.is_neg()
    out, part = torch.empty(6 * world_size), torch.empty(6 // world_size)
    parts = [torch.empty(6) for _ in range(world_size)]
    dist.all_gather_into_tensor(out, x)
    dist.all_gather(parts, x)
    dist.reduce_scatter_tensor(part, x)
    return out, torch.cat(parts), part


def test_a_view_that_torch_keeps_as_its_negative_has_the_right_sign():
    whole = torch.cat([-(values(rank) + 1) for rank in range(2)])
    summed = whole[:6] + whole[6:]

    for rank, (out, parts, part) in enumerate(run_ranks(call_with_negative_views, 2, backend=BACKEND)):
        assert torch.equal(out, whole)
        assert torch.equal(parts, whole)
        assert torch.equal(part, summed.chunk(2)[rank])


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("averages")])
def test_an_average_of_three_ranks_is_divided_by_three(name):
    # 1 / 2 and 1 / 4 are exact, and 1 / 3 is not.
    check(by_rank(3, BACKEND, [name]), name)

"""What calls of the backend "graphar" leave behind: works, deadlines, coalescing windows, and negative views."""

import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager

import graphar
from graphar.integrations.works import combined
from tests.integrations.entry_points import values
from tests.integrations.every_call import by_rank, check
from tests.integrations.programs import PROGRAMS, WHOLE_GROUP, total
from tests.processes import on_ranks, run_ranks

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


SHORT = timedelta(seconds=0.2)


def with_options(method, kind, *given, **options):
    """A call of a group's method, of 2 ranks. The group's own timeout is the deadline if it is given None."""

    def call(group, timeout):
        opts = kind()
        for name, value in options.items():
            setattr(opts, name, value)
        if timeout:
            opts.timeout = timeout
        getattr(group, method)(*given, opts).wait()

    return call


def wait_for_works(group, timeout):
    """Calls of torch's own group: alone, of tensors with gaps, and of several as one."""
    xs = [INTEGERS, torch.zeros(4, 2, dtype=torch.int64)[:, 0]]
    works = [group.allreduce([x], dist.AllreduceOptions()) for x in xs]
    for work in (*reversed(works), combined(works)):
        with pytest.raises(RuntimeError):
            work.wait(timeout or SHORT)
    raise RuntimeError


X, Y, INTEGERS = torch.ones(4), torch.ones(2), torch.ones(4, dtype=torch.int64)
SUMS, PARTS, GATHERED = dist.AllreduceOptions, dist.ReduceScatterOptions, c10d.AllgatherOptions
DEADLINES = {
    "allreduce": with_options("allreduce", SUMS, [X]),
    "allreduce_coalesced": with_options("allreduce_coalesced", c10d.AllreduceCoalescedOptions, [X, Y]),
    "reduce_scatter": with_options("reduce_scatter", PARTS, [Y], [[Y, Y]]),
    "_reduce_scatter_base": with_options("_reduce_scatter_base", PARTS, Y, X),
    "allgather": with_options("allgather", GATHERED, [[Y, Y]], [Y]),
    "_allgather_base": with_options("_allgather_base", GATHERED, X, Y),
    "allreduce of integers": with_options("allreduce", SUMS, [INTEGERS]),
    "broadcast": with_options("broadcast", dist.BroadcastOptions, [X], rootRank=1),
    "reduce": with_options("reduce", dist.ReduceOptions, [X], rootRank=0),
    "gather": with_options("gather", dist.GatherOptions, [[Y, Y]], [Y], rootRank=0),
    "scatter": with_options("scatter", dist.ScatterOptions, [Y], [], rootRank=1),
    "alltoall_base": with_options("alltoall_base", c10d.AllToAllOptions, X, X.clone(), [], []),
    "barrier": with_options("barrier", dist.BarrierOptions, device=torch.device("cpu")),
    "barrier(timeout=)": lambda group, timeout: group.barrier(**{"timeout": timeout} if timeout else {}).wait(),
    "waits": wait_for_works,
}


def call_with_deadlines(rank, world_size, from_group):
    store, found = c10d._get_default_store(), {}
    groups = [dist.new_group(timeout=timedelta(seconds=30)) for _ in DEADLINES]
    for (name, call), group in zip(DEADLINES.items(), groups, strict=True):
        dist.all_reduce(values(rank), group=group)
        dist.all_reduce(INTEGERS.clone(), group=group)
        if rank == 0:
            if from_group:
                group.set_timeout(SHORT)
            begin = time.monotonic()
            with pytest.raises((graphar.CollectiveTimeout, RuntimeError)):
                call(group, None if from_group else SHORT)
            found[name] = time.monotonic() - begin
            store.set(f"{name} ended", "")
        store.wait([f"{name} ended"])
    return found


@pytest.mark.parametrize("from_group", [False, True], ids=["call's", "group's"])
def test_every_call_ends_at_its_deadline_without_a_rank(from_group):
    found, _ = run_ranks(call_with_deadlines, 2, from_group, backend=BACKEND)

    assert found.keys() == DEADLINES.keys()
    assert {name: took_s for name, took_s in found.items() if not 0.1 < took_s < 8} == {}


@on_ranks(2, backend=BACKEND)
def test_timeouts_may_be_longer_than_graphars_own(rank, world_size):
    group, x, options = dist.new_group(timeout=timedelta(days=30)), values(rank), dist.AllreduceOptions()
    options.timeout = timedelta(days=20)
    group.allreduce([x], options).wait()
    dist.barrier(group)
    group.set_timeout(timedelta(days=12))
    dist.all_reduce(x, group=group)
    assert torch.equal(x, 2 * total(world_size))


@on_ranks(2, backend=BACKEND)
def test_results_with_gaps_are_there_however_a_call_is_waited_for(rank, world_size):
    found = []
    for finish in (
        lambda work: work.wait(),
        lambda work: work.get_future().wait(),
        lambda work: [None for _ in iter(work.is_completed, True)] if WHOLE_GROUP else work.wait(),
    ):
        whole = torch.zeros(6, 2, dtype=torch.int64)
        whole[:, 0] = values(rank)
        x = whole[:, 0]
        finish(dist.all_reduce(x, async_op=True))
        found.append((torch.equal(x, total(world_size).long()), whole[:, 1].eq(0).all().item()))
    whole = torch.zeros(3, 2, dtype=torch.int64)
    with coalescing_manager(async_ops=True) as manager:
        dist.reduce_scatter_tensor(whole[:, 0], values(rank, 3 * world_size, torch.int64))
    manager.wait()
    part = total(world_size, 3 * world_size).long().chunk(world_size)[rank]
    assert [*found, (torch.equal(whole[:, 0], part), whole[:, 1].eq(0).all().item())] == [(True, True)] * 4


@on_ranks(2, backend=BACKEND)
def test_tensors_of_unlike_dtypes_are_refused_and_stay_as_they_are(rank, world_size):
    """gloo refuses them; nothing may be converted, or served by the first tensor's dtype."""
    group, x, y = dist.group.WORLD, values(rank), values(rank, dtype=torch.int64)
    for call in (
        lambda: group.allreduce_coalesced([x, y], c10d.AllreduceCoalescedOptions()).wait(),
        lambda: group.allreduce_coalesced([y, x], c10d.AllreduceCoalescedOptions()).wait(),
        lambda: group.allgather([[torch.empty_like(x), y]], [x], GATHERED()).wait(),
        lambda: group._allgather_base(values(0, 12, torch.int64), x, GATHERED()).wait(),
    ):
        with pytest.raises(RuntimeError, match="type"):
            call()
    assert torch.equal(x, values(rank))
    assert torch.equal(y, values(rank, dtype=torch.int64))


@on_ranks(2, backend=BACKEND)
def test_outputs_whose_elements_share_memory_are_refused_and_inputs_are_not(rank, world_size):
    """All ranks are refused what one of them could not be given."""
    one, said = torch.ones(1), []
    for dtype in (torch.float32, torch.int64):
        x, y = one.to(dtype).expand(4), torch.ones(4, dtype=dtype)
        for call in (
            lambda x=x: dist.all_reduce(x),
            lambda x=x: dist.all_reduce_coalesced([x, x]),
            lambda x=x, y=y: dist.all_gather([x, y], y),
            lambda x=x, y=y: dist.reduce_scatter(x, [y, y]),
            lambda x=x, y=y: dist.reduce_scatter_tensor(x, torch.cat([y, y])),
            lambda x=x, y=y: dist.all_to_all_single(x, y),
            lambda x=x: dist.all_reduce(x, dist.ReduceOp.AVG if x.is_floating_point() else dist.ReduceOp.MIN),
        ):
            with pytest.raises(ValueError, match="a tensor that is written must have memory of its own for each elem"):
                call()
            said.append(x[0].item())
        if rank == 0:  # which only reads
            dist.broadcast(x, 0)
            dist.reduce(x, 1)
        else:
            dist.broadcast(y, 0)
            dist.reduce(y, 1)
        outs = [torch.empty(4, dtype=dtype) for _ in range(world_size)]
        dist.all_gather(outs, x if rank else y)
        said.append([out.tolist() for out in outs] + [y.tolist()] * rank)
    ones, twos = [1.0] * 4, [2.0] * 4
    assert said == ([1] * 7 + [[ones, ones, twos] if rank else [ones, ones]]) * 2


@on_ranks(2, backend=BACKEND)
def test_nothing_keeps_the_tensors_of_calls_behind_a_coalescing_window(rank, world_size):
    with coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(values(rank))
    x = values(rank)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    alive, same = weakref.ref(x), torch.equal(x, total(world_size))
    del work, x
    assert (same, alive() is None) == (True, True)


@on_ranks(2, backend=BACKEND)
def test_inference_tensors_are_written_outside_inference_mode_as_by_gloo(rank, world_size):
    with torch.inference_mode():
        x, part, whole = torch.ones(4), torch.zeros(2), torch.zeros(8)

    dist.all_reduce(x)
    dist.reduce_scatter_tensor(part, x)
    dist.all_gather_into_tensor(whole, x)

    assert [one.tolist() for one in (x, part, whole)] == [[2] * 4, [4] * 2, [2] * 8]


@on_ranks(2, backend=BACKEND)
def test_a_view_that_torch_keeps_as_its_negative_has_the_right_sign(rank, world_size):
    x = torch._neg_view(values(rank) + 1)  # contiguous, unlike the imaginary part of a conjugate
    assert x.is_neg()
    out, part = torch.empty(6 * world_size), torch.empty(6 // world_size)
    parts = [torch.empty(6) for _ in range(world_size)]
    dist.all_gather_into_tensor(out, x)
    dist.all_gather(parts, x)
    dist.reduce_scatter_tensor(part, x)
    parts = torch.cat(parts)
    whole = torch.cat([-(values(rank) + 1) for rank in range(2)])
    summed = whole[:6] + whole[6:]
    assert torch.equal(out, whole)
    assert torch.equal(parts, whole)
    assert torch.equal(part, summed.chunk(2)[rank])


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name.startswith("averages")])
def test_an_average_of_three_ranks_is_divided_by_three(name):
    # 1 / 2 and 1 / 4 are exact, and 1 / 3 is not.
    check(by_rank(3, BACKEND, [name]), name)

"""Communicator.stats: calls, bytes, fallbacks and plans are counted, and so are the waits that the host knows of."""

import dataclasses
import json
import time

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import CallStats, CollectiveTimeout
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Config
from graphar.plan.work import Sum
from graphar.runtime import runner
from graphar.runtime.engine import binders
from graphar.runtime.plan import BoundedCache, Plan
from tests.processes import on_ranks, run_ranks
from tests.runtime.test_runner import record_of, runner_of

ON_THE_CPU = "the tensor is on the CPU"


def test_a_new_communicator_has_no_counts(pair):
    assert pair.stats() == graphar.Stats((), 0, {}, 0.0, "")


def test_calls_and_their_bytes_are_counted_by_op_and_algorithm(pair):
    xs = [torch.ones(6, dtype=torch.bfloat16)] * 2

    for _ in range(3):
        pair.allreduce(xs)
    pair.allreduce([torch.ones(5)] * 2)
    pair.allgather(xs)

    assert pair.stats().calls == (
        CallStats("allreduce", "fallback", 4, 0, 3 * 12 + 20, ON_THE_CPU),
        CallStats("allgather", "fallback", 1, 0, 2 * 12, ON_THE_CPU),
    )


def test_calls_with_a_group_are_counted_apart_from_those_of_its_communicators():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with graphar.Communicator(dist.group.WORLD) as one:
            one.allreduce(torch.ones(4))
            graphar.allreduce(torch.ones(4))
            graphar.allreduce(torch.ones(4), dist.group.WORLD)

            assert [found.calls for found in graphar.stats().calls] == [2]
            assert graphar.stats(dist.group.WORLD) == graphar.stats()
            assert graphar.stats(one) == one.stats()
            assert [found.calls for found in one.stats().calls] == [1]
    finally:
        dist.destroy_process_group()


def test_a_fused_matmul_counts_once_with_the_bytes_of_its_sum(pair):
    graphar.fused_matmul_allreduce([torch.ones(6, 2)] * 2, [torch.ones(8, 2)] * 2, group=pair)

    (found,) = pair.stats().calls
    assert (found.op, found.calls, found.nbytes) == ("fused_matmul_allreduce", 1, 6 * 8 * 4)


def test_fallbacks_are_the_calls_without_a_kernel_with_their_reasons(pair, monkeypatch):
    config = Config(Algorithm.ONE_SHOT_PUSH, 2, 32)
    pair.reducescatter([torch.ones(4)] * 2)
    monkeypatch.setitem(binders, Sum, lambda engine, call, ranks: Plan(lambda ranks: None, config, "by the table"))
    pair.allreduce([torch.ones(4)] * 2)

    stats = pair.stats()
    assert [(one.op, one.fallback_reason) for one in stats.fallbacks] == [("reducescatter", ON_THE_CPU)]
    assert CallStats("allreduce", "one_shot_push", 1, 0, 16) in stats.calls


def test_a_plan_is_made_for_each_kind_of_call(pair):
    for numel in (4, 4, 5, 4):
        pair.allreduce([torch.ones(numel)] * 2)

    assert pair.stats().plans == 2


def test_counts_outlive_the_cache_of_plans(pair):
    pair.allreduce([torch.ones(4)] * 2)
    pair.engine.plans.clear()
    pair.allreduce([torch.ones(4)] * 2)

    (found,) = pair.stats().calls
    assert found.calls == 2


def test_a_cache_keeps_its_entries_until_there_are_too_many():
    kept = BoundedCache(max_entries=2)

    assert [kept.keep(key, len) for key in "ab"] == [len, len]
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (len, len, None)
    kept.keep("c", max)
    assert kept == {"c": max}


def test_calls_are_counted_while_a_profiler_watches(pair, tmp_path):
    with graphar.profile(tmp_path / "trace.json"):
        pair.allreduce([torch.ones(4)] * 2)

    (found,) = pair.stats().calls
    assert (found.calls, found.nbytes) == (1, 16)


def test_a_closed_communicator_still_has_its_counts():
    with graphar.Communicator(devices=["cpu", "cpu"]) as closed:
        closed.allreduce([torch.ones(4)] * 2)

    assert (closed.stats().calls[0].calls, closed.stats().failure) == (1, "")


def test_counts_become_json(pair):
    pair.allreduce([torch.ones(4)] * 2)

    told = json.loads(json.dumps(dataclasses.asdict(pair.stats())))

    assert told["calls"][0]["op"] == "allreduce"
    assert told.keys() == {"calls", "plans", "launches", "host_waited_s", "failure"}


def test_the_host_counts_how_long_it_waited_for_a_late_rank():
    early_s, late_s = run_ranks(wait_for_a_late_rank, 2)

    assert early_s > 0.5 > late_s


def wait_for_a_late_rank(rank: int, world_size: int) -> float:
    """The seconds that the host of a rank waited; rank 1 comes a second later."""
    with graphar.Communicator() as communicator:
        before = communicator.stats().host_waited_s
        time.sleep(rank)
        communicator.allreduce(torch.ones(4))  # the first call of a communicator meets the other ranks
        return communicator.stats().host_waited_s - before


@on_ranks(2)
def test_an_expired_deadline_is_the_failure(rank, world_size):
    communicator = graphar.Communicator(timeout_s=0.5)
    communicator.allreduce(torch.ones(4))
    if rank == 0:
        with pytest.raises(CollectiveTimeout):
            communicator.allreduce(torch.ones(4))

    failure = communicator.stats().failure
    if rank == 0:
        assert failure.startswith("allreduce call 1 over torch.distributed: rank(s) [1] failed, or did not take part")
    else:
        assert failure == ""


def test_a_deadline_that_expired_in_a_kernel_is_the_failure_before_a_call_raises_it(pair, monkeypatch):
    monkeypatch.setattr(pair.engine, "runner", runner_of(monkeypatch, record_of(kind=1)))
    monkeypatch.setattr(runner, "is_capturing", lambda device: True)

    assert "rank 0 waited past the deadline for rank 2" in pair.stats().failure


def test_launches_are_those_that_the_kernels_have_counted(monkeypatch):
    counting = runner_of(monkeypatch, record_of(kind=0))
    monkeypatch.setattr(runner, "calls_begun", lambda counters, device: {0x1000: 42, 0x4000: 0}[counters])
    monkeypatch.setattr(runner, "is_capturing", lambda device: False)

    assert counting.launches() == {"two_shot_push": 42}


def test_launches_are_not_read_while_a_graph_is_captured(monkeypatch):
    counting = runner_of(monkeypatch, record_of(kind=0))
    monkeypatch.setattr(runner, "is_capturing", lambda device: True)

    assert counting.launches() == {}


def test_launches_are_counted_while_another_thread_prepares_a_kernel(monkeypatch):
    counting = runner_of(monkeypatch, record_of(kind=0))
    monkeypatch.setattr(counting, "_allocate", lambda algorithm: counting.regions[Algorithm.ONE_SHOT_PUSH])
    new = "a key", Algorithm.ONE_SHOT, "a kernel", lambda member: None
    monkeypatch.setattr(runner, "calls_begun", lambda counters, device: len(counting.prepare_all(*new)))

    assert counting.launches() == {"two_shot_push": 1, "one_shot_push": 1}


def test_stats_are_printed_as_a_table():
    calls = (
        CallStats("allreduce", "one_shot", 12, 11, 3 << 19),
        CallStats("allgather", "fallback", 1, 0, 64, "on the CPU"),
    )

    assert str(graphar.Stats(calls, 2, {}, 0.25, "rank 1 is gone")).splitlines() == [
        "                         calls   repeated          size",
        "allreduce, one_shot         12         11        1.5 MB",
        "allgather, fallback          1          0          64 B  on the CPU",
        "2 plans; the host waited 0.250 s for other ranks",
        "failed: rank 1 is gone",
    ]
    assert str(graphar.Stats((), 0, {}, 0.0, "")).splitlines()[1:] == [
        "0 plans; the host waited 0.000 s for other ranks"
    ]

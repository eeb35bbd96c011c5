"""perf host: what is measured on the CPU, where ranks run, how bursts are timed, and the report."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import graphar
from perf import __main__ as program
from perf import host_calls
from perf.host_calls import (
    APART,
    BASELINES,
    CPU,
    SHARED,
    UNTIMED,
    HostPlan,
    Trial,
    differing,
    join,
    package_trials,
    rows_of,
)
from perf.peers.methods import Method
from perf.report import read
from perf.topics.host import Host, host_table
from tests.perf.samples import host_row as row
from tests.perf.samples import spread

OPS = {name for name in graphar.__all__ if name.startswith(("all", "reduce", "fused"))}


def plan_of(gpu_count, *argv):
    return Host.plan(program.parse(["host", *argv]), gpu_count)


def test_a_run_on_the_cpu_is_reported_with_every_public_op(tmp_path, forked_ranks):
    assert program.main(["host", "--bursts", "1", "--out", str(tmp_path)]) == 0

    report = read(tmp_path / "cpu", Host).report
    graphars = [row for row in report.rows if row.is_own]
    assert {row.op for row in graphars} == OPS
    assert [(row.method, row.op) for row in report.rows if not row.is_own] == [
        ("torch", "x + x"),
        ("torch", "linear"),
        ("gloo", "all_reduce"),
    ]
    assert {(row.place, row.world_size, row.wrong) for row in report.rows} == {(CPU, 2, 0)}
    assert {row.outputs for row in graphars} == set(BASELINES)
    assert len({(row.op, row.option) for row in graphars}) == len(graphars)
    assert report.skipped == []
    page = (tmp_path / "cpu" / "host.md").read_text()
    assert f"All {len(report.rows)} results were verified: none is wrong." in page


@pytest.mark.parametrize(
    ("gpu_count", "place", "world_size"), [(0, CPU, 2), (1, SHARED, 2), (2, APART, 2), (4, APART, 4)]
)
def test_ranks_have_a_gpu_each_or_share_the_only_one_or_run_on_the_cpu(gpu_count, place, world_size):
    plan = plan_of(gpu_count)

    assert (plan.place, plan.world_size) == (place, world_size)
    assert plan_of(gpu_count, "--bursts", "7").bursts == 7


def test_ranks_that_share_a_gpu_may_do_so_and_meet_over_gloo(monkeypatch):
    monkeypatch.setenv(host_calls.SHARE_SWITCH, "0")
    begun = []
    monkeypatch.setattr(torch.cuda, "set_device", begun.append)
    monkeypatch.setattr(dist, "TCPStore", lambda *place, **more: "the store")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: begun.append((backend, more["rank"])))
    monkeypatch.setattr(host_calls, "ProcessRanks", lambda device, store: (device, store))

    device = torch.device("cuda", 0)
    assert join(HostPlan(SHARED, 2, 1, 1), 1, 29500) == (device, "the store")
    assert begun == [device, ("gloo", 1)]
    assert os.environ["GRAPHAR_TEST_SHARE_GPU"] == "1"


def test_the_time_of_a_burst_is_that_of_its_calls_without_the_first_ones(monkeypatch):
    now_ns, made = 0, []

    def call():
        nonlocal now_ns
        now_ns += 3000 if len(made) >= UNTIMED else 90_000
        made.append(now_ns)

    monkeypatch.setattr(host_calls.time, "perf_counter_ns", lambda: now_ns)

    assert Trial("graphar", "allreduce", "", call, []).burst_us(16) == 3.0
    assert len(made) == UNTIMED + 16


def test_peers_get_the_input_where_they_take_it(monkeypatch):
    ranks, buffer = SimpleNamespace(size=2), torch.zeros(4096, dtype=torch.bfloat16)
    methods = [Method("anywhere", torch.neg), Method("symmetric", torch.neg, buffer=buffer)]
    monkeypatch.setattr(host_calls.catalogue, "make_methods", lambda plan, ranks: (methods, ["another: not installed"]))
    operands = SimpleNamespace(xs=[torch.full((8, 128), rank + 1.0).bfloat16() for rank in range(2)])
    operands.own = lambda of_ranks: of_ranks[1]

    trials, skipped = package_trials(operands, ranks)

    assert skipped == ["another: not installed"]
    anywhere, symmetric = (trial.call.args[0] for trial in trials)
    assert anywhere.data_ptr() == operands.xs[1].data_ptr()
    assert symmetric.data_ptr() == buffer.data_ptr()
    assert torch.equal(symmetric, anywhere)
    assert all(torch.equal(trial.expected[0], torch.full((1024,), 3.0).bfloat16()) for trial in trials)
    assert [trial.keeps for trial in trials] == methods


@pytest.mark.parametrize(
    ("result", "wrong"),
    [
        (torch.tensor([1.0, 2.0]), 0),
        (torch.tensor([1.0, -2.0]), 1),
        (torch.tensor([1.0, 2.0, 3.0]), 2),
        (torch.tensor([1.0, 2.0]).double(), 2),
    ],
)
def test_elements_differ_by_bits_and_all_do_if_the_shape_or_dtype_does(result, wrong):
    assert differing(result, torch.tensor([1.0, 2.0])) == wrong


def test_a_call_is_compared_with_an_allreduce_that_makes_as_many_tensors():
    plan = HostPlan(SHARED, 2, 16, 1)
    times = {BASELINES[1]: 10.0, BASELINES[2]: 12.0, BASELINES[3]: 14.0}
    made = [
        (Trial("graphar", "allreduce", option, None, []), n, spent)
        for n, (option, spent) in enumerate(times.items(), 1)
    ]
    made += [(Trial("graphar", "allgather", "a tuple of 2", None, [], 1.5), 2, 24.0)]
    made += [(Trial("torch", "x + x", "", None, []), 1, 9.0)]

    rows = list(rows_of(plan, [(trial, n, spread(spent, "p90"), 0) for trial, n, spent in made]))

    assert [row.of_allreduce for row in rows] == [1.0, 1.0, 1.0, 2.0, None]
    assert [row.exceeds for row in rows] == [False, False, False, True, False]


def peer(method, time_us, **more):
    return row("all_reduce", time_us, None, limit=None, method=method, **more)


def test_the_table_marks_calls_beyond_their_limit():
    table = host_table([row("allreduce", 12.0, 1.0), row("allgather", 24.0, 2.0, "sizes=")])

    assert table.splitlines()[2:] == [
        "| allreduce | - | 1 | 12 | 12 - 12 | 1.00 | 1.5 |",
        "| allgather | sizes= | 1 | 24 | 24 - 24 | **2.00** | 1.5 |",
    ]


def test_findings_name_calls_beyond_their_limit_and_the_cpu_has_no_limits():
    rows = [row("allreduce", 12.0, 1.0), row("allgather", 24.0, 2.0, "sizes=")]

    assert Host(rows).findings() == ["1 of 2 calls exceed their limit: allgather (sizes=) (2.00)."]
    assert Host(rows[:1]).findings() == ["0 of 1 calls exceed their limit."]
    assert Host([row("allgather", 24.0, 2.0, place=CPU)]).findings() == []
    assert Host([rows[0], peer("nccl", 25.0), peer("symm_one_shot", 8.0), peer("sglang", 7.0, wrong=1)]).findings() == [
        "An all-reduce takes the host 12 us; with symm_one_shot, the fastest peer, it takes 8 us.",
        "0 of 1 calls exceed their limit.",
    ]
    assert "2.00 | - |" in host_table([row("allgather", 24.0, 2.0, place=CPU)])


def test_a_wrong_result_is_named_and_left_out_of_the_headline():
    report = Host([row("allreduce", 12.0, 1.0), row("allgather", 24.0, 2.0, "sizes=", wrong=3)])

    assert report.wrong() == [f"graphar at allgather, sizes=, {SHARED}"]
    assert report.glance().headline == "1.00"
    assert "24 **(3 WRONG)**" in host_table(report.rows)

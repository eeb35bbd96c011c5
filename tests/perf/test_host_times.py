"""The host times of eager all-reduces: how they are taken, and their table."""

from __future__ import annotations

import pytest
import torch

from perf.harness import ranks, sweep
from perf.harness.cases import HOST_CALLS, HOST_MODES, Case
from perf.harness.ranks import QUEUED_CALLS, InProcessRanks
from perf.harness.sweep import Trial
from perf.harness.timing import WARM_UP
from perf.peers import catalogue
from perf.peers.methods import Method


class Clock:
    """A clock that calls, other operations and waiting for the device move on by 3 us, 50 us and 1000 us."""

    def __init__(self, monkeypatch) -> None:
        self.now_ns, self.calls, self.waits = 0, 0, 0
        monkeypatch.setattr(sweep.time, "perf_counter_ns", lambda: self.now_ns)
        monkeypatch.setattr(ranks, "host_time_us", self.time_us)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)

    def time_us(self, launch):
        begin_ns = self.now_ns
        launch()
        return (self.now_ns - begin_ns) / 1e3

    def call(self, x):
        self.calls += 1
        self.now_ns += 3000
        return x

    def wait(self):
        self.waits += 1
        self.now_ns += 1_000_000


@pytest.mark.parametrize("mode", HOST_MODES)
def test_the_time_is_that_of_2000_calls_alone(monkeypatch, mode):
    clock, case = Clock(monkeypatch), Case(4, "process", mode, "bfloat16", 2048)
    trial = Trial(Method("a method", clock.call), case, torch.zeros(1024), torch.zeros(1024))

    spent_us = trial.make_launch()()

    assert case.iterations == HOST_CALLS == clock.calls - WARM_UP == 2000
    assert spent_us == pytest.approx(3.0 * HOST_CALLS)
    assert clock.waits == HOST_CALLS // QUEUED_CALLS == 8


@pytest.mark.parametrize(("factor", "wrong"), [(2.0, 0), (3.0, 64)])
def test_the_result_of_one_more_call_is_verified(factor, wrong):
    ranks, case = InProcessRanks(2), Case(2, "list", "host_loop", "bfloat16", 128)
    data = [torch.full((64,), 2.0, dtype=torch.bfloat16)] * 2
    method = Method("a method", lambda xs: [x * factor for x in xs], exact=True)
    trial = Trial(method, case, data, data)
    trial.run(1)

    assert trial.count_wrong(lambda: pytest.fail("the timed loop"), ranks) == 2 * wrong


def test_with_an_output_graphar_writes_to_the_same_one_in_each_call():
    method, x = catalogue.make_one("graphar_out"), torch.ones(8)
    with torch.no_grad():
        outs = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(catalogue.graphar, "allreduce", lambda x, out: outs.append(out) or out)
            assert method.call(x) is method.call(x)
            method.call(torch.ones(4))

    assert [out.numel() for out in outs] == [8, 8, 4]

"""perf's harness: a wrong result cannot pass unseen."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.plan.sizes import MB
from perf.harness import links
from perf.harness.cases import Case
from perf.harness.ranks import InProcessRanks
from perf.harness.sweep import measure
from perf.harness.timing import deciles, spread, time_in_turn
from perf.harness.verify import FP8_SHARE, differs, is_far
from perf.peers import catalogue
from perf.peers.catalogue import make_graphar
from perf.peers.methods import Method

CASE = Case(world_size=3, form="list", mode="cpu", dtype="bfloat16", nbytes=2048)


def test_one_differing_bit_counts_where_the_method_is_exact():
    zero = torch.zeros(2, dtype=torch.bfloat16)

    assert differs(torch.tensor([0.0, -0.0], dtype=torch.bfloat16), zero).tolist() == [False, True]


def test_the_tolerance_scales_with_the_inputs_and_admits_no_nan():
    parts = [torch.full((3,), 64.0, dtype=torch.bfloat16), torch.full((3,), -64.0, dtype=torch.bfloat16)]
    expected = torch.zeros(3, dtype=torch.bfloat16)
    output = torch.tensor([2.0, 2.125, torch.nan], dtype=torch.bfloat16)

    assert is_far(output, expected, parts).tolist() == [False, True, True]


def test_a_chain_of_sums_may_leave_the_range_by_rounding():
    parts = [torch.tensor([2.0**-12, 2.0**-22], dtype=torch.float16)] * 4
    expected = torch.tensor([torch.inf, 2.0**14], dtype=torch.float16)
    infinite = torch.full((2,), torch.inf, dtype=torch.float16)

    assert is_far(infinite, expected, parts, steps=18).tolist() == [False, True]
    assert is_far(infinite, expected, [parts[0] * 256] * 4, steps=18).tolist() == [False, False]


def test_a_quantised_result_may_be_off_by_what_fp8_rounds():
    x = torch.randn(4, 1 << 14).to(torch.bfloat16)
    scale = x.abs().amax().float() / 448
    coded = [(part.float() / scale).to(torch.float8_e4m3fn).float() * scale for part in x]
    exact, total = x.float().sum(0), sum(coded)
    output_scale = total.abs().amax() / 448
    output = ((total / output_scale).to(torch.float8_e4m3fn).float() * output_scale).to(torch.bfloat16)

    assert not is_far(output, exact.to(torch.bfloat16), list(x), quantised=True).any()
    assert is_far(output, exact.to(torch.bfloat16), list(x)).any()


def test_a_quantised_result_may_be_off_by_no_more():
    parts = [torch.tensor([1.0, 64.0])] * 2
    expected = torch.tensor([2.0, 128.0])

    assert is_far(expected * (1 + 1.1 * FP8_SHARE), expected, parts, quantised=True).tolist() == [True, True]


def test_a_right_result_is_counted_right():
    rows, skipped = measure(CASE, [make_graphar()], InProcessRanks(CASE.world_size))

    assert [(row.method, row.algorithm, row.wrong) for row in rows] == [("graphar", "fallback", 0)]
    assert skipped == []


def test_a_wrong_result_is_counted_on_every_rank_that_has_it():
    def one_element_off_on_the_last_rank(xs):
        outputs = graphar.allreduce(xs)
        outputs[-1][7] += 1
        return outputs

    method = Method("broken", one_element_off_on_the_last_rank, exact=True)

    rows, _ = measure(CASE, [method], InProcessRanks(CASE.world_size))

    assert rows[0].wrong == 1


def test_a_method_that_writes_nothing_after_its_first_call_is_caught():
    outputs = []

    def stale(xs):
        if not outputs:
            outputs.extend(graphar.allreduce(xs))
        return outputs

    rows, _ = measure(CASE, [Method("stale", stale, exact=True)], InProcessRanks(CASE.world_size))

    assert rows[0].wrong == CASE.numel * CASE.world_size


def test_a_peer_that_refuses_is_named_with_its_reason():
    def refuse(xs):
        raise RuntimeError("needs a multiple of 16 bytes\nat somewhere")

    rows, skipped = measure(CASE, [Method("peer", refuse)], InProcessRanks(CASE.world_size))

    assert rows == []
    assert skipped == ["peer, 3 ranks, 2 KB, cpu: needs a multiple of 16 bytes"]


def test_graphar_may_not_refuse(monkeypatch):
    def refuse(xs):
        raise RuntimeError("not today")

    method = replace(make_graphar(), call=refuse)

    with pytest.raises(RuntimeError, match="not today"):
        measure(CASE, [method], InProcessRanks(CASE.world_size))


def test_an_algorithm_of_graphar_may_only_refuse_what_it_cannot_serve():
    assert catalogue.make_algorithm("graphar:one_shot").refusals == (graphar.UnsupportedError,)


class Counters:
    """Two links. Data are spread evenly over them, and the protocol adds a sixteenth."""

    raw_rate = 100.0

    def __init__(self):
        self.sent = 0

    def send(self, nbytes):
        self.sent += nbytes

    def read(self):
        return [self.sent // 2] * 2, [self.sent * 17 // 32] * 2


def test_traffic_is_counted_from_one_launch():
    case = Case(2, "process", "graph", "bfloat16", 16 * MB)
    counters = Counters()
    counters.send(1 * MB)
    needed = 16 * MB * case.iterations

    used = links.count(lambda: counters.send(2 * needed), 1e6, case, InProcessRanks(2), counters)

    assert used.must_send_nbytes == needed
    assert (used.payload_efficiency, used.protocol_overhead, used.link_balance) == (0.5, 0.0625, 1.0)
    assert used.raw_tx_nbytes == needed * 17 // 8


@pytest.mark.parametrize(
    ("name", "mode", "nbytes", "expected"),
    [
        ("nccl", "graph", 16 * MB, True),
        ("nccl", "chain", 16 * MB, False),
        ("nccl", "graph", 8 * MB, False),
        ("vllm", "graph", 16 * MB, False),
    ],
)
def test_traffic_is_counted_where_it_outweighs_what_else_is_sent(name, mode, nbytes, expected):
    method = Method(name, lambda x: x)

    assert links.is_counted(method, Case(2, "process", mode, "bfloat16", nbytes)) is expected


def test_without_counters_the_reason_is_known(monkeypatch):
    def missing(device):
        raise RuntimeError("no NVLink")

    monkeypatch.setattr(links, "Counters", missing)

    assert links.find_counters(SimpleNamespace(device=None, total=lambda counts: counts)) == (None, "no NVLink")


def test_an_unknown_link_ceiling_is_no_end(monkeypatch):
    def measure(ranks):
        raise RuntimeError("2 slots do not hold what was pushed")

    monkeypatch.setattr(links, "measure_ceiling", measure)

    assert links.find_ceiling(InProcessRanks(4)) == "link ceiling, 4 ranks: 2 slots do not hold what was pushed"


def test_percentiles_are_linear_between_their_neighbours():
    assert deciles([5.0, 1.0, 4.0, 2.0, 3.0]) == {"median": 3.0, "p10": pytest.approx(1.4), "p90": pytest.approx(4.6)}
    assert spread([7.0]) == {"median": 7.0, "p10": 7.0, "p99": 7.0}


def test_launches_take_turns_each_prepared_and_the_first_turn_does_not_count():
    done = []
    times = iter(range(6))
    launches, prepare = ["a", "b"], [lambda: done.append("prepare a"), lambda: done.append("prepare b")]

    times_us = time_in_turn(launches, 2, lambda launch: done.append(launch) or float(next(times)), prepare)

    assert times_us == [[2.0, 4.0], [3.0, 5.0]]
    assert done == ["prepare a", "a", "prepare b", "b"] * 3

"""perf's chains: each operation reads the result of the one before, and the last result is right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perf.harness import sweep
from perf.harness.cases import Case
from perf.harness.ranks import InProcessRanks
from perf.harness.sweep import measure
from perf.peers.methods import Method, Pair

CASE = Case(world_size=1, form="process", mode="chain", dtype="bfloat16", nbytes=2048)


class OneRank(InProcessRanks):
    """A world of one whose data is a tensor: what a GPU process sees, without a GPU."""

    def __init__(self):
        super().__init__(1)

    def random(self, case):
        return super().random(case)[0]

    def gather(self, data, window):
        return [data[window]] * 2  # as if another rank held the same


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch):
    """Runs chains as eager calls, without CUDA graphs."""
    monkeypatch.setattr(sweep, "GRAPH_MODES", ())


def doubled(x):
    return x + x


def test_an_exact_chain_is_right_to_its_last_result():
    rows, _ = measure(CASE, [Method("exact", doubled, exact=True)], OneRank())

    assert [row.wrong for row in rows] == [0]


def test_an_exact_chain_that_reads_its_first_input_again_is_wrong():
    first = []

    def forgetful(x):
        first.append(x)
        return doubled(first[0])

    rows, _ = measure(CASE, [Method("forgetful", forgetful, exact=True)], OneRank())

    assert rows[0].wrong > 0.9 * CASE.numel


def test_a_peers_chain_is_right_at_full_scale():
    rows, _ = measure(CASE, [Method("peer", doubled)], OneRank())

    assert [row.wrong for row in rows] == [0]


def test_a_peer_that_goes_wrong_on_its_way_back_is_caught():
    pair = Pair(*torch.empty(2, CASE.numel, dtype=torch.bfloat16))

    def one_way(x):
        out = pair.opposite(x)
        return out.copy_(pair.first).mul_(2)

    rows, _ = measure(CASE, [Method("one way", one_way, buffer=pair.first)], OneRank())

    assert rows[0].wrong > 0.9 * CASE.numel


def test_a_pair_goes_to_and_fro():
    pair = Pair(*torch.empty(2, CASE.numel, dtype=torch.bfloat16))

    def both_ways(x):
        return torch.add(x, x, out=pair.opposite(x))

    rows, _ = measure(CASE, [Method("both ways", both_ways, buffer=pair.first, exact=True)], OneRank())

    assert [row.wrong for row in rows] == [0]


def test_an_in_place_peer_is_right_at_full_scale():
    rows, _ = measure(CASE, [Method("in place", lambda x: x.mul_(2), in_place=True)], OneRank())

    assert [row.wrong for row in rows] == [0]


@pytest.mark.parametrize(("mode", "in_place"), [("chain", False), ("graph", True)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_a_peers_timed_launch_computes_is_looked_at(monkeypatch, mode, in_place, dtype):
    def call(x):
        return x.mul_(2) if in_place else doubled(x)

    monkeypatch.setattr(Case, "iterations", 18)  # more leave float16's range
    case = replace(CASE, mode=mode, dtype=dtype)
    peer = Method("peer", call, in_place=in_place)
    right, _ = measure(case, [peer], OneRank())
    monkeypatch.setattr(sweep.Trial, "make_launch", lambda trial: trial.run(1) or (lambda: None))

    wrong, _ = measure(case, [peer], OneRank())

    assert [row.wrong for row in right] == [0]
    assert wrong[0].wrong > 0.1 * case.numel


def test_what_leaves_the_range_of_float16_on_the_way_is_not_wrong():
    case = replace(CASE, mode="graph", dtype="float16")

    rows, _ = measure(case, [Method("peer", lambda x: x.mul_(2), in_place=True)], OneRank())

    assert [row.wrong for row in rows] == [0]


def test_nothing_overflows_or_vanishes():
    seen = []

    def watched(x):
        seen.append(x)
        return doubled(x)

    measure(CASE, [Method("watched", watched, exact=True)], OneRank())

    assert seen[0].count_nonzero() > 0.95 * seen[0].numel()
    assert all(x.isfinite().all() and x.count_nonzero() == seen[0].count_nonzero() for x in seen)

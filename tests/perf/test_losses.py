"""perf losses: measurements on the CPU, wrong results, and the report."""

from __future__ import annotations

import pytest
import torch

from perf.passes import BOTH, CPU_METHODS, OWN, TORCH, PassesPlan, run_shapes
from perf.topics import losses as topic
from perf.topics.losses import PASSES, Losses, least_nbytes, make_method, wrong_of_own, wrong_of_peer
from tests.perf.samples import loss_row as row

SHAPE = (6, 512, 2)


def test_the_progress_bar_counts_every_row():
    plan = PassesPlan("cpu", [SHAPE], CPU_METHODS)

    assert len(list(run_shapes(Losses, plan, 0, 0))) == Losses.count(plan)


def test_shapes_after_one_that_fails_are_measured(monkeypatch):
    count_wrong = topic.wrong_of_own
    monkeypatch.setattr(topic, "wrong_of_own", lambda mine, got: count_wrong(mine, got) // (len(mine.x) - 1))

    reason, *rows = run_shapes(Losses, PassesPlan("cpu", [(1, 512, 1), SHAPE], [OWN]), 0, 0)

    assert reason.startswith("1 x 512: ZeroDivisionError")
    assert [row.passes for row in rows] == list(PASSES)


def test_the_least_bytes_are_those_of_the_logits_for_each_time_that_they_move():
    assert [least_nbytes(passes, (10, 800, 4)) for passes in PASSES] == [4000, 12000]


def results(method: str) -> tuple:
    x, target = torch.randn(6, 256).bfloat16() * 3, torch.randint(256, (6,))
    made = make_method(method, x, target, SHAPE)
    return x, target, made, made(BOTH)


@pytest.mark.parametrize("at", [0, 1])
def test_a_wrong_loss_or_gradient_of_graphar_is_counted(at):
    _, _, method, outputs = results(OWN)
    assert wrong_of_own(method, outputs) == 0

    outputs[at].view(-1)[0] += 1

    assert wrong_of_own(method, outputs) == 1


@pytest.mark.parametrize("at", [0, 1])
def test_a_wrong_loss_or_gradient_of_a_peer_is_counted(at):
    x, target, _, outputs = results(TORCH)
    assert wrong_of_peer(x, target, outputs) == 0

    outputs[at].view(-1)[0] += 1

    assert wrong_of_peer(x, target, outputs) == 1


def test_the_report_has_both_passes_the_share_of_the_least_time_and_the_memory():
    rows = [row(method, time, passes) for passes in PASSES for method, time in ((OWN, 120.0), (TORCH, 240.0))]
    forward, both, peaks = Losses(rows).sections()

    assert "| 4096 x 32064 | 120 | 240 | torch | 0.50 | 250 | 60 | 2 |" in forward.body[0]
    assert "| 4096 x 32064 | 120 | 240 | torch | 0.50 | 752 | 180 | 0.667 |" in both.body[0]
    assert "| 4096 x 32064 | 256 | 256 |" in peaks.body[0]
    assert Losses(rows).glance().ratios == {"4096 x 32064": 0.5}

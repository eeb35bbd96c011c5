"""The cache of bound launches of fused matmuls. Needs no GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from graphar.matmul import allgather_matmul, fused, launches
from graphar.matmul.allgather_matmul import AllgatherMatmuls, Gathering
from graphar.matmul.fused import FusedMatmuls
from graphar.matmul.operands import Operands
from graphar.numerics.epilogues.epilogue import bind
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.slices import row_slices
from graphar.plan.tiles import GATHERED_TILES
from graphar.runtime import launcher

TILE, MEMBER, COUNTS = GATHERED_TILES[0], SimpleNamespace(rank=0, device=0), (16, 16)


class Bound:
    """Stands in for a runner: keeps what launches must have alike on all ranks."""

    def __init__(self):
        self.chip, self.agreed = SimpleNamespace(sms=132), []

    def arguments(self, member, algorithm, one, timeout_s, agreed):
        self.agreed.append(agreed)

    def bind_member(self, *given):
        return given


def summed(engine, call, a, w, out):
    placed, (one,) = fused._place(Operands(a, w, None, out)), row_slices(COUNTS, 32)
    functions = {(TILE, placed.layout): None}
    return FusedMatmuls(engine), (call, Algorithm.MATMUL_ALLREDUCE, MEMBER, placed, functions, TILE, one, None)


def gathered(engine, call, a, w, out):
    placed, (one,) = allgather_matmul._place(Gathering(a, w, None, out, None)), row_slices(COUNTS, 32)
    return AllgatherMatmuls(engine), (call, MEMBER, placed, {(TILE, "by_rows"): None}, TILE, one)


@pytest.mark.parametrize("form", [summed, gathered])
def test_epilogues_that_differ_in_their_text_alone_share_no_launch(monkeypatch, form):
    # Their code is the same, but ranks compare the text. The addresses of a rank may repeat where another's do not.
    monkeypatch.setattr(launches, "bind", lambda *given: ([], None))
    monkeypatch.setattr(allgather_matmul, "_parameters", lambda *given: [])
    monkeypatch.setattr(fused, "Launch", lambda *given: None)
    monkeypatch.setattr(allgather_matmul, "Launch", lambda *given: None)
    monkeypatch.setattr(launcher, "sm_count", lambda device: 132)
    engine = SimpleNamespace(runner=Bound(), timeout_s=1.0, world_size=2)
    a, w, out = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (32, 64, 32))
    forms = [bind("op", text, out, [], [2.0])[0] for text in ("v * a", "v * b", "v * a")]
    call = Call.of("op", a, COUNTS)

    bound, given = form(engine, call, a, w, out)
    for one in forms:
        bound._launch(call._replace(epilogue=one), *given[1:])

    assert forms[0].kernel == forms[1].kernel
    assert [text.split(", ")[2] for text in engine.runner.agreed] == ["epilogue v * a", "epilogue v * b"]

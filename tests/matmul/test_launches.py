"""The launches of fused matmuls, which are bound to what their ranks agree on. Needs no GPU."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch

from graphar.matmul import fused
from graphar.matmul.fused import FusedMatmul
from graphar.matmul.operands import MatmulOperands
from graphar.numerics.epilogues.epilogue import bind
from graphar.plan.algorithms import MATMUL_ARCH, Algorithm
from graphar.plan.call import Call
from graphar.plan.policy import Chip
from graphar.plan.slices import row_slices
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import GATHERED_TILES, LAYOUTS
from graphar.plan.work import Product
from graphar.runtime import launcher

TILE, MEMBER, COUNTS = GATHERED_TILES[0], SimpleNamespace(rank=0, device=0), (16, 16)


class Bound:
    """Stands in for a runner: keeps what launches must have alike on all ranks."""

    def __init__(self):
        self.chip, self.words, self.members = Chip(132, MATMUL_ARCH), [], [MEMBER]
        self.kernels = SimpleNamespace(
            prepare_all=lambda *given: [dict.fromkeys(itertools.product(GATHERED_TILES, LAYOUTS))]
        )

    def arguments(self, member, algorithm, one, timeout_s, words):
        self.words.append(words)
        return SimpleNamespace(epilogue=SimpleNamespace(put=None))


@pytest.fixture
def engine(monkeypatch):
    """An engine of two ranks whose launches are recorded, and bound to nothing."""
    for name in ("summed_tiles", "gathered_tiles"):
        monkeypatch.setattr(fused, name, lambda *given: ([], None))
    monkeypatch.setattr(fused, "KernelLaunch", lambda *given: given)
    monkeypatch.setattr(fused, "bind_launch", lambda *given: given)
    monkeypatch.setattr(fused, "_why_not", lambda own: "")  # the operands are on the CPU
    monkeypatch.setattr(launcher, "sm_count", lambda device: 132)
    table = shipped_table("nvidia_h200")
    return SimpleNamespace(runner=Bound(), world_size=2, devices=None, table=table, deadline=lambda call: 1.0)


every_kind = pytest.mark.parametrize(
    "algorithm", [Algorithm.MATMUL_ALLREDUCE, Algorithm.ALLGATHER_MATMUL], ids=lambda one: one.value
)


@every_kind
def test_epilogues_that_differ_in_their_text_alone_share_no_launch(engine, algorithm):
    # Their code is the same, but ranks compare the text. The addresses of a rank may repeat where another's do not.
    a, w, out = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (32, 64, 32))
    forms = [bind("op", text, out, [], [2.0])[0] for text in ("v * a", "v * b", "v * a")]
    (one,) = row_slices(COUNTS, 32)

    by_call = {}  # as an engine keeps plans
    for form in forms:
        call = Call.of(Product(algorithm.op, COUNTS, 64, epilogue=form), a)
        if call not in by_call:
            by_call[call] = FusedMatmul(engine, call, algorithm, 32, TILE)
        launches = by_call[call]
        launches._launch(MEMBER, launches._place(MatmulOperands(a, w, None, out)), one)

    assert forms[0].kernel == forms[1].kernel
    assert [text.split(", ")[2] for text in engine.runner.words] == [
        f"epilogue v * a by {algorithm.value}",
        f"epilogue v * b by {algorithm.value}",
    ]


@every_kind
def test_a_weight_and_a_transposed_weight_at_its_address_share_no_launch(engine, algorithm):
    a, w, out = (torch.zeros(rows, 64, dtype=torch.bfloat16) for rows in (32, 64, 32))  # w is square
    (one,) = row_slices(COUNTS, 32)
    launches = FusedMatmul(engine, Call.of(Product(algorithm.op, COUNTS, 64), a), algorithm, 32, TILE)

    bound = [launches._launch(MEMBER, MatmulOperands(a, weight, None, out), one) for weight in (w, w.t(), w)]

    assert bound[0] is bound[2]
    assert bound[0] is not bound[1]

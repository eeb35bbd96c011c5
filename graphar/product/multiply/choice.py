"""Which of the four multiplies a call's factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from graphar.numerics.partitions import Panel
from graphar.plan.matmuls import choose_matmul
from graphar.plan.work import ALLGATHER_MATMUL, Product
from graphar.product.multiply.by_torch import ByTorch
from graphar.product.multiply.own import Leaves, Own, Scaled
from graphar.product.multiply.step import Multiply
from graphar.product.operands import MatmulOperands
from graphar.runtime import launcher
from graphar.runtime.engine import Engine


class Chosen(NamedTuple):
    """What multiplies, and why, in words that begin with its name; no words if nothing else could."""

    multiply: Multiply
    reason: str = ""

    def explained(self, matmul: MatmulOperands, panels: Sequence[Panel]) -> str:
        """Returns what multiplies one rank's operands in words, and why; no words on the CPU."""
        if not matmul.a.is_cuda:
            return ""
        if self.multiply.beyond:
            products = [matmul.out.new_empty(panel.shape) for panel in panels]
            steps = [step for pair in zip(panels, products, strict=True) for step in matmul.step.in_panel(*pair)]
            if why_not := next(filter(None, map(self.multiply.why_not, steps)), None):
                return f"{self.multiply.beyond}: {why_not}"
        return self.reason


def choose(engine: Engine, work: Product, matmul: MatmulOperands, panels: int = 1) -> Chosen:
    """Returns what multiplies one rank's operands, cut into this number of panels.

    Ranks with different K may choose differently, since they exchange only products.
    """
    cost, factors = engine.table.matmul.cost, work.factors
    if factors.as_tree:
        return Chosen(Leaves(work.leaves(engine.world_size), work.op))
    if not factors.is_plain:
        return Chosen(Scaled(factors.own), factors.multiplied_by)
    if factors.own:
        return Chosen(Own(cost, True), "graphar's matmul, which is batch invariant")
    if work.op == ALLGATHER_MATMUL or not matmul.a.is_cuda:
        return Chosen(ByTorch())
    sms = launcher.sm_count(matmul.a.device.index)
    ours, reason = choose_matmul(engine.table.matmul, len(matmul.a), len(matmul.w), matmul.a.shape[1], sms, panels)
    return Chosen(Own(cost) if ours else ByTorch(), reason)

"""graphar's matmul of 16-bit operands, with the tiles of the engine's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from graphar.errors import Reason, UnsupportedError
from graphar.plan.best_tile import ALONE, Shape, Sms, best_tile
from graphar.plan.policy import TileCost
from graphar.product import gemm
from graphar.product.multiply.by_torch import ByTorch
from graphar.product.multiply.step import Enqueue, Multiply, Step, StepOf, lacks_software
from graphar.product.tensor_maps import aligned_copy, matrix_of


@dataclass(frozen=True)
class Own(Multiply):
    """Where its kernel makes no step, torch multiplies.

    Attributes:
        cost: the costs by which it chooses tiles.
        is_invariant: whether the bits of a row may not depend on the number of rows: torch never multiplies then.
    """

    cost: TileCost
    is_invariant: bool = False

    @property
    def beyond(self) -> str:
        return "" if self.is_invariant else "torch's matmul"

    def why_not(self, step: Step) -> Reason | None:
        return lacks_software() or gemm.why_not(step.a, step.w, step.out)

    def bind(self, step: Step, sms: int) -> Enqueue:
        (m, n), k, layout = step.out.shape, step.a.shape[1], gemm.layout_of(step.w)
        tile = best_tile(ALONE[1], Shape((m,), n, k, layout), self.cost, Sms(sms))
        return gemm.bind(step.a, step.w, step.out, sms=sms, tile=tile)

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        if self.is_invariant and step.a.shape[1]:
            if not (why_not := self.why_not(placed := _aligned(step))):
                return self.bind(placed, sms)
            raise UnsupportedError(f"matmul: no batch-invariant kernel: {why_not}")
        return ByTorch().bind(step, sms)

    def repeating(self, example: Step, step_of: StepOf, sms: int) -> Callable[..., torch.Tensor]:
        multiply = ByTorch() if self.beyond and self.why_not(example) else super()
        return multiply.repeating(example, step_of, sms)


def _aligned(step: Step) -> Step:
    """Returns a step with copies of those operands that the kernel cannot load where they lie."""
    a = step.a if matrix_of(step.a) else aligned_copy(step.a)
    w = step.w if matrix_of(step.w) or matrix_of(step.w.t()) else aligned_copy(step.w)
    return step._replace(a=a, w=w)

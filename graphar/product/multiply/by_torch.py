"""torch's matmul, and on the CPU the specification."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphar.errors import Reason
from graphar.product.multiply.step import Enqueue, Multiply, Step, StepOf
from graphar.reference import products as reference


class ByTorch(Multiply):
    """Has no kernel of graphar's, and makes every step. Its bits may depend on the shape of a step."""

    def why_not(self, step: Step) -> Reason | None:
        return None

    def bind(self, step: Step, sms: int) -> Enqueue:
        return lambda stream: multiply(step.a, step.w, step.out, step.bias)

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        return self.bind(step, sms)

    def repeating(self, example: Step, step_of: StepOf, sms: int) -> Callable[..., torch.Tensor]:
        return torch.nn.functional.linear  # has the bits of torch.mm, and takes one call where views take four


def multiply_all(steps: Sequence[Step]) -> None:
    """Makes steps on the current streams; needs no current device."""
    for step in steps:
        multiply(step.a, step.w, step.out, step.bias)


def multiply(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Writes ``a @ w.T + bias`` into ``out``, which may be in fp32: then it is not rounded, and there is no bias."""
    if not a.is_cuda:
        rounded = out.dtype == a.dtype
        out.copy_(reference.linear(a, w, bias) if rounded else reference.unrounded_product(a, w))
    elif out.dtype != a.dtype:
        with torch.autocast("cuda", enabled=False):  # it would multiply in another dtype
            out.copy_(torch.mm(a, w.t(), out_dtype=out.dtype))
    elif bias is None:
        torch.mm(a, w.t(), out=out)
    else:
        torch.addmm(bias, a, w.t(), out=out)

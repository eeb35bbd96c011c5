"""graphar's matmul of e4m3 operands with fp32 scales.

Elsewhere than on sm_90a, and for operands that it cannot load, the specification multiplies:
graphar.numerics.fp8_products. An element depends on its rows and their scales alone, so cuts change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphar.errors import Reason, UnsupportedError
from graphar.numerics.fp8_products import rounded_product
from graphar.product import scaled_gemm
from graphar.product.multiply.step import Enqueue, Multiply, Step, lacks_software


@dataclass(frozen=True)
class Scaled(Multiply):
    """Makes steps with scales.

    Attributes:
        is_invariant: whether the bits of a row may not depend on the number of rows: torch's operations never compute
            the specification on a GPU then.
    """

    is_invariant: bool = False

    @property
    def beyond(self) -> str:
        return "torch's operations, as the specification of scaled products"

    def why_not(self, step: Step) -> Reason | None:
        if not step.a.shape[1]:
            return "K is 0"
        return lacks_software() or scaled_gemm.why_not(step.a, step.w, step.out)

    def bind(self, step: Step, sms: int) -> Enqueue:
        bias = None if step.bias is None else step.bias.contiguous()
        return scaled_gemm.bind(step.a, step.w, step.out, step.scales, bias, sms=sms)

    def instead(self, step: Step, sms: int, why_not: Reason) -> Enqueue:
        a, w, out, scales, bias = step
        if self.is_invariant and a.is_cuda and a.shape[1]:
            raise UnsupportedError(f"matmul: no batch-invariant kernel: {why_not}")
        return lambda stream: out.copy_(rounded_product(a, w, scales, out.dtype, bias))

"""`python -m perf fp8`: times graphar's matmul of e4m3 operands, torch._scaled_mm and graphar's bf16, on one GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.plan.tune import WEIGHTS
from graphar.product import gemm
from perf import products
from perf.harness import verify
from perf.models.decoder import normal
from perf.report import Arguments

TORCH, TORCH_BLOCKS = "torch, scales of rows", "torch, scales of blocks"
ROWS, BLOCKS, BF16 = "graphar, scales of rows", "graphar, scales of blocks", "graphar, bf16"
METHODS = (TORCH, ROWS, TORCH_BLOCKS, BLOCKS, BF16)
SHAPES: tuple[products.Shape, ...] = tuple(
    (m, n, k) for n, k in WEIGHTS for m in (*products.DECODE_ROWS, *products.MANY_ROWS[1:])
)


@dataclass(frozen=True)
class ScaledOperands(products.ProductOperands):
    """e4m3 operands with their scales.

    Attributes:
        of_rows: scales [M, 1] and [1, N].
        of_blocks: scales [M, K / BLOCK], whose columns are contiguous, and [N / BLOCK, K / BLOCK].
    """

    of_rows: tuple[Tensor, Tensor]
    of_blocks: tuple[Tensor, Tensor]

    def scales(self, method: str) -> tuple[Tensor, Tensor]:
        return self.of_blocks if method in (BLOCKS, TORCH_BLOCKS) else self.of_rows

    @cached_property
    def in_bf16(self) -> products.ProductOperands:
        """The same values and the same result."""
        return products.ProductOperands(self.a.bfloat16(), [weight.bfloat16() for weight in self.weights], self.out)


def make_operands(shape: products.Shape, device: torch.device) -> ScaledOperands:
    m, n, k = shape
    weights = [normal(1 + at, (n, k), device).to(FP8) for at in range(products.weight_count(shape, 1))]
    blocks = -(-k // BLOCK)
    shapes = ((m, 1), (1, n), (blocks, m), (-(-n // BLOCK), blocks))
    scales = [normal(100 + at, size, device).float().abs().add_(0.5).div_(k**0.25) for at, size in enumerate(shapes)]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    a = normal(0, (m, k), device).to(FP8)
    return ScaledOperands(a, weights, out, (scales[0], scales[1]), (scales[2].t(), scales[3]))


# A tensor core keeps 13 bits below the largest term that one of its instructions adds. In random data few terms are
# four times as large as others.
LOST = 2.0**-11


def scaled(method: str, operands: ScaledOperands, call: int) -> tuple[Tensor, Tensor]:
    x, w = operands.a.double(), operands.weight(call).double()
    if method == BF16:
        return x, w
    a_scale, w_scale = operands.scales(method)
    w_scale = w_scale if method in (BLOCKS, TORCH_BLOCKS) else w_scale.t()
    return x * of_elements(a_scale, x), w * of_elements(w_scale, w)


def of_elements(scale: Tensor, x: Tensor) -> Tensor:
    """Returns the scales of ``x``, of rows or of blocks, in a shape that can be multiplied by ``x``."""
    for axis, size in enumerate(x.shape):
        if scale.shape[axis] not in (1, size):
            scale = scale.repeat_interleave(BLOCK, axis).narrow(axis, 0, size)
    return scale


@dataclass
class Scaled(products.Products):
    rows: list[products.ProductRow] = field(default_factory=list)

    order: ClassVar[int] = 8
    arguments: ClassVar[Arguments] = products.run_with(
        "1x8192x7168 512x5120x8192 4096x8192x7168", "64x8192x7168 4096x8192x7168"
    )
    shapes: ClassVar = SHAPES
    columns: ClassVar = dict(zip(METHODS, ("torch", "rows", "torch, blocks", "blocks", "bf16"), strict=True))
    refusable: ClassVar = (TORCH_BLOCKS,)  # torch serves some shapes, and with some releases of CUDA
    ratios: ClassVar[dict[str, Callable[[products.Case], products.Pair]]] = {
        "rows/torch": products.pair(ROWS, TORCH),
        "blocks/torch": products.pair(BLOCKS, TORCH_BLOCKS),
        "blocks/rows": products.pair(BLOCKS, ROWS),
        "rows/bf16": products.pair(ROWS, BF16),
    }
    groups: ClassVar = {
        "few rows": f"fewer than {max(products.DECODE_ROWS)} rows",
        "more rows": f"{max(products.DECODE_ROWS)} rows or more",
    }
    heading: ClassVar[str] = "Scales of rows, scales of blocks, torch and bf16"
    subject: ClassVar[str] = "graphar's time of a matmul with scales of rows / torch's"

    @classmethod
    def operands(cls, shape: products.Shape, device: torch.device) -> ScaledOperands:
        return make_operands(shape, device)

    @classmethod
    def why_not(cls, operands: ScaledOperands) -> str | None:
        return gemm.why_not(operands.a, operands.weight(0), operands.out)

    @classmethod
    def multiply(cls, method: str, operands: ScaledOperands, call: int) -> None:
        a, weight, out = operands.a, operands.weight(call), operands.out
        a_scale, w_scale = operands.scales(method)
        if method == BF16:
            gemm.matmul(operands.in_bf16.a, operands.in_bf16.weight(call), out)
        elif method in (TORCH, TORCH_BLOCKS):
            w_scale = w_scale if method == TORCH else w_scale.t()
            torch._scaled_mm(a, weight.t(), a_scale, w_scale, out_dtype=out.dtype, out=out)
        else:
            gemm.matmul(a, weight, out, a_scale=a_scale, w_scale=w_scale)

    @classmethod
    def judge(cls, operands: ScaledOperands, call: int) -> products.IsWrong:
        """The tensor core may lose LOST of the sum of the magnitudes of an element's terms.

        Sums in fp32 and the rounding to bf16 lose less than a machine epsilon of bf16 of its value.
        """

        def is_wrong(method: str) -> Tensor:
            value, magnitude = products.exact(*scaled(method, operands, call))
            limit = LOST * magnitude + torch.finfo(operands.out.dtype).eps * value.abs()
            return verify.exceeds(operands.out, value, limit)

        return is_wrong

    @classmethod
    def group_of(cls, shape: products.Shape, case: products.Case) -> str:
        return "few rows" if shape[0] < max(products.DECODE_ROWS) else "more rows"

"""The operands of a product: of a call of a fused matmul, and of one matmul of a rank.

Whether operands have scales is known here and in gemm.py: what else a product does asks these classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from graphar.numerics.fp8_products import Scales, known_scales
from graphar.numerics.partitions import Panel, length
from graphar.plan.call import Operands
from graphar.plan.scratch import PACK_NBYTES
from graphar.plan.work import Product
from graphar.reference.products import flat


class Step(NamedTuple):
    """One matmul of a rank: ``out = a @ w.T + bias``."""

    a: torch.Tensor  # [M, K]
    w: torch.Tensor  # [N, K]
    out: torch.Tensor  # [M, N], of the dtype to which results are rounded
    scales: Scales | None = None  # of e4m3 operands
    bias: torch.Tensor | None = None  # [N], for results that are rounded

    def in_panel(self, panel: Panel, product: torch.Tensor) -> list[Step]:
        """Returns the steps, without a bias, that make a panel of the result: one for each run of adjacent rows."""
        rows, columns = _joined(panel.rows), panel.columns
        parts = zip(rows, product.split([length(piece) for piece in rows]), strict=True)
        return [self._part(piece, columns, out) for piece, out in parts if out.numel()]

    def _part(self, rows: slice, columns: slice, out: torch.Tensor) -> Step:
        of = self.scales and Scales(self.scales.format, self.scales.a[rows], self.scales.w[columns])
        return Step(self.a[rows], self.w[columns], out, of)


def _joined(parts: Sequence[slice]) -> list[slice]:
    """Returns the parts, with neighbours joined where no gap lies between them."""
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            joined[-1] = slice(joined[-1].start, part.stop)
        else:
            joined.append(part)
    return joined


@dataclass(frozen=True)
class MatmulOperands:
    """One rank's operands and results, of two dimensions, of a matmul whose products are summed or rows gathered."""

    a: torch.Tensor  # [M, K]; this rank's rows, if rows are gathered
    w: torch.Tensor  # [N, K]
    bias: torch.Tensor | None  # [N], added to the sum or product; or None
    out: torch.Tensor  # takes the result; contiguous
    gathered: torch.Tensor | None = None  # takes the rows of all ranks; None: they are not wanted, or none are gathered
    gathered_scales: torch.Tensor | None = None  # takes the scales of these rows, if they have scales
    tensors: tuple[torch.Tensor, ...] = ()  # of the epilogue, bound for the tensor that ``out`` is; or of the norm
    numbers: tuple[float, ...] = ()  # of the epilogue
    constant_weight: bool = False  # whether ``w`` may be loaded while the kernel before still runs
    given_k: int | None = None  # the K of the caller's operands, if ``a`` and ``w`` are copies with zeros in between
    scales: Scales | None = None  # of e4m3 operands; None: other operands

    @property
    def step(self) -> Step:
        """The matmul of this rank, whole."""
        return Step(self.a, self.w, self.out, self.scales, self.bias)

    @property
    def rows(self) -> tuple[torch.Tensor, ...]:
        """What other ranks need of this rank's rows: ``a``, and their scales if they have some; contiguous."""
        return (self.a.contiguous(), *([self.scales.a.contiguous()] if self.scales else []))

    def room_for_rows(self, whole: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns the destinations of :attr:`rows` of all ranks; ``whole`` is the destination of ``a``."""
        if not self.scales:
            return (whole,)
        to, of_a = self.gathered_scales, self.scales.a
        return whole, of_a.new_empty(len(self.out), of_a.shape[1]) if to is None else to

    def placed(self, **fields: Any) -> MatmulOperands:
        """Returns operands with other ``fields``: the same ones, if they have these already."""
        return self if all(getattr(self, name) is field for name, field in fields.items()) else replace(self, **fields)

    def with_columns(self) -> MatmulOperands:
        """Returns operands with columns that a kernel can load: columns of zeros if there are none."""
        if self.a.shape[1]:
            return self
        a, w = (x.new_zeros(len(x), PACK_NBYTES // x.dtype.itemsize) for x in (self.a, self.w))
        scales = self.scales
        if scales and scales.format == "blocks":  # there are none
            ones = [x.new_ones(1, 1, dtype=torch.float32).expand(len(x), 1) for x in (a, w)]
            scales = Scales("blocks", *ones)
        return replace(self, a=a, w=w, scales=scales)

    def with_features(self, features: int) -> MatmulOperands:
        """Returns operands with this number of features, all zeros, if they have none."""
        if len(self.w):
            return self
        return replace(
            self,
            w=self.w.new_zeros(features, self.w.shape[1]),
            bias=None,
            out=self.out.new_empty(len(self.out), features),
            # Zeros in place of tensors without elements, as many as a kernel reads.
            tensors=tuple([x if x.numel() else x.new_zeros(len(self.out) * features) for x in self.tensors]),
            scales=self.scales and replace(self.scales, w=self.scales.w.new_zeros(features, self.scales.w.shape[1])),
        )

    def is_copy_of(self, operands: Operands) -> bool:
        """Whether flattening ``operands`` to matrices had to copy, because of gaps between their rows."""
        flattened = [self.a, *([self.scales.a] if self.scales else [])]
        pairs = zip(flattened, operands.inputs[::2], strict=False)
        return any(x.data_ptr() != operand.data_ptr() for x, operand in pairs)


def operands_of(work: Product, operands: Operands) -> MatmulOperands:
    """Returns one rank's operands as matrices: leading dimensions are flattened."""
    a, w, *rest = operands.inputs
    a = flat(a)
    scales = known_scales(work.format, a, w, flat_scale(rest.pop(0)), rest.pop(0)) if work.format else None
    bias = rest.pop(0) if work.bias else None
    # The gathered rows, and their scales if they have some.
    gathered = [*(flat(out) for out in operands.outputs[1:] if work.gathered), None, None]
    more = tuple(rest), operands.numbers, work.constant_weight
    return MatmulOperands(a, w, bias, flat(operands.outputs[0]), gathered[0], gathered[1], *more, scales=scales)


def flat_scale(scale: torch.Tensor) -> torch.Tensor:
    """Returns the scale of an ``a`` of more dimensions as a matrix's."""
    return flat(scale) if scale.ndim > 2 else scale

"""The operands of a matmul whose products are summed over ranks, or whose rows are gathered."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.fp8_products import Scales, checked_scales
from graphar.plan.call import Call, Operands
from graphar.plan.work import Product


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
    scales: Scales | None = None  # of e4m3 operands; None: they are as they are

    def is_copy_of(self, own: Operands) -> bool:
        """Whether these are copies of the tensors ``own``, since they have more dimensions and gaps."""
        flattened = [self.a, *([self.scales.a] if self.scales else [])]
        pairs = zip(flattened, own.inputs[::2], strict=False)
        return any(x.data_ptr() != one.data_ptr() for x, one in pairs)


def operands_of(work: Product, own: Operands) -> MatmulOperands:
    """Returns one rank's operands as matrices: leading dimensions are flattened."""
    a, w, *rest = own.inputs
    a = flat(a)
    scales = checked_scales(work.op, a, w, flat_scale(rest.pop(0)), rest.pop(0)) if work.scales else None
    bias = rest.pop(0) if work.bias else None
    # The gathered rows, and their scales if they have some.
    gathered = [flat(one) for one in own.outputs[1:]] if work.gathered else []
    more = tuple(rest), own.numbers, work.constant_weight
    return MatmulOperands(a, w, bias, flat(own.outputs[0]), *[*gathered, None, None][:2], *more, scales=scales)


def with_bias_in_epilogue(call: Call[Product]) -> Call[Product]:
    """Returns the call with its bias as an epilogue of the sum, where sums take one.

    It has the same bits, half the bytes on the wire, since products stay rounded there, and one kernel.
    """
    work = call.work
    if not work.bias or work.codec or call.dtype not in TYPE_NAMES:
        return call
    epilogue = Pointwise("v + bias[col]", (call.dtype,), work.columns)
    return call._replace(work=work._replace(bias=False, epilogue=epilogue))


def flat(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as a matrix whose rows are its last dimension."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def flat_scale(scale: torch.Tensor) -> torch.Tensor:
    """Returns the scale of an ``a`` of more dimensions as that of a matrix."""
    return flat(scale) if scale.ndim > 2 else scale

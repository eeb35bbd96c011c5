"""A fused multiply-add in torch, with the bits of a GPU's fma instruction on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_BELOW_FP32, _MIDDLE = (1 << 29) - 1, 1 << 28  # the bits of fp64 that fp32 has not, and half of its last place


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Returns ``a x b + c`` of fp32 tensors, or of tensors of one element on the CPU, rounded once to fp32.

    fp64 rounded to odd keeps more than two bits beyond fp32, so the second rounding gives the bits of a single one.
    """
    product, c = a.double() * b.double(), c.double()
    total = product + c
    taken = total - product
    error = (product - (total - taken)) + (c - taken)
    bits = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    is_inexact = (error != 0) & error.isfinite()  # it is NaN beside an infinite total
    return torch.where(is_inexact & (bits & 1 == 0), bits + away, bits).view(torch.float64).float()


def fma_in_doubles(a: Tensor, b: Tensor, c: float) -> Tensor:
    """Returns :func:`fma` of fp32 numbers in fp64 tensors, in fp64, if no result is subnormal in fp32. It is faster.

    Two roundings differ from one only where the first gives the middle between two fp32 numbers.
    """
    total = (a * b).add_(c)
    middles = total.view(torch.int64).bitwise_and(_BELOW_FP32).eq_(_MIDDLE)
    return fma(a, b, torch.tensor(c)).double() if middles.any() else total.float().double()

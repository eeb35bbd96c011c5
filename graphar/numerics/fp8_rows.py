"""Values in torch.float8_e4m3fn with fp32 scales: of rows, of groups of 128 columns, of tensors.

The norms with FP8 results and layers of graphar.nn share this arithmetic, and so their bits.
"""

from __future__ import annotations

import torch

from graphar.numerics.nan import with_canonical_nan

FP8 = torch.float8_e4m3fn
GROUP_COLUMNS = 128  # `group_columns` in cuda_src/device/rms_norm.cuh
LARGEST_FP8 = 448.0
_FP8_NAN = 0x7F


def quantized(x: torch.Tensor, group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fp32 rows in FP8, and a scale for each ``group_size`` columns of a row; None: for each row."""
    groups = x.unflatten(-1, (1 if group_size is None else -1, group_size or x.shape[-1]))
    scales = scales_of(groups, (-1,))
    return to_fp8(groups, scales).flatten(-2), scales.squeeze(-1)


def scales_of(groups: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Returns the scales of fp32 values that share one along ``axes``, which stay with the length 1."""
    largest = groups.abs().amax(axes, keepdim=True)
    smallest = torch.full_like(largest, torch.finfo(torch.float32).tiny)
    # Divide by a tensor: torch may turn a division by a number into a multiplication by its inverse.
    scales = torch.maximum(largest / torch.full_like(largest, LARGEST_FP8), smallest)
    return with_canonical_nan(torch.where(largest.isfinite(), scales, torch.nan))


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns fp32 values times the inverse of their scales, in FP8."""
    scaled = x * (torch.ones_like(scale) / scale)
    codes = scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8).view(torch.uint8)  # not every version of torch saturates
    return torch.where(scaled.isnan(), _FP8_NAN, codes).view(FP8)

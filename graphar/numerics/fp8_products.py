"""Values in torch.float8_e4m3fn with fp32 scales, and their products, whose order does not depend on their shapes.

The norms with FP8 results and the layers of graphar.nn share :func:`quantized`, and so its bits.

    block     0      1      2    ...   of 128 columns of K, each added from zero
    total   0 + 0  + 1    + 2    ...   in fp32, in the order of K

:func:`scaled_linear` says what scales of rows and of blocks multiply. A tensor core of Hopper keeps about 14 bits of a
sum of 8-bit products, so no block is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphar.numerics import leaf_tree
from graphar.numerics.dtypes import with_canonical_nan
from graphar.numerics.exact_fma import fma

FP8 = torch.float8_e4m3fn
# Columns of K whose products are added from zero; and columns, and rows of ``w``, that share a scale.
# `group_columns` in cuda_src/device/rms_norm.cuh.
BLOCK = 128
STEP = 32  # columns that a wgmma instruction multiplies
LARGEST = 448.0
RESULT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Scales:
    """The fp32 scales of a product, as :func:`checked_scales` returns them: views of the caller's, with any strides."""

    format: str  # what each scale is of: "rows" or "blocks"
    a: torch.Tensor  # [M, 1] of rows; [M, K / 128] of blocks: one for 128 columns of a row
    w: torch.Tensor  # [N, 1] of rows; [N / 128, K / 128] of blocks: one for 128 columns of 128 rows


def scaled_linear(
    a: torch.Tensor,
    w: torch.Tensor,
    a_scale: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Returns ``(a * a_scale) @ (w * w_scale).T + bias`` of e4m3 operands, accumulated in fp32 and rounded once.

    K is cut in blocks of 128 columns. The last one may be shorter, as if it were padded with zeros. The products of a
    block are added in the order of K, 32 columns at a time. The sums of the blocks are added in fp32, in the order of
    K, to a total that begins as zero.

    Scales of rows multiply the total: ``(total * a_scale) * w_scale``, with a rounding to fp32 each. Scales of blocks
    multiply each block: ``total + block * (a_scale * w_scale)``, where the product of the scales is rounded, and the
    multiplication and the addition together are rounded once, as fused multiply-add does. The bias is then added in
    fp32.

    Each element depends on its row of ``a``, its row of ``w`` and their scales alone. A tensor core adds the products
    of a block with other intermediate roundings, so CPUs and GPUs may differ there. All else has the same bits on both.

    Args:
        a: [M, K], torch.float8_e4m3fn.
        w: [N, K], torch.float8_e4m3fn, as torch.nn.Linear stores it.
        a_scale: fp32, with any strides. Of rows: [M, 1], or one number. Of blocks: [M, ceil(K / 128)].
        w_scale: fp32, with any strides. Of rows: [N, 1], [1, N], or one number. Of blocks: [ceil(N / 128), ceil(K /
            128)]. Scales that could be of either format are of rows.
        bias: [N], with the dtype of the result. Not for results in fp32.
        out_dtype: the dtype of the result: torch.bfloat16, torch.float16, or torch.float32 for the sum that is not
            rounded, such as a rank's partial.

    Returns:
        A new tensor [M, N]. Every NaN is the canonical one.

    Raises:
        TypeError, ValueError: see :func:`check_operands` and :func:`checked_scales`.
    """
    check_operands("scaled_linear", a, w, bias, out_dtype)
    scales = checked_scales("scaled_linear", a, w, a_scale, w_scale)
    return rounded_product(a, w, scales, out_dtype, bias)


def rounded_product(
    a: torch.Tensor, w: torch.Tensor, scales: Scales, out_dtype: torch.dtype, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns the result of :func:`scaled_linear` for operands that have been checked."""
    total = product(a, w, scales)
    return with_canonical_nan((total if bias is None else total + bias.float()).to(out_dtype))


def rows_of_scale(a: torch.Tensor, a_scale: torch.Tensor) -> torch.Tensor:
    """Returns the scales of ``a`` [..., K] as a matrix with a row for each of its rows: [rows, 1 or blocks of K]."""
    return _of_each(a_scale, a.shape[:-1].numel()).flatten(0, -2)


def product(a: torch.Tensor, w: torch.Tensor, scales: Scales) -> torch.Tensor:
    """Returns the scaled product in fp32, before a bias: [M, N]. See :func:`scaled_linear`."""
    (m, k), n = a.shape, len(w)
    a, w = a.float(), w.float()
    total = a.new_zeros(m, n)
    for block, first in enumerate(range(0, k, BLOCK)):
        columns = slice(first, first + BLOCK)
        added = leaf_tree.product(a[:, columns], w[:, columns], STEP)
        if scales.format == "blocks":
            of_rows = scales.w[:, block].repeat_interleave(BLOCK)[:n]
            total = fma(added, scales.a[:, block, None] * of_rows, total)
        else:
            total = total + added
    return total if scales.format == "blocks" else total * scales.a * scales.w.t()


def quantized(x: torch.Tensor, group_size: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns fp32 rows in FP8, and a scale for each ``group_size`` columns of a row; None: for each row."""
    groups = x.unflatten(-1, (1 if group_size is None else -1, group_size or x.shape[-1]))
    scales = scales_of(groups, (-1,))
    return to_fp8(groups, scales).flatten(-2), scales.squeeze(-1)


def scales_of(groups: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Returns the scales of fp32 values that share one along ``axes``, which stay with the length 1."""
    largest = groups.abs().amax(axes, keepdim=True)
    # Divide by a tensor: torch may turn a division by a number into a multiplication by its inverse.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp(min=torch.finfo(torch.float32).tiny)
    return with_canonical_nan(torch.where(largest.isfinite(), scales, torch.nan))


def to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Returns fp32 values times the inverse of their scales, in FP8."""
    scaled = x * (torch.ones_like(scale) / scale)
    codes = scaled.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)  # not every version of torch saturates
    return torch.where(scaled.isnan(), 0x7F, codes).view(FP8)


def check_operands(
    op: str, a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype | None
) -> None:
    """Raises TypeError or ValueError, which name ``op``, unless operands fit together as :func:`scaled_linear` says."""
    for name, x in (("a", a), ("w", w)):
        _check_tensor(op, name, x, FP8, a)
        if x.ndim != 2:
            raise ValueError(f"{op}: {name} must have 2 dimensions, got {list(x.shape)}")
    if a.shape[1] != w.shape[1]:
        raise ValueError(f"{op}: a and w must have equally many columns, got {list(a.shape)} and {list(w.shape)}")
    if out_dtype not in RESULT_DTYPES:
        raise TypeError(f"{op}: out_dtype must be one of {RESULT_DTYPES}, got {out_dtype}")
    if bias is None:
        return
    if out_dtype == torch.float32:
        raise ValueError(f"{op}: a bias is added to rounded results only, got out_dtype=torch.float32")
    _check_tensor(op, "bias", bias, out_dtype, a)
    if bias.shape != (len(w),):
        raise ValueError(f"{op}: bias must be {[len(w)]}, got {list(bias.shape)}")


def checked_scales(op: str, a: torch.Tensor, w: torch.Tensor, a_scale: torch.Tensor, w_scale: torch.Tensor) -> Scales:
    """Returns the scales of operands that :func:`check_operands` has checked, in the format that their shapes have.

    TypeError or ValueError, which name ``op``, for other tensors, and for shapes of neither format.
    """
    _check_tensor(op, "a_scale", a_scale, torch.float32, a)
    _check_tensor(op, "w_scale", w_scale, torch.float32, a)
    (m, k), n = a.shape, len(w)
    of_rows = known_scales("rows", a, w, a_scale, w_scale)
    if [*of_rows.a.shape] == [m, 1] and [*of_rows.w.shape] == [n, 1]:
        return of_rows
    a_blocks, w_blocks = [m, -(-k // BLOCK)], [-(-n // BLOCK), -(-k // BLOCK)]
    if [*a_scale.shape] == a_blocks and [*w_scale.shape] == w_blocks:
        return Scales("blocks", a_scale, w_scale)
    raise ValueError(
        f"{op}: a_scale must be {[m, 1]} or one number and w_scale {[n, 1]}, {[1, n]} or one number, for scales of "
        f"rows; or {a_blocks} and {w_blocks}, for scales of blocks of {BLOCK}; got {list(a_scale.shape)} and "
        f"{list(w_scale.shape)}"
    )


def known_scales(format: str, a: torch.Tensor, w: torch.Tensor, a_scale: torch.Tensor, w_scale: torch.Tensor) -> Scales:
    """Returns the scales of a format that :func:`checked_scales` has found in them."""
    if format == "blocks":
        return Scales("blocks", a_scale, w_scale)
    in_rows = w_scale.t() if w_scale.shape == (1, len(w)) else w_scale
    return Scales("rows", _of_each(a_scale, len(a)), _of_each(in_rows, len(w)))


def _of_each(scale: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns the scales of rows; a single one for all is repeated."""
    return scale.reshape(1, 1).expand(rows, 1) if scale.numel() == 1 else scale


def _check_tensor(op: str, name: str, x: torch.Tensor, dtype: torch.dtype, beside: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {x.dtype}")
    if x.device != beside.device:
        raise ValueError(f"{op}: {name} must be on the device of a, {beside.device}, got {x.device}")

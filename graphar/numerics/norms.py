"""Residual addition and RMSNorm after an all-reduce or a reduce-scatter, in torch.

This is the specification of cuda_src/device/rms_norm.cuh: every torch operation is rounded to nearest. It also serves
devices without kernels.
"""

from __future__ import annotations

import torch

from graphar.numerics import fp8_products
from graphar.numerics.dtypes import fp32, with_canonical_nan
from graphar.numerics.epilogues.operations import nearest_sqrt
from graphar.numerics.fp8_products import BLOCK, FP8

# NormOutput in cuda_src/device/rms_norm.cuh
NORM_OUTPUTS = ("like_input", "static_fp8", "dynamic_fp8", "grouped_fp8")
ALLREDUCE_NORM, REDUCESCATTER_NORM = "allreduce_residual_rmsnorm", "reducescatter_residual_rmsnorm"
# The op and the output by the name under which kernels are prepared.
PREPARED = {
    op if output == "like_input" else f"{op}_{output}": (op, output)
    for op in (ALLREDUCE_NORM, REDUCESCATTER_NORM)
    for output in NORM_OUTPUTS
}
PACK_NBYTES = 16  # a thread adds the numbers of one pack at a time
SLOTS = 1024  # `norm_slots` in cuda_src/device/rms_norm.cuh


def output_of(
    op: str, dtype: torch.dtype, columns: int, out_dtype: object, scale: object, group_size: object = None
) -> str:
    """Returns the one of NORM_OUTPUTS that a call computes for an input of ``dtype`` with ``columns``.

    ValueError, which names ``op``, if ``out_dtype`` is neither FP8 nor ``dtype``; if ``scale`` or ``group_size`` is
    given without FP8, or both are given; or if ``group_size`` is not BLOCK, or does not divide the columns.
    """
    if out_dtype != FP8:
        if out_dtype not in (None, dtype):
            raise ValueError(f"{op}: out_dtype must be {FP8}, or the dtype of x, {dtype}, got {out_dtype}")
        for name, value in (("scale", scale), ("group_size", group_size)):
            if value is not None:
                raise ValueError(f"{op}: {name} is for out_dtype={FP8}, got {out_dtype}")
        return "like_input"
    if group_size is None:
        return "dynamic_fp8" if scale is None else "static_fp8"
    if scale is not None:
        raise ValueError(f"{op}: takes scale or group_size, not both")
    if group_size != BLOCK or columns % BLOCK:
        raise ValueError(
            f"{op}: group_size must be None or {BLOCK}, and divide the columns of x, {columns}, got {group_size!r}"
        )
    return "grouped_fp8"


def scales_of(output: str, columns: int) -> int:
    """Returns how many scales a row of ``columns`` has as a result."""
    return {"dynamic_fp8": 1, "grouped_fp8": columns // BLOCK}.get(output, 0)


def specification(
    total: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    output: str = "like_input",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """Returns the exact bits that the kernels give: (normed, summed), and the scales of :func:`scales_of`.

    summed is ``total + residual``, rounded once to the dtype of ``residual``. normed is
    (summed / sqrt(mean(summed**2) + eps)) * (weight + weight_offset) of each row, in fp32, rounded once. Every NaN is
    the canonical one. FP8 is defined in :func:`graphar.reference.allreduce_residual_rmsnorm`.

    Args:
        total: [..., columns]: the sum over the ranks, rounded to the dtype of ``residual`` or still in fp32.
        residual: [..., columns], bf16, fp16 or fp32.
        weight: [columns], of the dtype of ``residual``.
        output: the format of normed, one of NORM_OUTPUTS.
        scale: for "static_fp8" one fp32 number; else None.
    """
    summed = (total.float() + residual.float()).to(residual.dtype)
    rows = summed.float()
    # + 0.0, since ops take an offset of -0.0 for 0.0.
    normed = (rows * inverse_rms(rows, residual.element_size(), eps)) * (weight.float() + fp32(weight_offset + 0.0))
    summed = with_canonical_nan(summed)
    if output == "like_input":
        return with_canonical_nan(normed.to(residual.dtype)), summed
    if scale is not None:
        return fp8_products.to_fp8(normed, scale.view(())), summed
    quantized, scales = fp8_products.quantized(normed, BLOCK if output == "grouped_fp8" else None)
    return quantized, summed, scales


def inverse_rms(rows: torch.Tensor, itemsize: int, eps: float) -> torch.Tensor:
    """Returns 1 / sqrt(mean square + eps) of each fp32 row: [..., 1]. ``itemsize`` is the kernel's tensors'."""
    mean = mean_in_slots(rows * rows, itemsize)
    return torch.ones_like(mean) / nearest_sqrt(mean + fp32(eps))


def mean_in_slots(rows: torch.Tensor, itemsize: int) -> torch.Tensor:
    """Returns the mean of each fp32 row: [..., 1]. Kernels add in this order: packs into slots, then slots in pairs."""
    columns, pack = rows.shape[-1], PACK_NBYTES // itemsize
    padded = -(-columns // (SLOTS * pack)) * SLOTS * pack
    slots = torch.nn.functional.pad(rows, (0, padded - columns)).unflatten(-1, (-1, SLOTS, pack))
    total = torch.zeros_like(slots[..., 0, :, 0])
    for turn in range(slots.shape[-3]):
        for element in range(pack):
            total = total + slots[..., turn, :, element]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    # Divide by a tensor: torch may turn a division by a number into a multiplication by its inverse.
    return total / torch.full_like(total, columns)

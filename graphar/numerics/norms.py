"""What follows an all-reduce in a transformer: the residual added, and the root-mean-square norm of each row.

The specification of cuda_src/device/rms_norm.cuh in torch's operations, each of which is rounded to nearest: what runs
where there is no kernel, and what gradients are taken of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphar.numerics.epilogues.code import nearest_sqrt
from graphar.numerics.nan import with_canonical_nan
from graphar.plan.algorithms import PACK_NBYTES, Algorithm
from graphar.runtime.catalogue import NORM_OUTPUTS, KernelSource, kernel_source

OP = Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT.op
OPS = {output: OP if output == "like_input" else f"{OP}_{output}" for output in NORM_OUTPUTS}
SLOTS = 1024  # `slots` in cuda_src/device/rms_norm.cuh
FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
_FP8_NAN = 0x7F


@dataclass(frozen=True)
class RmsNorm:
    """In the place of an epilogue's form: which kernel norms, and what it is told of the tensor beside its operands.

    Attributes:
        columns: of the tensor.
        cluster: the blocks that share a row.
        output: what the normed rows are, of NORM_OUTPUTS.
    """

    columns: int
    cluster: int = 1
    output: str = "like_input"

    @property
    def text(self) -> str:
        return "add_and_norm" if self.output == "like_input" else f"add_and_norm, {self.output}"

    @property
    def kernel(self) -> str:
        return f"{self.cluster}, {self.output}"

    def source(self, algorithm: str, dtype: torch.dtype, world_size: int, variant: str | None) -> KernelSource:
        return kernel_source(algorithm, dtype, world_size, self.kernel)


def output_of(dtype: torch.dtype, out_dtype: object, scale: object) -> str:
    """Which of NORM_OUTPUTS a call with an input of ``dtype`` asks for."""
    if out_dtype == FP8:
        return "dynamic_fp8" if scale is None else "static_fp8"
    if out_dtype not in (None, dtype):
        raise ValueError(f"{OP}: out_dtype must be {FP8}, or the dtype of x, {dtype}, got {out_dtype}")
    if scale is not None:
        raise ValueError(f"{OP}: scale is for out_dtype={FP8}, got {out_dtype}")
    return "like_input"


def specification(
    total: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
    output: str = "like_input",
    scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """:func:`add_and_norm` to the bit: a NaN is its dtype's canonical one. Has no gradient.

    FP8 is as :func:`graphar.reference.allreduce_residual_rmsnorm` has it.

    Args:
        output: of NORM_OUTPUTS.
        scale: for "static_fp8": one element, fp32.
    """
    normed, summed = _add_and_norm(total, residual, weight, eps, weight_offset)
    summed = with_canonical_nan(summed)
    if output == "like_input":
        return with_canonical_nan(normed.to(total.dtype)), summed
    if output == "static_fp8":
        return _to_fp8(normed, scale.view(())), summed
    scales = _scales_of_rows(normed)
    return _to_fp8(normed, scales), summed, scales


def _to_fp8(normed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    scaled = normed * (torch.ones_like(scale) / scale)
    codes = scaled.clamp(-LARGEST_FP8, LARGEST_FP8).to(FP8).view(torch.uint8)  # not every torch saturates
    return torch.where(scaled.isnan(), _FP8_NAN, codes).view(FP8)


def _scales_of_rows(normed: torch.Tensor) -> torch.Tensor:
    largest = normed.abs().amax(-1, keepdim=True)
    smallest = torch.full_like(largest, torch.finfo(torch.float32).tiny)
    scales = torch.maximum(largest / torch.full_like(largest, LARGEST_FP8), smallest)
    return with_canonical_nan(torch.where(largest.isfinite(), scales, torch.nan))


def add_and_norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``total + residual``, normed by rows and as it is: (normed, summed), both of the dtype of ``total``.

    normed is (summed / sqrt(mean(summed**2) + eps)) * (weight + weight_offset), in fp32, rounded once.

    Args:
        total: [..., columns], bf16, fp16 or fp32.
        residual: like ``total``.
        weight: [columns], of the same dtype.
    """
    normed, summed = _add_and_norm(total, residual, weight, eps, weight_offset)
    return normed.to(total.dtype), summed


def _add_and_norm(
    total: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with the normed rows in fp32."""
    summed = (total.float() + residual.float()).to(total.dtype)
    rows = summed.float()
    squares = _sum_of_squares(rows, PACK_NBYTES // total.element_size())
    # A tensor divided by a number is multiplied by that one's inverse in places.
    mean = squares / torch.full_like(squares, rows.shape[-1])
    inverse = torch.ones_like(mean) / nearest_sqrt(mean + _fp32(eps))
    return (rows * inverse.unsqueeze(-1)) * (weight.float() + _fp32(weight_offset)), summed


def _sum_of_squares(rows: torch.Tensor, pack: int) -> torch.Tensor:
    """Of the last dimension, in the kernels' order: pack by pack into slots, which are then added in pairs."""
    columns = rows.shape[-1]
    padded = -(-columns // (SLOTS * pack)) * SLOTS * pack
    squares = torch.nn.functional.pad(rows * rows, (0, padded - columns)).unflatten(-1, (-1, SLOTS, pack))
    total = torch.zeros_like(squares[..., 0, :, 0])
    for turn in range(squares.shape[-3]):
        for element in range(pack):
            total = total + squares[..., turn, :, element]
    while total.shape[-1] > 1:
        total = total[..., 0::2] + total[..., 1::2]
    return total[..., 0]


def _fp32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()

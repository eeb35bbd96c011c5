"""What follows an all-reduce in a transformer: the residual added, and the root-mean-square norm of each row.

The specification of cuda_src/device/rms_norm.cuh in torch's operations, each of which is rounded to nearest: what runs
where there is no kernel, and what gradients are taken of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphar.algorithms import PACK_NBYTES
from graphar.canonical import with_canonical_nan
from graphar.epilogues.code import nearest_sqrt
from graphar.kernels import KernelSource, kernel_source

SLOTS = 1024  # `slots` in cuda_src/device/rms_norm.cuh


@dataclass(frozen=True)
class RmsNorm:
    """In the place of an epilogue's form: which kernel norms, and what it is told of the tensor beside its operands.

    Attributes:
        columns: of the tensor.
        cluster: the blocks that share a row.
    """

    columns: int
    cluster: int = 1
    text = "add_and_norm"

    @property
    def kernel(self) -> str:
        return str(self.cluster)

    def source(self, algorithm: str, dtype: torch.dtype, world_size: int, variant: str | None) -> KernelSource:
        return kernel_source(algorithm, dtype, world_size, self.kernel)


def specification(*arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`add_and_norm` to the bit: a NaN is its dtype's canonical one. Has no gradient."""
    normed, summed = add_and_norm(*arguments)
    return with_canonical_nan(normed), with_canonical_nan(summed)


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
    summed = (total.float() + residual.float()).to(total.dtype)
    rows = summed.float()
    squares = _sum_of_squares(rows, PACK_NBYTES // total.element_size())
    # A tensor divided by a number is multiplied by that one's inverse in places.
    mean = squares / torch.full_like(squares, rows.shape[-1])
    inverse = torch.ones_like(mean) / nearest_sqrt(mean + _fp32(eps))
    normed = (rows * inverse.unsqueeze(-1)) * (weight.float() + _fp32(weight_offset))
    return normed.to(total.dtype), summed


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

"""Operands of matmuls on the host, as the simulations in programs/one_matmul*.cu take them."""

from __future__ import annotations

import torch


def aligned_rows(values: torch.Tensor) -> torch.Tensor:
    """The rows, padded with NaN to a multiple of 16 bytes as the kernels require."""
    (rows, columns), unit = values.shape, 16 // values.dtype.itemsize
    padded = torch.full((rows, -(-columns // unit) * unit), float("nan"), dtype=values.dtype)
    padded[:, :columns] = values
    return padded.view(-1)


def packed(sizes: list[int], a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, layout: str) -> torch.Tensor:
    """The bytes of the ``sizes`` and of the operands: A [M, K], W [N, K] and bias [1, N]."""
    parts = [aligned_rows(x).view(torch.uint8) for x in (a, w if layout == "by_rows" else w.t(), bias)]
    return torch.cat([torch.tensor(sizes).view(torch.uint8), *parts])


def wrong_elements(result: torch.Tensor, expected: torch.Tensor) -> int:
    """How many elements differ from ``expected``. ``result`` is a tensor of bytes."""
    return int((result.view(expected.dtype).view(expected.shape) != expected).sum())

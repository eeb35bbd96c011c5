"""How many elements of a result are wrong."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

import graphar.reference
from perf.ranks import Data, Ranks, tensors

# The gathered inputs and their fp32 copies stay near a gigabyte on 8 ranks, whatever the size of the result.
WINDOW_NUMEL = 1 << 24

SAME_SIZE_INTEGER = {2: torch.int16, 4: torch.int32}


def count_wrong(data: Data, result: Data, exact: bool, ranks: Ranks) -> int:
    """Elements of this process's results that differ from what the method promises, given every rank's data.

    An exact method promises the specification's bits. The others round at every hop and promise to come near.
    """
    wrong = 0
    for window in windows(tensors(data)[0].numel()):
        parts = ranks.gather(data, window)
        expected = graphar.reference.allreduce(parts)
        for output in tensors(result):
            bad = differs(output[window], expected) if exact else is_far(output[window], expected, parts)
            wrong += int(bad.sum())
    return wrong


def windows(numel: int) -> Iterator[slice]:
    for start in range(0, numel, WINDOW_NUMEL):
        yield slice(start, min(start + WINDOW_NUMEL, numel))


def differs(output: Tensor, expected: Tensor) -> Tensor:
    """Where the bits differ."""
    kind = SAME_SIZE_INTEGER[output.dtype.itemsize]
    return output.view(kind) != expected.view(kind)


def tolerance(dtype: torch.dtype) -> float:
    """How far a method that rounds at every hop may be off, as a share of the sum of magnitudes: 2^-6 for bfloat16."""
    return 2 * torch.finfo(dtype).eps


def is_far(output: Tensor, expected: Tensor, parts: list[Tensor]) -> Tensor:
    """Where the error exceeds the tolerance. A NaN is within no bound."""
    magnitude = torch.zeros_like(expected, dtype=torch.float32)
    for part in parts:
        magnitude += part.float().abs_()
    error = (output.float() - expected.float()).abs_()
    return ~(error <= magnitude.mul_(tolerance(output.dtype)))

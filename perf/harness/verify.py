"""How many elements of a result are wrong."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

import graphar.reference
from graphar.numerics.codecs import Codec
from perf.harness.ranks import Data, Ranks, tensors
from perf.peers.methods import Method

# The gathered inputs and their fp32 copies stay near a gigabyte on 8 ranks, whatever the size of the result.
WINDOW_NUMEL = 1 << 24

SAME_SIZE_INTEGER = {2: torch.int16, 4: torch.int32}

# FP8 (e4m3) has three bits behind the point, so rounding an element moves it by up to 2^-4 of itself. A quantised
# two-shot does that twice, to the data and to their sum, and rounds to the tensor's dtype: 2^-3 and a little of the sum
# of magnitudes. What lies below e4m3's normal numbers keeps an error of 2^-10 on a scale where the largest of its group
# is 448, about 2^-19 of that one; over 8 ranks and their sum, less than 2^-15 of the largest sum of magnitudes.
FP8_SHARE = 2.0**-3 + 2.0**-6
FP8_FLOOR = 2.0**-15


def count_wrong(data: Data, result: Data, ranks: Ranks, method: Method, steps: int = 1) -> int:
    """Elements of this process's results that differ from what the method promises, given every rank's data.

    An exact method promises the specification's bits. The others round at every hop and promise to come near.

    Args:
        steps: how many all-reduces there were in a row, each of the results of the one before.
    """
    wrong = 0
    for window in windows(tensors(data)[0].numel()):
        parts = ranks.gather(data, window)
        expected = reference(parts, steps, method.codec)
        for output in tensors(result):
            if method.exact:
                bad = differs(output[window], expected)
            else:
                bad = is_far(output[window], expected, parts, quantised=method.quantised, steps=steps)
            wrong += int(bad.sum())
    return wrong


def windows(numel: int) -> Iterator[slice]:
    for start in range(0, numel, WINDOW_NUMEL):
        yield slice(start, min(start + WINDOW_NUMEL, numel))


def reference(parts: list[Tensor], steps: int, codec: Codec | None = None) -> Tensor:
    specification = graphar.reference.allreduce
    if codec:  # a window is a multiple of what a codec takes together
        specification = partial(graphar.reference.quantized_allreduce, codec=codec)
    total = specification(parts)
    for _ in range(steps - 1):
        total = specification([total] * len(parts))
    return total


def differs(output: Tensor, expected: Tensor) -> Tensor:
    """Where the bits differ."""
    kind = SAME_SIZE_INTEGER[output.dtype.itemsize]
    return output.view(kind) != expected.view(kind)


def tolerance(dtype: torch.dtype) -> float:
    """How far a method that rounds at every hop may be off, as a share of the sum of magnitudes: 2^-6 for bfloat16.

    Of random data, sums by a ring of 8 ranks were off by up to 1.8 machine epsilons of it, and of 2 ranks by 0.5.
    """
    return 2 * torch.finfo(dtype).eps


def drift(world_size: int) -> float:
    """How many times as far off sums in place may be, where 20 and more follow one another and the ranks' are equal.

    Rounding at every hop makes N times a number off, and the next sum begins with that. It ends at numbers that a sum
    does not change. Rings were off by up to 1.3 machine epsilons of the sum of magnitudes after 20 sums of 4 ranks, 2.9
    of 8, and 6.1 of 7.
    """
    return {2: 1.0, 4: 1.0, 8: 2.0}.get(world_size, 4.0)


def is_far(output: Tensor, expected: Tensor, parts: list[Tensor], *, quantised: bool = False, steps: int = 1) -> Tensor:
    """Where the error exceeds the tolerance. A NaN is within no bound."""
    magnitude = torch.zeros_like(expected, dtype=torch.float32)
    for part in parts:
        magnitude += part.float().abs_()
    error = (output.float() - expected.float()).abs_()
    share, floor = (FP8_SHARE, FP8_FLOOR) if quantised else (tolerance(output.dtype), 0.0)
    bound = magnitude * share + magnitude.max() * floor
    growth = float(len(parts)) ** (steps - 1)  # of the first step's error; each later one adds as much of its own
    bound = bound.double() * (growth * steps)  # of many steps, which float32 cannot hold
    far = ~(error <= bound)
    # Many float16 sums in a row leave its range, and rounding decides in which step.
    return far if steps == 1 else far & (expected.double().abs() + bound < torch.finfo(output.dtype).max)

"""Counts the wrong elements of a result, and compares the logits of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import graphar.reference
from graphar.numerics.codecs import Codec
from perf.harness.ranks import Data, Ranks, tensors
from perf.peers.methods import Method

# Results are compared in windows of this many elements. Gathered inputs of 8 ranks then take about a gigabyte.
WINDOW_NUMEL = 1 << 24
TOKENS_AT_ONCE = 1024  # logits are compared for this many tokens at a time

SAME_SIZE_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32}

# FP8 (e4m3) has three mantissa bits, so rounding changes an element by up to 2^-4 of itself. A quantised two-shot
# rounds the data and their sum, and then to the tensor's dtype: the error is 2^-3 and a little of the sum of
# magnitudes. Below e4m3's normal numbers the error is up to 2^-10 on a scale where the largest element of the group is
# 448, which is about 2^-19 of that element. Over 8 ranks and their sum this is less than 2^-15 of the largest sum of
# magnitudes.
FP8_SHARE = 2.0**-3 + 2.0**-6
FP8_FLOOR = 2.0**-15

# The allowed error of a token's logits after one layer of a model in bfloat16, relative to their Euclidean norm. Each
# product, sum and norm rounds its values to 2^-9. Errors of several layers are independent, so the bound grows with the
# square root of the number of layers.
LOGITS_TOLERANCE = 2.0**-6


class WithResult(Protocol):
    result: Tensor  # of the last call


def again(trial: WithResult, launch: Callable[[], None], ranks: Ranks) -> Tensor:
    """Runs a trial's timed launch once more, and returns its ``result``. Collective."""
    trial.result.fill_(torch.nan)
    launch()
    ranks.barrier()
    return trial.result


def count_wrong(data: Data, result: Data, ranks: Ranks, method: Method, steps: int = 1) -> int:
    """Returns how many elements of this process's results differ from what the method promises.

    An exact method promises the bits of graphar.reference. The others round at every hop, and promise a bounded error.

    Args:
        data: this rank's input.
        steps: the number of chained all-reduces. Each reads the result of the previous one.
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
    if codec:  # a window is a multiple of a codec's tile
        specification = partial(graphar.reference.quantized_allreduce, codec=codec)
    total = specification(parts)
    for _ in range(steps - 1):
        total = specification([total] * len(parts))
    return total


def differs(output: Tensor, expected: Tensor) -> Tensor:
    """Returns a mask of the elements whose bits differ."""
    kind = SAME_SIZE_INTEGER[output.dtype.itemsize]
    return output.view(kind) != expected.view(kind)


def exceeds(output: Tensor, expected: Tensor, limit: Tensor) -> Tensor:
    """Returns a mask of the elements whose error exceeds the limit or is NaN."""
    return ~((output.double() - expected.double()).abs() <= limit)


def count_differing(results: Sequence[Tensor], expected: Sequence[Tensor]) -> int:
    """Returns how many elements of several results do not have the expected bits."""
    return sum(int(differs(*pair).sum()) for pair in zip(results, expected, strict=True))


def count_far(results: Sequence[Tensor], expected: Sequence[Tensor], limits: Sequence[Tensor]) -> int:
    """Returns how many elements of several results have an error that exceeds their limit or is NaN."""
    return sum(int(exceeds(*of_result).sum()) for of_result in zip(results, expected, limits, strict=True))


def logit_errors(logits: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each token's relative error of logits, and whether its bits differ from rank 0's. Collective."""
    error = (logits.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    firsts = logits.clone()
    dist.broadcast(firsts.view(torch.uint8), 0)  # sent as bytes: not every backend supports every dtype
    return error, differs(logits, firsts).any(-1)


def compare_logits(hidden: Tensor, expected: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    """Returns :func:`logit_errors` of ``found @ head.T`` and ``expected @ head.T``. Collective."""
    windows = zip(hidden.split(TOKENS_AT_ONCE), expected.split(TOKENS_AT_ONCE), strict=True)
    of_windows = [logit_errors(mine @ head.t(), theirs @ head.t()) for mine, theirs in windows]
    errors, apart = zip(*of_windows, strict=True)
    return torch.cat(errors), torch.cat(apart)


def tolerance(dtype: torch.dtype) -> float:
    """Returns the allowed error of a method that rounds at every hop, relative to the sum of magnitudes.

    It is two machine epsilons: 2^-6 for bfloat16. With random data, the errors of a ring were at most 1.8 machine
    epsilons of the sum of magnitudes on 8 ranks, and 0.5 on 2 ranks.
    """
    return 2 * torch.finfo(dtype).eps


def drift(world_size: int) -> float:
    """Returns a factor for :func:`tolerance` after 20 or more chained in-place sums of equal inputs on all ranks.

    A method that rounds at every hop does not compute N times a number exactly, and each sum starts from the error of
    the previous one. The errors stop growing once sums no longer change them. After 20 sums the errors of rings were at
    most 1.3 machine epsilons of the sum of magnitudes on 4 ranks, 2.9 on 8, and 6.1 on 7.
    """
    return {2: 1.0, 4: 1.0, 8: 2.0}.get(world_size, 4.0)


def is_far(output: Tensor, expected: Tensor, parts: list[Tensor], *, quantised: bool = False, steps: int = 1) -> Tensor:
    """Returns a mask of the elements whose error exceeds the tolerance or is NaN."""
    magnitude = torch.zeros_like(expected, dtype=torch.float32)
    for part in parts:
        magnitude += part.float().abs_()
    error = (output.float() - expected.float()).abs_()
    share, floor = (FP8_SHARE, FP8_FLOOR) if quantised else (tolerance(output.dtype), 0.0)
    bound = magnitude * share + magnitude.max() * floor
    # The first step's error grows with each sum. Each later step adds an error of the same size.
    growth = float(len(parts)) ** (steps - 1)
    bound = bound.double() * (growth * steps)  # float32 would overflow after many steps
    far = ~(error <= bound)
    # Many chained sums overflow float16, and rounding decides in which step.
    return far if steps == 1 else far & (expected.double().abs() + bound < torch.finfo(output.dtype).max)

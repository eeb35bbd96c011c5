"""The expected time of an all-reduce, interpolated between the measurements in a tuning table."""

from __future__ import annotations

import math
from bisect import bisect_left

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.plan.entries import serving
from graphar.plan.tables import Table


def expected_us(table: Table, world_size: int, nbytes: int) -> float | None:
    """Returns the expected microseconds of the exact all-reduce that the table chooses; None without measurements."""
    return _between(serving(table, world_size).measured.get(world_size, []), nbytes)


def expected_quantized_us(table: Table, codec: Codec, world_size: int, numel: int) -> float | None:
    """Returns the expected microseconds of an all-reduce of ``numel`` elements with ``codec``.

    The estimate goes by the measured codec with the nearest bits per element, among codecs that use the same kernels.
    None if no such codec was measured.
    """
    measured = serving(table, world_size).codecs.get(world_size, {}).items()
    codecs = [(codec_of_text(text), points) for text, points in measured]
    alike = [(other, points) for other, points in codecs if other.spares_a_word == codec.spares_a_word]
    if not alike:
        return None
    _, points = min(alike, key=lambda pair: abs(pair[0].bits_per_element - codec.bits_per_element))
    return _between(points, numel * torch.bfloat16.itemsize)


def _between(points: list[list], nbytes: int) -> float | None:
    """Returns the time for a size, by a power law between the two nearest measured sizes.

    Smaller sizes take the time of the smallest. Larger sizes take the bytes per microsecond of the largest.
    """
    if not points:
        return None
    at = bisect_left(points, nbytes, key=lambda point: point[0])
    if at == 0:
        return points[0][1]
    (low, low_us), (high, high_us) = points[at - 1], points[min(at, len(points) - 1)]
    if at == len(points):
        return high_us * nbytes / high
    return low_us * (nbytes / low) ** (math.log(high_us / low_us) / math.log(high / low))

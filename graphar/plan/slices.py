"""Splits a call into kernel launches: several if the ranks' parts are larger than the algorithm's scratch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from graphar.numerics.dtypes import BYTE
from graphar.numerics.norms import REDUCESCATTER_NORM
from graphar.plan.algorithms import GATHERING, Algorithm
from graphar.plan.scratch import COPY_UNIT_NBYTES, PACK_NBYTES
from graphar.plan.work import PLAIN, Factors

_ROWS_OF_TILES = 256  # a multiple of the height of every tile, and of every cluster of tiles


@dataclass(frozen=True)
class Slice:
    """The range of a tensor that one launch of a call handles.

    What only moves data counts in bytes, and a fused matmul in rows of the result, with ``numel`` 0.
    """

    numel: int  # elements of the whole tensor
    begin: tuple[int, ...] = ()  # the element at which each rank's part begins; empty if the op has no parts
    count: tuple[int, ...] = ()  # how many elements of each part this launch handles
    offset: int = 0  # how many elements of each part earlier launches handle


def slices(
    algorithm: Algorithm, world_size: int, counts: Sequence[int], itemsize: int, columns: int = 1
) -> list[Slice]:
    """Returns the launches of a call; ``columns`` are its norm's.

    ``counts`` are the elements of each rank's part, not all zero; for an op without parts, the tensor's.
    """
    row = algorithm.row
    if len(counts) == 1:
        return [Slice(counts[0])]
    if BYTE in row.dtypes:
        counts = [count * itemsize for count in counts]
    step = max(counts)
    if row.fills_slots:
        unit = columns if row.op == REDUCESCATTER_NORM else 1  # no launch splits a row of a norm
        step = row.scratch(world_size).capacity * PACK_NBYTES // (itemsize * unit) * unit
    begin = tuple(accumulate(counts, initial=0))[:-1]
    return [Slice(sum(counts), begin, _up_to(step, counts, offset), offset) for offset in range(0, max(counts), step)]


def row_slices(counts: Sequence[int], step: int) -> list[Slice]:
    """Returns the launches of a fused matmul: at most ``step`` rows of each rank's part of the result at a time.

    ``begin`` of a launch is the first row that the launch writes, and not the first row of the part.
    """
    begins = tuple(accumulate(counts, initial=0))[:-1]
    return [
        Slice(0, tuple(begin + offset for begin in begins), _up_to(step, counts, offset), offset)
        for offset in range(0, max(counts), step)
    ]


def copied_chunks(
    counts: Sequence[int], itemsize: int, place_nbytes: int, least_nbytes: int, chunks: int
) -> list[Slice]:
    """Returns the chunks in which ranks' parts travel by copy engines: ``chunks`` of them, or more.

    A chunk has at least ``least_nbytes`` of the largest part, and at most a place of the scratch. Its ``begin`` is the
    element of the tensor at which each rank's part of the chunk begins.
    """
    even = -(-max(counts) * itemsize // (chunks * COPY_UNIT_NBYTES)) * COPY_UNIT_NBYTES
    return row_slices(counts, min(place_nbytes, max(least_nbytes, even)) // itemsize)


def _up_to(step: int, counts: Sequence[int], offset: int) -> tuple[int, ...]:
    """Returns how many elements of each part lie past ``offset``, at most ``step``."""
    return tuple(min(max(count - offset, 0), step) for count in counts)


def gathered_rows_a_launch(world_size: int, k: int, factors: Factors = PLAIN) -> int:
    """Returns how many rows of each rank one launch of an all-gather + matmul handles; rows have ``k`` elements."""
    rows = GATHERING.row.scratch(world_size).capacity * PACK_NBYTES // factors.row_nbytes(k)
    return rows // _ROWS_OF_TILES * _ROWS_OF_TILES or rows

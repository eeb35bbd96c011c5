"""Partitions of a fused matmul: the result is cut into panels. Each panel is multiplied, and then summed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

# "auto", by graphar's matmul kernels alone: a row of the result has the same bits for every number of rows.
BATCH_INVARIANT = "batch_invariant"
# The sum of products as a tree of leaves of K: the same bits on 1, 2, 4 and 8 ranks (numerics.leaf_tree).
TP_INVARIANT = "tp_invariant"
Partition = Literal["auto", "split_m", "split_n", "tiles", "none", "batch_invariant", "tp_invariant"]
PARTITIONS = get_args(Partition)
_COUNT = 4  # default number of panels
_WIDTH = 8  # 16-bit elements in 16 bytes: kernels need rows that begin at a multiple of 16 bytes


@dataclass(frozen=True)
class Panel:
    """A part of C = A W^T that is multiplied and summed as one."""

    # Slices of the rows of A and C, in the order in which the panel holds them. A reduce-scatter has one slice of each
    # rank's rows, in rank order. An all-reduce has a single slice.
    rows: tuple[slice, ...]
    columns: slice  # the columns of C, which are the rows of W

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the panel."""
        return sum(map(length, self.rows)), length(self.columns)


def length(part: slice) -> int:
    """Returns how many indices a slice with both ends covers."""
    return part.stop - part.start


def panels(op: str, partition: str, count: int | None, parts: Sequence[int], columns: int) -> list[Panel]:
    """Returns the panels of C = A W^T, in the order of the calls that sum them. Errors name ``op``.

    Args:
        partition: "split_m" cuts the rows of A, and "split_n" the rows of W. All others make one panel.
        count: how many panels. None: at most 4.
        parts: rows of A, in parts that are cut alike: the rows of each rank for a reduce-scatter, all rows as one part
            for an all-reduce.
    """
    _check(op, partition, count)
    rows = tuple(slice(sum(parts[:at]), sum(parts[: at + 1])) for at in range(len(parts)))
    if partition not in ("split_m", "split_n"):
        return [Panel(rows, slice(0, columns))]
    lengths, what = (parts, "rows") if partition == "split_m" else ([columns], "columns")
    count = count or max(1, min(_COUNT, *lengths))
    if count > max(1, *lengths):
        raise ValueError(f"{op}: {partition} cannot make {count} partitions of {max(lengths)} {what}")
    if partition == "split_n":
        return [Panel(rows, part) for part in _cut(slice(0, columns), count, _WIDTH)]
    return [Panel(cut, slice(0, columns)) for cut in zip(*(_cut(part, count, 1) for part in rows), strict=True)]


def in_backward(partition: str) -> str:
    """Returns the partition of the fused op in a backward pass: reduce-scatters and all-gathers share only some."""
    return partition if partition in ("tiles", "none", TP_INVARIANT) else "auto"


def _cut(whole: slice, count: int, unit: int) -> list[slice]:
    """Returns ``count`` adjacent slices of equal length; the last slice also takes the remainder.

    The length is a multiple of ``unit`` if it is at least ``unit``.
    """
    step = length(whole) // count
    step -= step % unit if step >= unit else 0
    ends = [whole.start + step * at for at in range(count)] + [whole.stop]
    return [slice(*pair) for pair in itertools.pairwise(ends)]


def _check(op: str, partition: object, count: object) -> None:
    if partition not in PARTITIONS:
        raise ValueError(f"{op}: partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    if count is None:
        return
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{op}: num_partitions must be an int, got {type(count).__name__}")
    if count < 1:
        raise ValueError(f"{op}: num_partitions must be 1 or more, got {count}")
    if partition in ("auto", "tiles", BATCH_INVARIANT, TP_INVARIANT) or (partition == "none" and count > 1):
        raise ValueError(f"{op}: num_partitions goes with split_m or split_n, got {count} with {partition!r}")


def split(length: int, world_size: int) -> list[int]:
    """Returns the lengths of torch.tensor_split's parts: they differ by at most one, and the first ones are longer."""
    return [(length - rank + world_size - 1) // world_size for rank in range(world_size)]


def split_units(length: int, world_size: int, unit: int) -> list[int]:
    """Returns the lengths of parts of whole units, but for the end of the last one, split as equally as possible."""
    ends = [min(end * unit, length) for end in itertools.accumulate(split(-(-length // unit), world_size), initial=0)]
    return [end - begin for begin, end in itertools.pairwise(ends)]

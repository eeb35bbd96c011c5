"""Partitions of a matmul's result: panels, each of which is multiplied, and summed over the ranks, as one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

PARTITIONS = ("auto", "split_m", "split_n", "tiles", "none")
_COUNT = 4  # where the caller does not say
_WIDTH = 8  # elements of 16 bits in 16 bytes, at multiples of which rows that kernels take begin


@dataclass(frozen=True)
class Panel:
    """A part of C = A W^T.

    Attributes:
        rows: of A and C, which follow each other in the panel: for a reduce-scatter some of every rank's, in rank
            order, and otherwise one slice.
        columns: of C, the rows of W.
    """

    rows: tuple[slice, ...]
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(length, self.rows)), length(self.columns)


def length(part: slice) -> int:
    return part.stop - part.start


def panels(op: str, partition: str, count: int | None, parts: Sequence[int], columns: int) -> list[Panel]:
    """The panels of C, in the order of the calls that sum them.

    Args:
        op: for errors.
        partition: "split_m" cuts the rows of A, "split_n" those of W; the others make one panel.
        count: how many panels; None: as many as is good.
        parts: the rows of A, in parts of which each is cut alike: for a reduce-scatter the ranks' own.
        columns: of C.

    Raises:
        TypeError, ValueError: no such partition, or less than one panel, or more than there is to cut.
    """
    _check(op, partition, count)
    begins = [sum(parts[:at]) for at in range(len(parts))]
    if partition == "split_m":
        count = count or max(1, min(_COUNT, *parts))
        _check_room(op, "split_m", count, max(parts), "rows")
        by_part = [_cut(begin, rows, count, 1) for begin, rows in zip(begins, parts, strict=True)]
        return [Panel(rows, slice(0, columns)) for rows in zip(*by_part, strict=True)]
    rows = tuple(slice(begin, begin + rows) for begin, rows in zip(begins, parts, strict=True))
    if partition == "split_n":
        count = count or max(1, min(_COUNT, columns))
        _check_room(op, "split_n", count, columns, "columns")
        return [Panel(rows, part) for part in _cut(0, columns, count, _WIDTH)]
    return [Panel(rows, slice(0, columns))]


def _cut(begin: int, total: int, count: int, unit: int) -> list[slice]:
    """``count`` slices of one length, a multiple of ``unit`` if it reaches that; the last one takes the remainder."""
    step = total // count
    step -= step % unit if step >= unit else 0
    ends = [begin + step * at for at in range(count)] + [begin + total]
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
    if partition in ("auto", "tiles") or (partition == "none" and count > 1):
        raise ValueError(f"{op}: num_partitions goes with split_m or split_n, got {count} with {partition!r}")


def _check_room(op: str, partition: str, count: int, room: int, what: str) -> None:
    if count > max(room, 1):
        raise ValueError(f"{op}: {partition} cannot make {count} partitions of {room} {what}")

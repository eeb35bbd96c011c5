"""Compares the times of two runs on one machine, and finds regressions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.machine import slug
from perf.md import plural
from perf.report import Report, Timing, read

SLOWER = 1.03


@dataclass(frozen=True)
class Comparison:
    """The regressions of a run.

    Attributes:
        compared: the number of rows that both runs have with correct results.
        regressions: a message for each row of graphar's that has become slower.
        slower_peers: the number of peers' rows that have become slower. If it is large, the machine has changed.
    """

    compared: int
    regressions: list[str]
    slower_peers: int

    def __str__(self) -> str:
        listed = "\n".join(f"- {line}" for line in self.regressions)
        head = f"{len(self.regressions)} of {self.compared} rows are regressions of graphar's" if listed else ""
        head = head or f"No regression of graphar's in {self.compared} rows"
        peers = f" (and {self.slower_peers} rows of peers are slower)" if self.slower_peers else ""
        return f"{head}{peers}{':' if listed else '.'}\n{listed}".strip()


def times_of(folder: Path, topic: type[Report], machine: dict[str, object]) -> list[Timing]:
    """Returns the times of an earlier run.

    Raises:
        OSError, ValueError: there are no times, or they were measured on another machine.
    """
    written = read(folder, topic)
    before, now = (what["cpu"] if not what["gpu"] else slug(what) for what in (written.machine, machine))
    if before != now:
        raise ValueError(f"{folder} is of another machine: {before}, and this is {now}")
    return written.report.timed()


def compare(before: Sequence[Timing], now: Sequence[Timing]) -> Comparison:
    """Finds the rows that have become slower. Rows with a wrong result in either run are left out.

    A row is slower if its time is more than 3 % longer and its 10th percentile exceeds the earlier run's 90th
    percentile (the 99th where that was recorded).
    """
    older = {identity(row): row for row in before if not row.wrong}
    pairs = [(older[identity(row)], row) for row in now if identity(row) in older and not row.wrong]
    slower = [(old, new) for old, new in pairs if _is_slower(old, new)]
    of_graphar = [pair for pair in slower if pair[1].is_own]
    return Comparison(len(pairs), [_in_words(*pair) for pair in of_graphar], len(slower) - len(of_graphar))


def identity(row: Timing) -> tuple[str, ...]:
    """Returns what is the same for a measurement in both runs."""
    return row.method, plural(row.world_size, "rank"), *row.what


def _is_slower(old: Timing, new: Timing) -> bool:
    low, high = min(new.time_us.values()), max(old.time_us.values())
    return new.median > SLOWER * old.median and low > high


def _in_words(old: Timing, new: Timing) -> str:
    times = f"{new.median:.4g} us, before {old.median:.4g} us ({new.median / old.median - 1:+.1%})"
    return f"{', '.join(filter(None, identity(new)))}: {times}"

"""Compares the times of two runs: finds regressions on one machine, or compares two folders of reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from perf.charts import Axis, Mark, Rows
from perf.machine import one_line, slug
from perf.md import NOT_SERVED, number, table
from perf.ratios import geometric_mean, group
from perf.report import Report, Section, StoredReport, Timed, read, read_all

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
        found = "\n".join(f"- {line}" for line in self.regressions)
        head = f"{len(self.regressions)} of {self.compared} rows are regressions of graphar's" if found else ""
        head = head or f"No regression of graphar's in {self.compared} rows"
        peers = f" (and {self.slower_peers} rows of peers are slower)" if self.slower_peers else ""
        return f"{head}{peers}{':' if found else '.'}\n{found}".strip()


def times_of(folder: Path, topic: type[Report], machine: dict[str, object]) -> list[Timed]:
    """Returns the times of an earlier run.

    Raises:
        OSError, ValueError: there are no times, or they were measured on another machine.
    """
    written = read(folder, topic)
    before, now = (what["cpu"] if not what["gpu"] else slug(what) for what in (written.machine, machine))
    if before != now:
        raise ValueError(f"{folder} is of another machine: {before}, and this is {now}")
    return written.report.timed()


def compare(before: Sequence[Timed], now: Sequence[Timed]) -> Comparison:
    """Finds the rows that have become slower. Rows with a wrong result in either run are left out.

    A row is slower if its time is more than 3 % longer and its 10th percentile exceeds the earlier run's 90th
    percentile (the 99th where that was recorded).
    """
    pairs = pair(before, now)
    slower = [(old, new) for old, new in pairs if _is_slower(old, new)]
    own = [pair for pair in slower if pair[1].is_own]
    return Comparison(len(pairs), [_in_words(*pair) for pair in own], len(slower) - len(own))


def pair(before: Sequence[Timed], now: Sequence[Timed]) -> list[tuple[Timed, Timed]]:
    """Returns the rows that both runs have with correct results."""
    older = {one.identity: one for one in before if not one.wrong}
    return [(older[one.identity], one) for one in now if one.identity in older and not one.wrong]


def _is_slower(old: Timed, new: Timed) -> bool:
    if old.high is None or new.low is None:
        return False
    return new.time_us > SLOWER * old.time_us and new.low > old.high


def _in_words(old: Timed, new: Timed) -> str:
    times = f"{new.time_us:.4g} us, before {old.time_us:.4g} us ({new.time_us / old.time_us - 1:+.1%})"
    return f"{', '.join(new.identity)}: {times}"


# ---- two folders ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pair:
    """The reports of two folders on one topic. The folders may be of different machines."""

    first: StoredReport
    second: StoredReport

    def section(self) -> Section:
        """Returns second time / first time of each common row, with a summary and a chart by method."""
        pairs = pair(self.first.report.timed(), self.second.report.timed())
        title = self.first.report.title
        if not pairs:
            return Section(title, ["No rows in common."])
        by_method = group(pairs, lambda one: one[1].identity[0])
        lines = []
        for method, mine in by_method.items():
            ratios = [new.time_us / old.time_us for old, new in mine]
            cells = (geometric_mean(ratios), min(ratios), max(ratios))
            lines.append([method, str(len(mine)), *(f"{cell:.2f}" for cell in cells)])
        summary = table(["method", "rows", "geometric mean", "minimum", "maximum"], lines)
        every = [
            [", ".join(filter(None, new.identity)), number(old.time_us), number(new.time_us), _ratio(old, new)]
            for old, new in pairs
        ]
        rows = table(["row", "first (us)", "second (us)", "second / first"], every)
        marks = [
            Mark(method, "second / first", new.time_us / old.time_us)
            for method, mine in by_method.items()
            for old, new in mine
        ]
        chart = Rows("Time / time in the first folder", marks, Axis("second / first", form="{:.2f}".format), 1.0)
        return Section(title, [summary, rows], [chart])


def _ratio(old: Timed, new: Timed) -> str:
    return f"{new.time_us / old.time_us:.2f}" if old.time_us else NOT_SERVED


def pairs_of(first: Path, second: Path) -> list[Pair]:
    """Returns the topics that both folders have.

    Raises:
        OSError, ValueError: a folder cannot be read, or the folders have no topic in common.
    """
    by_name = {one.report.name: one for one in read_all(first)}
    found = [Pair(by_name[one.report.name], one) for one in read_all(second) if one.report.name in by_name]
    if not found:
        raise ValueError(f"{first} and {second} have no topic in common")
    return found


def machines_of(pairs: Sequence[Pair]) -> tuple[str, str]:
    """Returns a description of each folder's machine."""
    return one_line(pairs[0].first.machine), one_line(pairs[0].second.machine)

"""Markdown of reports: tables and their cells."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from perf.ratios import best_peer, ratio

NOT_SERVED = "-"


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table. The first column is aligned left, and the others right. Wrong results are bold."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def text_beside(*modules: str) -> str:
    """Returns the text of the Markdown file beside the last module.

    ``{NAME}`` in it stands for a global of one of ``modules``.
    """
    known = {name: value for module in modules for name, value in vars(sys.modules[module]).items()}
    return Path(sys.modules[modules[-1]].__file__).with_suffix(".md").read_text().strip().format_map(known)


def columns(rows: Iterable, cells: Mapping[str, Callable[..., object]]) -> str:
    """Returns a table with a line for each row. ``cells`` has its columns: a title, and what a row's cell is."""
    return table(list(cells), [[str(cell(row)) for cell in cells.values()] for row in rows])


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def number(value: float | None) -> str:
    """Returns a number with three significant digits."""
    if value is None:
        return NOT_SERVED
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def rate(value: float) -> str:
    """Returns GB/s with one decimal, and rates below 1 with two significant digits."""
    return f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def method_cell(row) -> str:
    """Returns the name of a row's method, marked if its result is wrong."""
    return row.method + (f" **({row.wrong} WRONG)**" if row.wrong else "")


def name_cell(row) -> str:
    """Returns the name of a row's method; "-" without a row."""
    return row.method if row else NOT_SERVED


def time_cell(row) -> str:
    """Returns a row's time in microseconds, marked if its result is wrong."""
    if row is None:
        return NOT_SERVED
    return f"{number(row.median)} **({row.wrong} WRONG)**" if row.wrong else number(row.median)


def ratio_cell(value: float | None) -> str:
    return NOT_SERVED if value is None else f"{value:.2f}"


def method_table(first: str, cases: Mapping[str, Mapping[str, object]]) -> str:
    """Returns a table with a row for each case: times by method, the best peer, and graphar's ratio to it."""
    peers = {case: best_peer(rows.values()) for case, rows in cases.items()}
    more = {
        "best peer": lambda case: name_cell(peers[case]),
        "of_best_peer": lambda case: ratio_cell(ratio(cases[case].get("graphar"), peers[case])),
    }
    return time_table(first, cases, more)


def time_table(first: str, cases: Mapping[str, Mapping], more: Mapping[str, Callable] | None = None) -> str:
    """Returns a table of microseconds with a row for each case and a column for each method.

    ``more`` has further columns: a title, and what a case's cell is.
    """
    methods = dict.fromkeys(name for rows in cases.values() for name in rows)
    times = {f"{name} (us)": lambda case, name=name: time_cell(cases[case].get(name)) for name in methods}
    return columns(cases, {first: str, **times, **(more or {})})


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"

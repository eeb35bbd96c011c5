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
    methods = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    lines = []
    for case, rows in cases.items():
        peer = best_peer(rows.values())
        cells = [time_cell(rows.get(name)) for name in methods]
        compared = ratio_cell(ratio(rows.get("graphar"), peer))
        lines.append([case, *cells, name_cell(peer), compared])
    return table([first, *(f"{name} (us)" for name in methods), "best peer", "of_best_peer"], lines)


def time_table(first: str, cases: Mapping[str, Mapping[str, object]]) -> str:
    """Returns a table of microseconds with a row for each case and a column for each method."""
    methods = list(dict.fromkeys(name for rows in cases.values() for name in rows))
    lines = [[case, *(time_cell(rows.get(name)) for name in methods)] for case, rows in cases.items()]
    return table([first, *(f"{name} (us)" for name in methods)], lines)


def plural(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"

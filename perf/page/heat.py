"""Heat maps as inline SVG: how much of something each cell has, by the strength of its colour."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from perf.page.svg import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, figure

NAME_WIDTH, NAME_HEIGHT = 56, 16  # what a column's and a row's name need, or only some are written
KEY_WIDTH = 14


@dataclass(frozen=True)
class HeatMap:
    """Attributes:
    columns, rows: their names, from left to right and from top to bottom.
    cells: by row, of each column a share from 0 to 1; None: not known.
    across, down: what columns and rows are.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[str]
    cells: Sequence[Sequence[float | None]]
    across: str
    down: str
    note: str = ""


def render(plot: HeatMap) -> str:
    """A <figure>, as perf.page.svg makes of a plot."""
    inside = "".join([*_cells(plot), *_names(plot), *_key()])
    return figure(plot.title, f'<g class="heat">{inside}</g>', plot.note)


def _cells(plot: HeatMap) -> Iterator[str]:
    width, height = (RIGHT - LEFT) / len(plot.columns), (BOTTOM - TOP) / len(plot.rows)
    for down, (row, shares) in enumerate(zip(plot.rows, plot.cells, strict=True)):
        for across, (column, share) in enumerate(zip(plot.columns, shares, strict=True)):
            if share is not None:
                place = f'x="{LEFT + across * width:.1f}" y="{TOP + down * height:.1f}"'
                hint = f"<title>{escape(plot.down)} {escape(row)}, {escape(column)}: {share:.1%}</title>"
                yield _cell(place, width - 1, height - 1, share, hint)


def _cell(place: str, width: float, height: float, share: float, inside: str = "") -> str:
    strength = min(max(share, 0.0), 1.0)
    return f'<rect {place} width="{width:.1f}" height="{height:.1f}" fill-opacity="{strength:.3f}">{inside}</rect>'


def _names(plot: HeatMap) -> Iterator[str]:
    width, height = (RIGHT - LEFT) / len(plot.columns), (BOTTOM - TOP) / len(plot.rows)
    for at in range(0, len(plot.columns), math.ceil(NAME_WIDTH / width)):
        place = f'x="{LEFT + (at + 0.5) * width:.1f}" y="{BOTTOM + 17}"'
        yield f'<text class="tick" {place} text-anchor="middle">{escape(plot.columns[at])}</text>'
    for at in range(0, len(plot.rows), math.ceil(NAME_HEIGHT / height)):
        place = f'x="{LEFT - 6}" y="{TOP + (at + 0.5) * height + 4:.1f}"'
        yield f'<text class="tick" {place} text-anchor="end">{escape(plot.rows[at])}</text>'
    yield f'<text class="axis" x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(plot.across)}</text>'
    yield f'<text class="axis" x="4" y="{TOP - 14}">{escape(plot.down)}</text>'


def _key() -> Iterator[str]:
    """What the colours stand for, above the cells on the right."""
    begin = RIGHT - 44 - 5 * KEY_WIDTH
    yield f'<text class="tick" x="{begin - 5}" y="{TOP - 14}" text-anchor="end">0 %</text>'
    for at in range(5):
        yield _cell(f'x="{begin + at * KEY_WIDTH}" y="{TOP - 24}"', KEY_WIDTH, 11, at / 4)
    yield f'<text class="tick" x="{begin + 5 * KEY_WIDTH + 4}" y="{TOP - 14}">100 %</text>'

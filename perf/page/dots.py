"""Dots in rows as inline SVG: a figure of each of several things, by each of several ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from perf.page.plot import Axis, Line, Scale, scale
from perf.page.svg import RIGHT, figure, key

LEFT, TOP, FOOT = 200, 20, 44  # of the area that dots are drawn in; below it
PITCH, LEAST = 22, 150  # of a row; of all of them
RADIUS = 4.5


@dataclass(frozen=True)
class Dot:
    """Attributes:
    row, way: of those of the figure.
    hint: what is shown where the pointer rests on it.
    """

    row: str
    way: str
    value: float
    hint: str
    wrong: bool = False


@dataclass(frozen=True)
class Dots:
    """Attributes:
    ways: their names and classes of style.css.
    rule: a vertical line, and its name.
    """

    title: str
    ways: Sequence[tuple[str, str]]
    dots: Sequence[Dot]
    x: Axis
    rule: tuple[float, str] | None = None
    note: str = ""


def render(plot: Dots) -> str:
    """A <figure>, as perf.page.svg makes of a plot; nothing of no dots."""
    if not plot.dots:
        return ""
    rows = list(dict.fromkeys(dot.row for dot in plot.dots))
    values = [dot.value for dot in plot.dots] + ([plot.rule[0]] if plot.rule else [])
    x = scale(plot.x, values, LEFT, RIGHT)
    pitch = max(PITCH, LEAST // len(rows))
    middles = {row: TOP + (at + 0.5) * pitch for at, row in enumerate(rows)}
    bottom = TOP + pitch * len(rows)
    inside = "".join([*_frame(plot, middles, x, bottom), *_dots(plot, middles, x)])
    keys = "".join(key(Line(name, (), f"dot {style}")) for name, style in plot.ways)
    return figure(plot.title, inside, plot.note, keys, bottom + FOOT)


def _frame(plot: Dots, middles: Mapping[str, float], x: Scale, bottom: int) -> Iterator[str]:
    for value in x.ticks():
        at = x(value)
        yield f'<path class="grid" d="M{at} {TOP}V{bottom}"/>'
        yield f'<text class="tick" x="{at}" y="{bottom + 17}" text-anchor="middle">{escape(plot.x.form(value))}</text>'
    for row, y in middles.items():
        yield f'<path class="grid" d="M{LEFT} {y}H{RIGHT}"/>'
        yield f'<text class="tick" x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(row)}</text>'
    if plot.rule:
        at = x(plot.rule[0])
        yield f'<path class="rule" d="M{at} {TOP - 4}V{bottom}"/>'
        yield f'<text class="tick" x="{at}" y="{TOP - 8}" text-anchor="middle">{escape(plot.rule[1])}</text>'
    yield f'<text class="axis" x="{RIGHT}" y="{bottom + FOOT - 6}" text-anchor="end">{escape(plot.x.label)}</text>'


def _dots(plot: Dots, middles: Mapping[str, float], x: Scale) -> Iterator[str]:
    """Those of one way together, the first on top."""
    for way, style in reversed(plot.ways):
        yield f'<g class="line dot {style}">'
        for dot in (dot for dot in plot.dots if dot.way == way):
            wrong = ' class="wrong"' if dot.wrong else ""
            place = f'cx="{x(dot.value)}" cy="{middles[dot.row]}"'
            yield f'<circle{wrong} {place} r="{RADIUS}"><title>{escape(dot.hint)}</title></circle>'
        yield "</g>"

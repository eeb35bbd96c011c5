"""Stacked bars as inline SVG: what each of several takes, part beside part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from perf.page.plot import Line
from perf.page.svg import HEIGHT, RIGHT, figure, key

LEFT, TOP, ROOM = 4, 4, 18  # from the edges, and what the text above a bar needs
THICKEST = 24


@dataclass(frozen=True)
class Bar:
    """Attributes:
    text: what is written above it.
    lengths: of its parts, from left to right.
    wrong: whether what it shows was; then the text is red.
    """

    text: str
    lengths: Sequence[float]
    wrong: bool = False


@dataclass(frozen=True)
class Bars:
    """Attributes:
    parts: of each bar, their names and classes of style.css.
    """

    title: str
    parts: Sequence[tuple[str, str]]
    bars: Sequence[Bar]
    note: str = ""


def render(plot: Bars) -> str:
    """A <figure>, as perf.page.svg makes of a plot."""
    keys = "".join(key(Line(name, (), style)) for name, style in plot.parts)
    return figure(plot.title, "".join([*_texts(plot), *_parts(plot)]), plot.note, keys)


def _texts(plot: Bars) -> Iterator[str]:
    for at, bar in enumerate(plot.bars):
        wrong = ' class="wrong"' if bar.wrong else ""
        yield f'<text{wrong} x="{LEFT}" y="{TOP + at * _height(plot) + 13:.1f}">{escape(bar.text)}</text>'


def _parts(plot: Bars) -> Iterator[str]:
    """Those of one name, of all bars, together."""
    scale = (RIGHT - LEFT) / max(sum(bar.lengths) for bar in plot.bars)
    thickness = min(_height(plot) - ROOM - 4, THICKEST)
    for part, (_, style) in enumerate(plot.parts):
        yield f'<g class="line {style}">'
        for at, bar in enumerate(plot.bars):
            begin, width = sum(bar.lengths[:part]) * scale, bar.lengths[part] * scale
            place = f'x="{LEFT + begin:.1f}" y="{TOP + at * _height(plot) + ROOM:.1f}"'
            yield f'<rect class="bar" {place} width="{width:.1f}" height="{thickness:.1f}"/>'
        yield "</g>"


def _height(plot: Bars) -> float:
    """Of a bar with its text."""
    return (HEIGHT - TOP) / len(plot.bars)

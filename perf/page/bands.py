"""Timelines as inline SVG: what each of several did when, a lane beside another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from perf.page.plot import Axis, Line, Scale, scale
from perf.page.svg import LEFT, RIGHT, figure, key

HEIGHT, TOP, BOTTOM = 480, 28, 436  # of the figure, and of the area that bands are drawn in
GAP = 6  # between bands
THICKNESS = 0.85  # of a span, as a share of its lane


@dataclass(frozen=True)
class Span:
    """Attributes:
    part: which of the parts it is.
    hint: what is shown where the pointer rests on it.
    """

    begin: float
    length: float
    part: str
    hint: str


@dataclass(frozen=True)
class Band:
    """Attributes:
    lanes: from top to bottom, the spans of each.
    """

    name: str
    lanes: Sequence[Sequence[Span]]


@dataclass(frozen=True)
class Bands:
    """Attributes:
    parts: their names and classes of style.css.
    down: what bands are.
    """

    title: str
    parts: Sequence[tuple[str, str]]
    bands: Sequence[Band]
    x: Axis
    down: str
    note: str = ""


def render(plot: Bands) -> str:
    """A <figure>, as perf.page.svg makes of a plot."""
    ends = [span.begin + span.length for band in plot.bands for lane in band.lanes for span in lane]
    x = scale(plot.x, [0.0, max(ends)], LEFT, RIGHT)
    keys = "".join(key(Line(name, (), f"span {style}")) for name, style in plot.parts)
    inside = "".join([*_frame(plot, x), *_spans(plot, x)])
    return figure(plot.title, inside, plot.note, keys, HEIGHT)


def _frame(plot: Bands, x: Scale) -> Iterator[str]:
    for value in x.ticks():
        at = x(value)
        yield f'<path class="grid" d="M{at} {TOP}V{BOTTOM}"/>'
        yield f'<text class="tick" x="{at}" y="{BOTTOM + 17}" text-anchor="middle">{escape(plot.x.form(value))}</text>'
    for at, band in enumerate(plot.bands):
        middle = TOP + (at + 0.5) * _pitch(plot)
        yield f'<text class="tick" x="{LEFT - 6}" y="{middle + 4:.1f}" text-anchor="end">{escape(band.name)}</text>'
    yield f'<text class="axis" x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(plot.x.label)}</text>'
    yield f'<text class="axis" x="4" y="{TOP - 12}">{escape(plot.down)}</text>'


def _spans(plot: Bands, x: Scale) -> Iterator[str]:
    """Those of one part, of all lanes, together."""
    height = (_pitch(plot) - GAP) / max(len(band.lanes) for band in plot.bands)
    for part, style in plot.parts:
        yield f'<g class="line span {style}" stroke-width="{height * THICKNESS:.1f}">'
        for at, band in enumerate(plot.bands):
            for down, lane in enumerate(band.lanes):
                y = TOP + at * _pitch(plot) + GAP / 2 + (down + 0.5) * height
                yield from (_span(span, x, y) for span in lane if span.part == part)
        yield "</g>"


def _span(span: Span, x: Scale, y: float) -> str:
    begin, end = x(span.begin), x(span.begin + span.length)
    return f'<path d="M{begin:g} {y:.1f}H{end:g}"><title>{escape(span.hint)}</title></path>'


def _pitch(plot: Bands) -> float:
    """From a band to the next."""
    return (BOTTOM - TOP) / len(plot.bands)

"""Plots as inline SVG. Colours are classes of style.css, so that a plot follows the page from light to dark."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape

from perf.page.plot import Axis, Line, Plot, Scale, scale

PER_POINT = ("points", "band", "hints", "captions")  # of Line
WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 466, 34, 256  # of the area that lines are drawn in
LABELS = 380  # what RIGHT is where lines have labels at their ends
LABEL_HEIGHT = 16


def render(plot: Plot) -> str:
    """A <figure>: its title, the SVG, and the names of its lines; nothing where no line has a point."""
    lines = [line for line in (drawable(line, plot) for line in plot.lines) if line.points]
    if not lines:
        return ""
    rules = [(value, name) for value, name in plot.rules if is_drawable(value, plot.y)]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [y for y, _ in rules] + list(plot.shade or ())
    ys += [end for line in lines for ends in line.band for end in ends]
    labelled = [line for line in lines if line.label]
    x, y = scale(plot.x, xs, LEFT, LABELS if labelled else RIGHT), scale(plot.y, ys, BOTTOM, TOP)
    inside = [
        *frame(x, y),
        *marks(rules, plot.shade, x, y),
        *(draw(line, x, y) for line in reversed(lines)),
        *names(rules, y),
        *labels(labelled, x, y),
    ]  # the first on top
    keys = "".join(key(line) for line in lines if not line.label) if len(lines) > 1 else ""
    return figure(plot.title, "".join(inside), plot.note, keys)


def figure(title: str, inside: str, note: str, keys: str = "", height: int = HEIGHT) -> str:
    """A plot's, around what its SVG has inside."""
    note = f"<p>{escape(note)}</p>" if note else ""
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg class="plot" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f'{inside}</svg><ul class="key">{keys}</ul>{note}</figure>\n'
    )


def drawable(line: Line, plot: Plot) -> Line:
    """The line without points that have no place, such as the infinite loss of a training that failed."""
    kept = [at for at, (a, b) in enumerate(line.points) if is_drawable(a, plot.x) and is_drawable(b, plot.y)]
    parts = {name: [of_it[at] for at in kept] for name in PER_POINT if (of_it := getattr(line, name))}
    wrong = frozenset(now for now, before in enumerate(kept) if before in line.wrong)
    return replace(line, **parts, wrong=wrong)


def is_drawable(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.log)


def key(line: Line) -> str:
    swatch = '<svg viewBox="0 0 24 8" aria-hidden="true"><path class="stroke" d="M0 4H24"/></svg>'
    return f'<li class="line {line.style}">{swatch}{escape(line.name)}</li>'


def frame(x: Scale, y: Scale) -> Iterator[str]:
    """The grid, what its lines stand for, and the axes' labels."""
    for value in x.ticks():
        at = x(value)
        yield f'<path class="grid" d="M{at} {TOP}V{BOTTOM}"/>'
        yield f'<text class="tick" x="{at}" y="{BOTTOM + 17}" text-anchor="middle">{escape(x.axis.form(value))}</text>'
    for value in y.ticks():
        at = y(value)
        yield f'<path class="grid" d="M{LEFT} {at}H{x.end:g}"/>'
        yield f'<text class="tick" x="{LEFT - 6}" y="{at + 4}" text-anchor="end">{escape(y.axis.form(value))}</text>'
    yield f'<text class="axis" x="{RIGHT}" y="{HEIGHT - 6}" text-anchor="end">{escape(x.axis.label)}</text>'
    yield f'<text class="axis" x="4" y="{TOP - 14}">{escape(y.axis.label)}</text>'


def marks(rules: Sequence[tuple[float, str]], shade: tuple[float, float] | None, x: Scale, y: Scale) -> Iterator[str]:
    if shade:
        low, high = (y(value) for value in shade)
        yield f'<rect class="shade" x="{LEFT}" y="{high}" width="{x.end - LEFT:g}" height="{round(low - high, 1)}"/>'
    for value, _ in rules:
        at = y(value)
        yield f'<path class="rule" d="M{LEFT} {at}H{x.end:g}"/>'


def names(rules: Sequence[tuple[float, str]], y: Scale) -> Iterator[str]:
    """Of the rules, above all lines."""
    for value, name in rules:
        yield f'<text class="tick over" x="{LEFT + 4}" y="{y(value) - 5}">{escape(name)}</text>'


def draw(line: Line, x: Scale, y: Scale) -> str:
    places = [(x(a), y(b)) for a, b in line.points]
    parts = [f'<g class="line {line.style}">']
    if line.band:
        there = [f"{a} {y(high)}" for (a, _), (_, high) in zip(places, line.band, strict=True)]
        back = [f"{a} {y(low)}" for (a, _), (low, _) in zip(places, line.band, strict=True)]
        parts.append(f'<path class="band" d="M{"L".join(there + back[::-1])}Z"/>')
    parts.append(f'<path class="stroke" d="M{"L".join(f"{a} {b}" for a, b in places)}"/>')
    for at, (a, b) in enumerate(places if not line.label else ()):
        hint = f"<title>{escape(line.name)}, {escape(line.hints[at])}</title>" if line.hints else ""
        wrong = ' class="wrong"' if at in line.wrong else ""
        parts.append(f'<circle{wrong} cx="{a}" cy="{b}" r="{4 if wrong else 2.5}">{hint}</circle>')
        if line.captions:
            beside = round(b + (16 if at % 2 else -9), 1)  # in turn below and above, since neighbours are near
            caption = escape(line.captions[at])
            parts.append(f'<text class="tick" x="{a}" y="{beside}" text-anchor="middle">{caption}</text>')
    return "".join(parts) + "</g>"


def labels(lines: Sequence[Line], x: Scale, y: Scale) -> Iterator[str]:
    """The names of lines beside their ends, in the order of those, none over another, and a stroke from each to its."""
    ends = sorted(((y(line.points[-1][1]), x(line.points[-1][0]), line) for line in lines), key=lambda end: end[0])
    lowest = BOTTOM - LABEL_HEIGHT * (len(ends) - 1)
    at = TOP - LABEL_HEIGHT
    for order, (end, begin, line) in enumerate(ends):
        at = round(max(at + LABEL_HEIGHT, min(end, lowest + LABEL_HEIGHT * order)), 1)
        yield (
            f'<g class="line {line.style}"><path class="leader" d="M{begin} {end}L{LABELS + 12} {at}"/>'
            f'<text class="label" x="{LABELS + 15}" y="{at + 4:g}">{escape(line.label)}</text></g>'
        )

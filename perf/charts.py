"""Charts, drawn by Matplotlib as SVG: they stand in a page, so that it needs neither network nor scripts."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from graphar.plan.sizes import format_nbytes

WIDTH, HEIGHT = 6.4, 3.6  # inches
ROW = 0.3  # the height of a row in charts of rows
WRONG = "#c81e1e"


@dataclass(frozen=True)
class Line:
    """A line of a plot. Its points are ordered from left to right.

    Attributes:
        band: the lower and upper bound at each point; empty if there is no band.
        wrong: the indices of points with wrong results. They are drawn red.
    """

    name: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()
    wrong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Axis:
    """An axis of a chart.

    Attributes:
        base: the base of a logarithmic scale, 10 or 2; 0 for a linear scale.
        form: formats the value of a tick.
    """

    label: str
    base: int = 0
    form: Callable[[float], str] = "{:g}".format


SIZE = Axis("size of one rank's tensor", 2, lambda nbytes: format_nbytes(round(nbytes)))
TIME = Axis("time (us)", 10)
OF_BEST_PEER = Axis("time / best peer's time", form="{:.2f}".format)


@dataclass(frozen=True)
class Plot:
    """A line plot. The first line is drawn bold.

    Attributes:
        rule: the value of a horizontal reference line; None for no line.
    """

    title: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    rule: float | None = None
    note: str = ""


@dataclass(frozen=True)
class Mark:
    """A dot in a row of a chart. ``name`` is its series'; each series has a colour."""

    row: str
    name: str
    value: float


@dataclass(frozen=True)
class Rows:
    """A chart of dots with a row for each name.

    Attributes:
        rule: the value of a vertical reference line; None for no line.
    """

    title: str
    marks: Sequence[Mark]
    x: Axis
    rule: float | None = None
    note: str = ""


Figure = Plot | Rows


def render(figure: Figure | None) -> str:
    """Returns a <figure> with title, SVG and note. Returns an empty string if there is nothing to draw."""
    drawn = svg(figure)
    if not drawn:
        return ""
    note = f"<p>{escape(figure.note)}</p>" if figure.note else ""
    return f"<figure><figcaption>{escape(figure.title)}</figcaption>{drawn}{note}</figure>\n"


def svg(figure: Figure | None) -> str:
    """Returns the chart as SVG; an empty string if there is nothing to draw."""
    from matplotlib import figure as matplotlib_figure
    from matplotlib import rc_context

    if isinstance(figure, Plot):
        figure = replace(figure, lines=[drawn for line in figure.lines if (drawn := _drawable(line, figure)).points])
    if figure is None or not (figure.lines if isinstance(figure, Plot) else figure.marks):
        return ""
    # Text stays text, and ids do not change from run to run.
    settings = {"svg.fonttype": "none", "svg.hashsalt": "graphar", "font.sans-serif": ["DejaVu Sans"], "font.size": 9}
    with rc_context(settings):
        drawing = matplotlib_figure.Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = drawing.add_subplot()
        axes.grid(alpha=0.3)
        (_draw_plot if isinstance(figure, Plot) else _draw_rows)(figure, drawing, axes)
        if len(axes.get_legend_handles_labels()[1]) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = out.getvalue()
    text = re.sub(r"(\d\.\d)\d+", r"\1", text[text.index("<svg") :])  # tenths of a point are enough
    return "\n".join(line.rstrip() for line in text.splitlines())


def _draw_plot(plot: Plot, drawing, axes) -> None:
    for at, line in enumerate(plot.lines):
        xs, ys = zip(*line.points, strict=True)
        (drawn,) = axes.plot(xs, ys, label=line.name, marker="o", markersize=3, linewidth=1 if at else 2.5)
        if line.band:
            axes.fill_between(xs, *zip(*line.band, strict=True), color=drawn.get_color(), alpha=0.2, linewidth=0)
        wrong = [line.points[at] for at in sorted(line.wrong)]
        axes.plot(*zip(*wrong, strict=True), "o", color=WRONG) if wrong else None
    if plot.rule is not None:
        axes.axhline(plot.rule, color="grey", linestyle="--", linewidth=1)
    _scale(axes.xaxis, axes.set_xscale, plot.x)
    _scale(axes.yaxis, axes.set_yscale, plot.y)


def _draw_rows(chart: Rows, drawing, axes) -> None:
    rows = list(dict.fromkeys(mark.row for mark in chart.marks))
    drawing.set_figheight(1 + ROW * max(4, len(rows)))
    for name in dict.fromkeys(mark.name for mark in chart.marks):
        mine = [mark for mark in chart.marks if mark.name == name]
        (drawn,) = axes.plot([], [], "o", label=name)
        places = [mark.value for mark in mine], [rows.index(mark.row) for mark in mine]
        axes.scatter(*places, color=[drawn.get_color()] * len(mine), zorder=2)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if chart.rule is not None:
        axes.axvline(chart.rule, color="grey", linestyle="--", linewidth=1)
    _scale(axes.xaxis, axes.set_xscale, chart.x)


def _scale(axis, set_scale: Callable, wanted: Axis) -> None:
    from matplotlib import ticker

    axis.set_label_text(wanted.label)
    if wanted.base:
        set_scale("log", base=wanted.base)
        low, high = axis.get_view_interval()
        # A decade or less would have one tick.
        subs = (1, 2, 5) if wanted.base == 10 and high < 300 * low else (1,)
        axis.set_major_locator(ticker.LogLocator(wanted.base, subs, numticks=9))
        axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: wanted.form(value)))


def _drawable(line: Line, plot: Plot) -> Line:
    """Returns the line without points that cannot be drawn, such as the infinite loss of a diverged training."""

    def has_place(value: float, axis: Axis) -> bool:
        return math.isfinite(value) and (value > 0 or not axis.base)

    kept = [at for at, (x, y) in enumerate(line.points) if has_place(x, plot.x) and has_place(y, plot.y)]
    return replace(
        line,
        points=[line.points[at] for at in kept],
        band=[line.band[at] for at in kept] if line.band else (),
        wrong=frozenset(now for now, before in enumerate(kept) if before in line.wrong),
    )

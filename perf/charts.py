"""Charts as inline SVG, so that a page needs neither network nor scripts.

Matplotlib draws the charts, and its SVG backend keeps text as text. Libraries that draw in the browser (Plotly, Bokeh,
Vega) would add megabytes of script to each page. :func:`inline` then replaces the palette's colours by CSS variables,
so that charts follow the page's light or dark theme. It also gives each mark a tooltip, a <title> element.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from xml.etree import ElementTree

WIDTH, HEIGHT = 480, 300
LEFT, RIGHT, TOP, BOTTOM = 56, 466, 34, 256  # the bounds of the plot area
FONT = 12
LETTER, LABEL_HEIGHT = 8.2, 16  # the width of a letter and the height of a line's label on a narrow page
MAX_LINES = 6
ROW = 24  # the height of a row in charts of rows

SVG = "{http://www.w3.org/2000/svg}"
HREF = "{http://www.w3.org/1999/xlink}href"
# The colours of the light theme in page/style.css. In a page, CSS variables replace them.
PALETTE = {
    "--own": "#0b63ce",
    "--c0": "#2f7d32",
    "--c1": "#7b3fbf",
    "--c2": "#a86200",
    "--c3": "#0a7f86",
    "--c4": "#b8336f",
    "--c5": "#5a6472",
    "--c6": "#6a7d00",
    "--text": "#1b1f24",
    "--dim": "#5c6570",
    "--edge": "#d9dde3",
    "--wrong": "#c81e1e",
}
OTHERS = [colour for name, colour in PALETTE.items() if re.match(r"--c\d", name)]


@dataclass(frozen=True)
class Line:
    """A line of a plot. Its points are ordered from left to right.

    Attributes:
        hints: the tooltip of each point.
        band: the lower and upper bound at each point; empty if there is no band.
        wrong: the indices of points with wrong results. They are drawn red.
    """

    name: str
    points: Sequence[tuple[float, float]]
    hints: Sequence[str] = ()
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


@dataclass(frozen=True)
class Plot:
    """A line plot. The first line is drawn bold.

    Attributes:
        rules: horizontal reference lines: value and label.
    """

    title: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    rules: Sequence[tuple[float, str]] = ()
    note: str = ""

    def __post_init__(self) -> None:
        if len(self.lines) > MAX_LINES:
            raise ValueError(f"{self.title}: {len(self.lines)} lines, and a plot has at most {MAX_LINES}")


@dataclass(frozen=True)
class Mark:
    """A dot or a bar in a row of a chart.

    Attributes:
        name: the name of the series. Each series has a colour.
        value: the value of a dot, or the value at which a bar ends.
        hint: the tooltip.
        begin: the value at which a bar begins; None for a dot.
    """

    row: str
    name: str
    value: float
    hint: str
    begin: float | None = None
    wrong: bool = False


@dataclass(frozen=True)
class Rows:
    """A chart of dots or bars with a row for each name.

    Attributes:
        rule: the value of a vertical reference line; None for no line.
        order: the order of the rows. Empty: the order of the marks.
        bar_height: the height of a bar as a fraction of the row's height.
        faint: the series that is drawn in a faint colour.
    """

    title: str
    marks: Sequence[Mark]
    x: Axis
    rule: float | None = None
    note: str = ""
    order: Sequence[str] = ()
    bar_height: float = 0.6
    faint: str = ""


Figure = Plot | Rows


def render(figure: Figure | None) -> str:
    """Returns a <figure> with title, SVG, legend and note. Returns an empty string if there is nothing to draw."""
    if isinstance(figure, Plot):
        drawn, keys = _plot(figure), ""
    elif figure is not None and figure.marks:
        drawn, keys = _rows(figure), _keys(_series(figure))
    else:
        return ""
    note = f"<p>{escape(figure.note)}</p>" if figure.note else ""
    return f"<figure><figcaption>{escape(figure.title)}</figcaption>{drawn}{keys}{note}</figure>\n" if drawn else ""


# ---- plots ----------------------------------------------------------------------------------------------------------


def _plot(plot: Plot) -> str:
    lines = [line for line in (_drawable(line, plot) for line in plot.lines) if line.points]
    if not lines:
        return ""
    longest = max(len(line.name) for line in lines)
    labels = round(min(RIGHT - 16 - LETTER * longest, RIGHT - 60))
    canvas = _Canvas(plot.title, HEIGHT, (LEFT, labels, TOP, BOTTOM))
    axes = canvas.axes
    rules = [(value, name) for value, name in plot.rules if _is_drawable(value, plot.y)]
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points] + [value for value, _ in rules]
    ys += [end for line in lines for ends in line.band for end in ends]
    _scale(axes.xaxis, plot.x, xs)
    _scale(axes.yaxis, plot.y, ys)
    for value, name in rules:
        axes.axhline(value, color=PALETTE["--dim"], linestyle=(0, (4, 4)), linewidth=1)
        canvas.text(LEFT + 4, canvas.place(0, value)[1] - 5, name, "--dim")
    colours = [PALETTE["--own"], *OTHERS]
    for at, line in reversed(list(enumerate(lines))):  # so that the first line is on top
        canvas.line(line, colours[at], bold=at == 0)
    canvas.labels(lines, colours, labels)
    canvas.text(labels, HEIGHT - 6, plot.x.label, "--text", "right")
    canvas.text(4, TOP - 14, plot.y.label, "--text")
    return canvas.svg()


def _drawable(line: Line, plot: Plot) -> Line:
    """Returns the line without points that cannot be drawn, such as the infinite loss of a diverged training."""
    drawable = [at for at, (a, b) in enumerate(line.points) if _is_drawable(a, plot.x) and _is_drawable(b, plot.y)]
    wrong = frozenset(now for now, before in enumerate(drawable) if before in line.wrong)
    values = {name: getattr(line, name) for name in ("points", "hints", "band")}
    kept = {name: [every[at] for at in drawable] for name, every in values.items() if every}
    return replace(line, **kept, wrong=wrong)


def _is_drawable(value: float, axis: Axis) -> bool:
    return math.isfinite(value) and (value > 0 or not axis.base)


def _scale(axis, given: Axis, values: Sequence[float]) -> None:
    """Sets limits that include all values, a few ticks, and their labels."""
    from matplotlib import ticker

    low, high = min(values), max(values)
    if given.base:
        room = (high / low) ** 0.04 if high > low else 1.5
        limits = low / room, high * room
        decades = math.log10(limits[1] / limits[0])
        if given.base == 2:
            locator = ticker.LogLocator(base=2, numticks=5)
        elif decades < 0.7:
            locator = ticker.MaxNLocator(5)
        else:
            locator = ticker.LogLocator(base=10, subs=(1, 2, 5) if decades < 2.5 else (1,), numticks=9)
    else:
        room = (high - low) * 0.05 or abs(high) * 0.5 or 1.0
        limits = (0.0 if 0 <= low < high / 2 else low - room), high + room
        locator = ticker.MaxNLocator(5)
    is_x = axis.axis_name == "x"
    if given.base:
        (axis.axes.set_xscale if is_x else axis.axes.set_yscale)("log", base=given.base)
    (axis.axes.set_xlim if is_x else axis.axes.set_ylim)(*limits)
    axis.set_major_locator(locator)
    axis.set_minor_locator(ticker.NullLocator())
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: given.form(value)))


# ---- rows -----------------------------------------------------------------------------------------------------------


def _rows(chart: Rows) -> str:
    rows = list(dict.fromkeys(chart.order or [mark.row for mark in chart.marks]))
    left = min(12 + LETTER * max(map(len, rows)), 240)
    pitch = max(ROW, 150 // len(rows))
    bottom = 20 + pitch * len(rows)
    canvas = _Canvas(chart.title, bottom + 44, (left, RIGHT, 20, bottom))
    axes = canvas.axes
    ends = [mark.value for mark in chart.marks] + ([chart.rule] if chart.rule is not None else [])
    is_bars = any(mark.begin is not None for mark in chart.marks)
    _scale(axes.xaxis, chart.x, [0.0, *ends] if is_bars else ends)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), rows)
    if is_bars:
        axes.grid(visible=False, axis="y")
    if chart.rule is not None:
        axes.axvline(chart.rule, color=PALETTE["--dim"], linestyle=(0, (4, 4)), linewidth=1)
    for name, colour in reversed(list(_series(chart).items())):  # so that the first series is on top
        mine = [mark for mark in chart.marks if mark.name == name]
        (canvas.bars if is_bars else canvas.dots)(mine, rows, colour, chart.bar_height)
    canvas.text(RIGHT, bottom + 38, chart.x.label, "--text", "right")
    return canvas.svg()


def _series(chart: Rows) -> dict[str, str]:
    """Returns the colour of each series by name."""
    names = dict.fromkeys(mark.name for mark in chart.marks)
    coloured = [name for name in names if name != chart.faint]
    colours = dict(zip(coloured, itertools.cycle([PALETTE["--own"], *OTHERS]), strict=False))
    return {name: colours.get(name, PALETTE["--edge"]) for name in names}


def _keys(series: dict[str, str]) -> str:
    if len(series) < 2:
        return ""
    items = (
        f'<li><i style="background: {_variables(colour)}"></i>{escape(name)}</li>' for name, colour in series.items()
    )
    return f'<ul class="key">{"".join(items)}</ul>'


# ---- Matplotlib -----------------------------------------------------------------------------------------------------


class _Canvas:
    """A Matplotlib figure in units of SVG pixels, with the tooltips of its marks."""

    def __init__(self, title: str, height: float, area: tuple[float, float, float, float]) -> None:
        from matplotlib.figure import Figure as Drawing

        left, right, top, bottom = area
        self.title, self.height, self.hints, self._ids = title, height, {}, itertools.count()
        self._drawing = Drawing(figsize=(WIDTH / 72, height / 72), dpi=72)
        size = (right - left) / WIDTH, (bottom - top) / height
        self.axes = self._drawing.add_axes((left / WIDTH, 1 - bottom / height, *size))
        self.axes.patch.set_visible(False)
        self.axes.spines[:].set_visible(False)
        self.axes.tick_params(length=0, labelsize=FONT, labelcolor=PALETTE["--dim"])
        self.axes.grid(color=PALETTE["--edge"], linewidth=1)
        self.axes.set_axisbelow(True)

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Returns a point in pixels from the upper left corner."""
        across, up = self.axes.transData.transform((x, y))
        return across, self.height - up

    def text(self, x: float, y: float, text: str, colour: str, align: str = "left") -> None:
        where = x / WIDTH, 1 - y / self.height
        self._drawing.text(*where, text, color=PALETTE.get(colour, colour), fontsize=FONT, ha=align, parse_math=False)

    def line(self, line: Line, colour: str, bold: bool) -> None:
        xs, ys = zip(*line.points, strict=True)
        if line.band:
            lows, highs = zip(*line.band, strict=True)
            self.axes.fill_between(xs, lows, highs, color=colour, alpha=0.18, linewidth=0, clip_on=False)
        self.axes.plot(xs, ys, color=colour, linewidth=3 if bold else 1.5, clip_on=False, gid=self._known(()))
        for is_wrong in (False, True):
            mine = [at for at in range(len(xs)) if (at in line.wrong) == is_wrong]
            if mine and line.hints:
                hints = [f"{line.name}, {line.hints[at]}" for at in mine]
                marks = [xs[at] for at in mine], [ys[at] for at in mine]
                self._marks(*marks, PALETTE["--wrong"] if is_wrong else colour, 8 if is_wrong else 5, hints)

    def dots(self, marks: Sequence[Mark], rows: Sequence[str], colour: str, bar_height: float) -> None:
        for is_wrong in (False, True):
            mine = [mark for mark in marks if mark.wrong == is_wrong]
            if mine:
                where = [mark.value for mark in mine], [rows.index(mark.row) for mark in mine]
                self._marks(*where, PALETTE["--wrong"] if is_wrong else colour, 9, [mark.hint for mark in mine])

    def bars(self, marks: Sequence[Mark], rows: Sequence[str], colour: str, bar_height: float) -> None:
        for mark in marks:
            shown = PALETTE["--wrong"] if mark.wrong else colour
            style = {"color": shown, "linewidth": 0, "clip_on": False, "gid": self._known([mark.hint])}
            self.axes.barh(rows.index(mark.row), mark.value - mark.begin, bar_height, mark.begin, **style)

    def _marks(self, xs: Sequence, ys: Sequence, colour: str, size: float, hints: Sequence[str]) -> None:
        style = {"marker": "o", "linestyle": "", "markersize": size, "markeredgewidth": 0, "clip_on": False}
        self.axes.plot(xs, ys, color=colour, gid=self._known(hints), **style)

    def labels(self, lines: Sequence[Line], colours: Sequence[str], left: float) -> None:
        """Draws each line's name beside its right end, with a connecting stroke. Labels do not overlap."""
        ends = sorted((self.place(*line.points[-1])[::-1], at) for at, line in enumerate(lines))
        lowest, y = BOTTOM - LABEL_HEIGHT * (len(ends) - 1), TOP - LABEL_HEIGHT
        for order, ((end, begin), at) in enumerate(ends):
            y = max(y + LABEL_HEIGHT, min(end, lowest + LABEL_HEIGHT * order))
            self._stroke((begin, end), (left + 10, y), colours[at])
            self.text(left + 13, y + 4, lines[at].name, colours[at])

    def _stroke(self, begin: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        from matplotlib.lines import Line2D

        xs, ys = ([one[0] / WIDTH for one in (begin, end)], [1 - one[1] / self.height for one in (begin, end)])
        self._drawing.add_artist(Line2D(xs, ys, color=colour, alpha=0.5, linewidth=1))

    def _known(self, hints: Sequence[str]) -> str:
        """Returns an SVG group id for the marks that are drawn next, and stores their tooltips under it."""
        name = f"drawn{next(self._ids)}"
        self.hints[name] = hints
        return name

    def svg(self) -> str:
        from matplotlib import rc_context

        out = io.StringIO()
        settings = {"svg.fonttype": "none", "svg.hashsalt": "graphar", "font.family": "sans-serif"}
        with rc_context(settings):
            metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            self._drawing.savefig(out, format="svg", metadata=metadata, transparent=True)
        return inline(out.getvalue(), self.title, self.height, self.hints)


def inline(text: str, title: str, height: float, hints: dict[str, Sequence[str]]) -> str:
    """Returns Matplotlib's SVG without redundant elements, with CSS variables for colours, and with tooltips."""
    root = ElementTree.fromstring(text)
    # Groups with the same marks share a shape, which only the first of them defines.
    shapes = {f"#{one.get('id')}": one for one in root.iterfind(f".//{SVG}defs/{SVG}path")}
    body = [
        part for group in root.iter(f"{SVG}g") for part in _parts(group, hints.get(group.get("id", ""), ()), shapes)
    ]
    inside = _variables("".join(body))
    head = f'class="plot" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(title)}"'
    return f"<svg {head}>{inside}</svg>"


def _parts(group: ElementTree.Element, hints: Sequence[str], shapes: Mapping[str, ElementTree.Element]) -> list[str]:
    """Returns the elements of a group without its subgroups: lines, areas and text, or marks with tooltips."""
    if group.get("id", "").startswith(("figure", "axes", "patch", "matplotlib")):
        return []
    found = [_text(one) for one in group.findall(f"{SVG}text")]
    paths, uses = group.findall(f"{SVG}path"), group.findall(f"{SVG}g/{SVG}use")
    if not hints:
        return [*found, *(_path(one) for one in paths), *(_path(shapes[use.get(HREF)], use=use) for use in uses)]
    if paths:
        return [_path(one, title) for one, title in zip(paths, hints, strict=True)]
    radius = _short(shapes[uses[0].get(HREF)].get("d")).split()[2]
    return [_circle(one, radius, title) for one, title in zip(uses, hints, strict=True)]


def _text(one: ElementTree.Element) -> str:
    style = dict(re.findall(r"([\w-]+): ([^;]+)", one.get("style")))
    anchor = {"middle": ' text-anchor="middle"', "end": ' text-anchor="end"'}.get(style.get("text-anchor"), "")
    place = f'x="{_short(one.get("x"))}" y="{_short(one.get("y"))}"'
    return f'<text {place}{anchor} style="fill: {style["fill"]}">{escape(one.text or "")}</text>'


def _path(one: ElementTree.Element, title: str = "", use: ElementTree.Element | None = None) -> str:
    """Returns a path, moved to the position of ``use``."""
    moved = f' transform="translate({use.get("x")} {use.get("y")})"' if use is not None else ""
    style = (one if use is None else use).get("style").replace("; stroke-linecap: square", "")
    return f'<path{moved} d="{_short(one.get("d"))}" style="{style}"{_closed("path", title)}'


def _circle(use: ElementTree.Element, radius: str, title: str) -> str:
    place = f'cx="{_short(use.get("x"))}" cy="{_short(use.get("y"))}" r="{radius}"'
    return f'<circle {place} style="{use.get("style")}"{_closed("circle", title)}'


def _closed(tag: str, title: str) -> str:
    return f"><title>{escape(title)}</title></{tag}>" if title else "/>"


def _short(numbers: str) -> str:
    """Rounds coordinates to a tenth of a pixel."""
    shorter = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), numbers)
    return " ".join(shorter.split())


def _variables(text: str) -> str:
    return re.sub("|".join(PALETTE.values()), lambda colour: f"var({_NAMES[colour[0]]})", text)


_NAMES = {colour: name for name, colour in PALETTE.items()}

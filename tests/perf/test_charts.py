"""perf's charts: marks lie at their values, have tooltips, and follow the page's colours."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest

from perf import charts
from perf.charts import Axis, Line, Mark, Plot, Rows, render

TALL = [(1, 1.0), (100, 10.0)]
LOG = Axis("x", 10)


def plot(*lines, x=LOG, y=LOG, **more):
    return Plot("a plot", lines, x, y, **more)


def circles(drawn):
    """Place, colour and tooltip."""
    found = re.findall(
        r'<circle cx="([\d.]+)" cy="([\d.]+)" r="[\d.]+" style="fill: (.*?)"><title>(.*?)</title>', drawn
    )
    return [(float(x), float(y), colour, hint) for x, y, colour, hint in found]


def test_points_lie_where_their_values_are_with_a_tooltip_each():
    drawn = render(plot(Line("one", TALL, ["low", "high"])))

    (left, low, colour, first), (right, high, _, last) = circles(drawn)
    assert (first, last, colour) == ("one, low", "one, high", "var(--own)")
    assert charts.LEFT < left < right < charts.RIGHT
    assert charts.TOP < high < low < charts.BOTTOM


def test_a_wrong_point_is_red():
    drawn = render(plot(Line("one", TALL, ["low", "high"], wrong=frozenset({1}))))

    assert [colour for _, _, colour, _ in circles(drawn)] == ["var(--own)", "var(--wrong)"]


def test_points_without_a_place_are_left_out_and_others_keep_what_is_theirs():
    points = [(1, 1.0), (2, math.inf), (4, 0.0), (8, 10.0)]
    line = Line("one", points, ["a", "b", "c", "d"], wrong=frozenset({3}))

    drawn = render(plot(line, rules=[(math.inf, "never")]))

    assert [(hint, colour) for _, _, colour, hint in circles(drawn)] == [
        ("one, a", "var(--own)"),
        ("one, d", "var(--wrong)"),
    ]
    assert "never" not in drawn


def test_colours_are_the_pages_and_nothing_has_an_id():
    band = [(0.9, 1.1), (9.0, 11.0)]

    drawn = render(plot(Line("one", TALL, ["a", "b"], band), Line("two", TALL, ["a", "b"]), rules=[(3.0, "a rule")]))

    assert not re.findall(r"#[0-9a-f]{6}| id=|href|clip-path", drawn)
    assert set(re.findall(r"var\((--\w+)\)", drawn)) == {"--own", "--c0", "--dim", "--edge", "--text"}
    assert "fill-opacity: 0.18" in drawn


def test_a_plot_has_at_most_six_lines():
    with pytest.raises(ValueError, match="a plot: 7 lines, and a plot has at most 6"):
        plot(*(Line(str(at), TALL) for at in range(7)))


def test_names_stand_at_the_ends_of_lines_in_their_order_and_none_over_another():
    ends = {"low": 1.0, "high": 9.0, "lowest": 0.99, "higher": 1.01}
    lines = [Line(name, [(0, 5.0), (1, end)]) for name, end in ends.items()]

    drawn = render(plot(*lines, x=Axis("x"), y=Axis("y")))

    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" style="[^"]*">(high|higher|low|lowest)<', drawn)
    by_height = sorted((float(y), name) for _, y, name in found)
    assert [name for _, name in by_height] == ["high", "higher", "low", "lowest"]
    assert all(below[0] - above[0] >= charts.LABEL_HEIGHT for above, below in pairwise(by_height))
    assert by_height[-1][0] <= charts.BOTTOM + 4
    last = max(
        float(x)
        for x in re.findall(r"M [\d.]+ [\d.]+ L ([\d.]+) [\d.]+\" style=\"fill: none; stroke: var\(--own", drawn)
    )
    assert all(float(x) > last for x, _, _ in found)


def test_what_names_hold_is_no_markup():
    drawn = render(plot(Line("<b>&", TALL, ["<i>", "$x$"]), note="<script>"))

    assert "<b>" not in drawn
    assert "<script>" not in drawn
    assert "<title>&lt;b&gt;&amp;, &lt;i&gt;</title>" in drawn


@pytest.mark.parametrize("base", [0, 2, 10])
@pytest.mark.parametrize(
    ("low", "high"), [(2.0, 9000.0), (0.93, 1.12), (0.5, 8.0), (5.0, 5.0), (1e-3, 1.0), (3.0, 31.0)]
)
def test_an_axis_has_a_few_ticks(base, low, high):
    drawn = render(plot(Line("one", [(1, low), (2, high)], ["a", "b"]), x=Axis("x"), y=Axis("y", base)))

    ticks = re.findall(r'<text x="[\d.]+" y="([\d.]+)" text-anchor="end" style="fill: var\(--dim\)">', drawn)
    assert (1 if base == 2 else 2) <= len(ticks) <= 10
    assert all(charts.TOP - 5 <= float(y) <= charts.BOTTOM + 10 for y in ticks)


def test_a_chart_of_nothing_is_nothing():
    assert render(plot(Line("one", []))) == ""
    assert render(Rows("r", [], Axis("v"))) == ""
    assert render(None) == ""


def test_dots_lie_where_their_values_are_in_rows_of_their_own():
    marks = [Mark("a", "x", 1.0, "one"), Mark("b", "x", 3.0, "three", wrong=True), Mark("b", "y", 2.0, "two")]

    drawn = render(Rows("r", marks, Axis("v"), 2.0))

    found = {hint: (x, y, colour) for x, y, colour, hint in circles(drawn)}
    (rule,) = re.findall(r'd="M ([\d.]+) [^"]*" style="fill: none; stroke-dasharray', drawn)
    assert found["one"][0] < found["two"][0] < found["three"][0]
    assert found["two"][0] == pytest.approx(float(rule), abs=0.1)
    assert found["one"][1] < found["two"][1] == found["three"][1]
    assert [found[hint][2] for hint in ("one", "two", "three")] == ["var(--own)", "var(--c0)", "var(--wrong)"]
    assert re.findall(r"</i>(\w+)</li>", drawn) == ["x", "y"]


def test_wrong_dots_of_two_series_are_all_drawn():
    marks = [Mark("a", name, value, name, wrong=True) for name, value in (("x", 1.0), ("y", 2.0))]

    drawn = render(Rows("r", marks, Axis("v")))

    assert {(colour, hint) for _, _, colour, hint in circles(drawn)} == {("var(--wrong)", "x"), ("var(--wrong)", "y")}


def bars(drawn):
    """The left and right end, the upper and lower end, and the colour of each bar, by tooltip."""
    found = {}
    for path, colour, hint in re.findall(r'<path d="([^"]*)" style="fill: ([^"]*)"><title>(.*?)</title>', drawn):
        numbers = [float(number) for number in re.findall(r"[\d.]+", path)]
        xs, ys = numbers[::2], numbers[1::2]
        found[hint] = (min(xs), max(xs), min(ys), max(ys), colour)
    return found


def test_bars_lie_where_their_spans_are_in_the_order_of_rows():
    marks = [
        Mark("first", "work", 8.0, "long", 0.0),
        Mark("second", "wait", 6.0, "late", 4.0),
        Mark("second", "work", 4.0, "early", 0.0),
    ]

    drawn = render(Rows("r", marks, Axis("us"), order=["second", "first"], faint="wait"))

    found = bars(drawn)
    unit = (found["long"][1] - found["long"][0]) / 8
    assert found["early"][0] == found["long"][0]
    assert found["early"][1] == pytest.approx(found["late"][0], abs=0.1)
    assert found["late"][1] - found["late"][0] == pytest.approx(2 * unit, abs=0.2)
    assert found["early"][3] < found["long"][2]
    assert (found["late"][4], found["long"][4]) == ("var(--edge)", "var(--own)")

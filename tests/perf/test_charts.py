"""perf's charts: marks lie at their values, and wrong ones are red."""

from __future__ import annotations

import math
import re

import pytest

from perf.charts import WRONG, Axis, Line, Mark, Plot, Rows, render

TALL = [(1, 1.0), (100, 10.0)]


def marks(drawn):
    """The place and the colour of each dot."""
    dots = re.findall(r'<use xlink:href="#\w+" x="([\d.]+)" y="([\d.]+)" style="fill: (#\w+)', drawn)
    return [(float(x), float(y), colour) for x, y, colour in dots]


def texts(drawn):
    return re.findall(r">([^<>]*)</text>", drawn)


def plot(*lines, base=10, **more):
    return Plot("a plot", lines, Axis("x", base), Axis("y", base), **more)


def test_points_lie_where_their_values_are_and_wrong_ones_are_red():
    drawn = render(plot(Line("one", TALL, wrong=frozenset({1}))))

    (left, low, _), (right, high, colour), *wrong = marks(drawn)
    assert wrong == [(right, high, WRONG)]
    assert colour != WRONG
    assert left < right
    assert high < low  # SVG counts from above


def test_lines_have_a_legend_and_a_band_and_axes_their_names():
    drawn = render(plot(Line("one", TALL), Line("other", TALL, [(0.9, 1.1), (9.0, 11.0)])))

    assert {"one", "other", "x", "y"} <= set(texts(drawn))
    assert "fill-opacity: 0.2" in drawn


def test_points_without_a_place_are_left_out_and_others_keep_what_is_theirs():
    points = [(1, 1.0), (2, math.inf), (4, 0.0), (8, 10.0)]

    drawn = render(plot(Line("one", points, wrong=frozenset({3}))))

    assert [colour == WRONG for _, _, colour in marks(drawn)] == [False, False, True]


def test_what_names_hold_is_no_markup():
    drawn = render(plot(Line("<b>&", TALL), Line("$x$", TALL), note="<script>"))

    assert "<b>" not in drawn
    assert "<script>" not in drawn
    assert "&lt;b&gt;&amp;" in texts(drawn)


@pytest.mark.parametrize("base", [0, 2, 10])
@pytest.mark.parametrize(
    ("low", "high"), [(2.0, 9000.0), (0.93, 1.12), (0.5, 8.0), (5.0, 5.0), (1e-3, 1.0), (3.0, 31.0)]
)
def test_an_axis_has_a_few_ticks(base, low, high):
    drawn = render(Rows("r", [Mark("", "x", low), Mark("", "x", high)], Axis("v", base)))

    assert 1 <= len([text for text in texts(drawn) if re.fullmatch(r"[\d.e-]+", text)]) <= 10


def test_a_chart_of_nothing_is_nothing():
    assert render(plot(Line("one", []))) == ""
    assert render(Rows("r", [], Axis("v"))) == ""
    assert render(None) == ""


def test_dots_lie_where_their_values_are_in_rows_of_their_own():
    dots = [Mark("b", "x", 1.0), Mark("a", "x", 3.0), Mark("a", "y", 2.0), Mark("b", "y", 2.5)]

    drawn = render(Rows("r", dots, Axis("v"), 2.0))

    at_1, at_2, at_2_and_a_half, at_3 = sorted(marks(drawn))[:4]  # the legend's dots follow
    assert at_1[2] == at_3[2] != at_2[2] == at_2_and_a_half[2]
    assert at_1[1] == at_2_and_a_half[1] < at_2[1] == at_3[1]
    assert texts(drawn).index("b") < texts(drawn).index("a")

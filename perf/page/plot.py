"""What a plot shows, and where on its axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

MOST_TICKS = 7


@dataclass(frozen=True)
class Line:
    """One method's points, from left to right.

    Attributes:
        style: classes of style.css.
        band: the low and high end of each point, or nothing.
        hints: what is shown where the pointer rests on a point.
        captions: what is written beside each point, or nothing.
        label: what is written beside its end, or nothing; then the points have no marks.
        wrong: which points' results were wrong; they are red.
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    band: Sequence[tuple[float, float]] = ()
    hints: Sequence[str] = ()
    captions: Sequence[str] = ()
    label: str = ""
    wrong: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Axis:
    """Attributes:
    log: whether the scale is logarithmic.
    form: a tick in words.
    ticks: where they are; nothing: where they are round.
    base: of the ticks of a logarithmic scale, 10 or 2.
    """

    label: str
    log: bool = False
    form: Callable[[float], str] = "{:g}".format
    ticks: Sequence[float] = ()
    base: int = 10


@dataclass(frozen=True)
class Plot:
    """Attributes:
    rules: horizontal lines, each with its name.
    shade: the low and high end of a band across the plot that means "no difference".
    """

    title: str
    lines: Sequence[Line]
    x: Axis
    y: Axis
    rules: Sequence[tuple[float, str]] = ()
    shade: tuple[float, float] | None = None
    note: str = ""


@dataclass(frozen=True)
class Scale:
    """From values to places."""

    axis: Axis
    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        low, high, value = (math.log(v) if self.axis.log else v for v in (self.low, self.high, value))
        return round(self.begin + (value - low) / (high - low) * (self.end - self.begin), 1)

    def ticks(self) -> list[float]:
        if self.axis.ticks:
            return list(self.axis.ticks)
        return log_ticks(self.low, self.high, self.axis.base) if self.axis.log else linear_ticks(self.low, self.high)


def scale(axis: Axis, values: Sequence[float], begin: float, end: float) -> Scale:
    """One that holds all values, and a little more where the axis has no ticks of its own."""
    low, high = min(values), max(values)
    if axis.log:
        room = (high / low) ** 0.04 if high > low else 1.5
        return Scale(axis, low / room, high * room, begin, end)
    room = (high - low) * 0.05 or abs(high) * 0.5 or 1.0
    return Scale(axis, 0.0 if 0 <= low < high / 2 else low - room, high + room, begin, end)


def log_ticks(low: float, high: float, base: int) -> list[float]:
    """Powers of the base, every so many; between those of ten 2 and 5, where there are few."""
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    step = max(1, math.ceil((last - first + 1) / MOST_TICKS))
    if base == 2:
        return [2.0**power for power in range(first, last + 1, step)]
    inner = (1, 2, 5) if math.log10(high / low) < 2 else (1,)
    if math.log10(high / low) < 0.7:
        return linear_ticks(low, high)
    found = [factor * 10.0**power for power in range(first - 1, last + 1) for factor in inner]
    return [value for value in found if low <= value <= high][:: step if inner == (1,) else 1]


def linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / (MOST_TICKS - 2)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(at * step, 10) for at in range(math.ceil(low / step), math.floor(high / step) + 1)]

"""Error against speed-up, or, where nothing was timed, against the bits on the wire."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from graphar.plan.sizes import MB
from perf.compare import BASELINES
from perf.quantized.errors import ErrorRow
from perf.rows import Row

TIMED_FROM_NBYTES = 16 * MB  # where links, and not latency, decide


def draw(path: Path, errors: Sequence[ErrorRow], times: Sequence[Row]) -> None:
    """Writes an SVG: one line a kind of data, one point a codec."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for data, points in points_by_data(errors, times).items():
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=data)
    for x, y, name in points:
        axes.annotate(name, (x, y), xytext=(4, -12), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    axes.set(xlabel=across(errors, times), ylabel="relative L2 error", title=f"{widest(errors)} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def widest(errors: Sequence[ErrorRow]) -> int:
    return max(row.world_size for row in errors)


def across(errors: Sequence[ErrorRow], times: Sequence[Row]) -> str:
    """What the errors stand against."""
    gains = speed_ups(times, widest(errors))
    return "speed-up over NCCL, geometric mean from 16 MB up" if gains else "bits of an element on the wire"


def points_by_data(errors: Sequence[ErrorRow], times: Sequence[Row]) -> dict[str, list[tuple[float, float, str]]]:
    """By kind of data, a point a codec of the widest world: speed-up, or bits without one; error; name."""
    gains = speed_ups(times, widest(errors))
    found: dict[str, list[tuple[float, float, str]]] = {}
    for row in errors:
        x = gains.get(row.codec) if gains else row.bits
        if row.world_size == widest(errors) and x is not None:
            found.setdefault(row.data, []).append((x, row.relative_l2, row.codec))
    return {data: sorted(points) for data, points in found.items()}


def speed_ups(times: Sequence[Row], world_size: int) -> dict[str, float]:
    """By codec, over NCCL."""
    times = [row for row in times if row.world_size == world_size and not row.wrong]
    large = [row for row in times if row.nbytes >= TIMED_FROM_NBYTES]
    base = {row.nbytes: row.median for row in large if row.method in BASELINES}
    names = {"exact": "graphar"} | {
        row.method.removeprefix("graphar_"): row.method for row in large if row.method.startswith("graphar_")
    }
    found = {}
    for name, method in names.items():
        ratios = [base[row.nbytes] / row.median for row in large if row.method == method and row.nbytes in base]
        if ratios:
            found[name] = statistics.geometric_mean(ratios)
    return found

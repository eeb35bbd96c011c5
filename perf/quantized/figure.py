"""Error against speed-up, or, where nothing was timed, against the bits on the wire."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from graphar.sizes import MB
from perf.compare import BASELINES
from perf.quantized.errors import ErrorRow
from perf.rows import Row

TIMED_FROM_NBYTES = 16 * MB  # where links, and not latency, decide


def draw(path: Path, errors: Sequence[ErrorRow], times: Sequence[Row]) -> None:
    """Writes an SVG: one line a kind of data, one point a codec."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    widest = max(row.world_size for row in errors)
    gains = speed_ups([row for row in times if row.world_size == widest])
    for data in dict.fromkeys(row.data for row in errors):
        mine = [row for row in errors if (row.data, row.world_size) == (data, widest)]
        points = [(gains.get(row.codec) if gains else row.bits, row.relative_l2, row.codec) for row in mine]
        points = sorted(point for point in points if point[0] is not None)
        axes.plot([x for x, _, _ in points], [y for _, y, _ in points], marker="o", label=data)
    for x, y, name in points:
        axes.annotate(name, (x, y), xytext=(4, -12), textcoords="offset points", fontsize=8)
    axes.set_yscale("log")
    where = "speed-up over NCCL, geometric mean from 16 MB up" if gains else "bits of an element on the wire"
    axes.set(xlabel=where, ylabel="relative L2 error", title=f"{widest} ranks")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


def speed_ups(times: Sequence[Row]) -> dict[str, float]:
    """By codec, over NCCL."""
    large = [row for row in times if row.nbytes >= TIMED_FROM_NBYTES and not row.wrong]
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

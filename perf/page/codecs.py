"""The plots of codecs: what they cost and gain, with loss and without."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from perf.compare import BASELINES, baseline
from perf.lossless import LosslessRow
from perf.page.allreduce import SIZE, hint
from perf.page.plot import Axis, Line, Plot
from perf.quantized.figure import across, points_by_data, widest
from perf.quantized.report import Findings
from perf.rows import Row
from perf.tables import by_size

SPEED_UP = Axis("times as fast", form="{:g}x".format)


def quantized(found: Findings) -> dict[str, list[Plot]]:
    plots: dict[str, list[Plot]] = {"": [errors(found)]} if found.errors else {}
    for world_size, rows in groupby(found.rows, key=lambda row: row.world_size):
        plots.setdefault("", []).append(gain(list(rows), world_size))
    return plots


def errors(found: Findings) -> Plot:
    """Error against speed-up, or, where nothing was timed, against the bits on the wire."""
    by_data = points_by_data(found.errors, found.rows)
    drawn = []
    for at, (data, points) in enumerate(by_data.items()):
        names = [name for _, _, name in points]
        hints = [f"{name}: {y:.2e} at {x:.3g}" for x, y, name in points]
        captions = names if at == len(by_data) - 1 else ()
        drawn.append(Line(data, [(x, y) for x, y, _ in points], f"m{at}", hints=hints, captions=captions))
    title = f"Errors of codecs, {widest(found.errors)} ranks"
    return Plot(title, drawn, Axis(across(found.errors, found.rows)), Axis("relative L2 error", log=True))


def gain(rows: Sequence[Row], world_size: int) -> Plot:
    """A line a codec."""
    base = {nbytes: baseline(mine.values()) for nbytes, mine in by_size(rows)}
    drawn = []
    for at, method in enumerate(dict.fromkeys(row.method for row in rows if row.method not in BASELINES)):
        mine = [row for row in rows if row.method == method and base[row.nbytes]]
        points = [(row.nbytes, base[row.nbytes].median / row.median) for row in mine]
        style = "own" if method == "graphar" else f"m{at % 8} d{at // 8}"
        wrong = frozenset(i for i, row in enumerate(mine) if row.wrong)
        drawn.append(Line(method, points, style, hints=[hint(row) for row in mine], wrong=wrong))
    return Plot(f"Speed-up over NCCL, {world_size} ranks", drawn, SIZE, SPEED_UP, [(1.0, "nccl")])


def lossless(rows: Sequence[LosslessRow]) -> dict[str, list[Plot]]:
    timed = [row for row in rows if row.nbytes]
    worlds = dict.fromkeys(row.world_size for row in timed)
    plots = [saved([row for row in timed if row.world_size == world_size], world_size) for world_size in worlds]
    return {"": plots} if plots else {}


def saved(rows: Sequence[LosslessRow], world_size: int) -> Plot:
    """A line a kind of data."""
    drawn = []
    for at, kind in enumerate(dict.fromkeys(row.data for row in rows)):
        mine = [row for row in rows if row.data == kind]
        points = [(row.nbytes, row.lossless_us / row.plain_us) for row in mine]
        hints = [f"{row.lossless_us:.1f} us, plain {row.plain_us:.1f} us" for row in mine]
        drawn.append(Line(f"{kind} ({mine[0].bits:.2f} bits)", points, f"m{at}", hints=hints))
    axis = Axis("time / that of the plain algorithm", form="{:.2f}".format)
    return Plot(f"Lossless by kind of data, {world_size} ranks", drawn, SIZE, axis, [(1.0, "plain")])

"""The plots of what stands around an all-reduce: matmuls, training, the steps of models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from perf.fused import report as fused_report
from perf.fused.methods import FLOORS
from perf.norms import OWN, NormRow
from perf.page.plot import Axis, Line, Plot
from perf.throughput import report as throughput_report
from perf.training import report as training_report
from perf.training.report import TrainingRow


def fused(found: fused_report.Findings) -> dict[str, list[Plot]]:
    """Time by rows of activations, a plot a layer."""
    plots = {}
    for sizes in dict.fromkeys((row.world_size, row.n, row.k) for row in found.rows):
        mine = [row for row in found.rows if (row.world_size, row.n, row.k) == sizes]
        plots[fused_report.title(*sizes)] = [floors(fused_report.by_rows(mine))]
    return plots


def floors(by_rows: Sequence[tuple[int, dict]]) -> Plot:
    """graphar's op and its best peer, above what either half takes alone."""
    lines = []
    picks = {
        "graphar, best": fused_report.best_own,
        "best peer": fused_report.best_peer,
        **{name: lambda by_method, name=name: by_method.get(name) for name in (fused_report.SEQUENCE, *FLOORS)},
    }
    styles = ("own", "m4", "m0", "m5 d1", "m5 d2")
    for style, (name, pick) in zip(styles, picks.items(), strict=True):
        found = [(m, row) for m, by_method in by_rows if (row := pick(by_method))]
        points, hints = (
            [(m, row.median) for m, row in found],
            [f"{row.method}, M = {m}: {row.median:.4g} us" for m, row in found],
        )
        wrong = frozenset(at for at, (_, row) in enumerate(found) if row.wrong)
        if points:
            lines.append(Line(name, points, style, hints=hints, wrong=wrong))
    return Plot("Time above the floors", lines, Axis("M", log=True, base=2), Axis("time (us)", log=True))


def norms(found: tuple[Sequence[NormRow], Sequence[str]]) -> dict[str, list[Plot]]:
    """Time by tokens, a plot a number of ranks."""
    plots = {}
    for world_size in dict.fromkeys(row.world_size for row in found[0]):
        rows, lines = [row for row in found[0] if row.world_size == world_size], []
        for at, method in enumerate(dict.fromkeys(row.method for row in rows)):
            mine = [row for row in rows if row.method == method]
            points = [(row.tokens, row.time_us["median"]) for row in mine]
            band = [(row.time_us["p10"], row.time_us["p90"]) for row in mine]
            hints = [f"{method}, {tokens} tokens: {median:.4g} us" for tokens, median in points]
            wrong = frozenset(i for i, row in enumerate(mine) if row.wrong)
            lines.append(Line(method, points, "own" if method == OWN else f"m{at % 8}", band, hints, wrong=wrong))
        title = f"{world_size} ranks, hidden {rows[0].hidden}"
        plots[title] = [Plot("Time by tokens", lines, Axis("tokens", log=True, base=2), Axis("time (us)", log=True))]
    return plots


def training(rows: Sequence[TrainingRow]) -> dict[str, list[Plot]]:
    """Test loss by bits, a plot a task."""
    plots = {}
    for _, mine in groupby(rows, key=lambda row: row.task):
        mine = list(mine)
        plots[training_report.title(mine)] = [loss_by_bits(mine)] if any(row.run.codec for row in mine) else []
    return plots


def loss_by_bits(rows: Sequence[TrainingRow]) -> Plot:
    """A line a mode and bucket size; the exact gradients' is a rule."""
    exact = training_report.mean([row for row in rows if row.run.codec is None], "test_loss")
    lines: dict[str, list[tuple[float, float]]] = {}
    for alike in training_report.alike([row for row in rows if row.run.codec]):
        name = f"{alike[0].mode}, buckets of {alike[0].run.codec.bucket_size}"
        lines.setdefault(name, []).append((alike[0].bits, training_report.mean(alike, "test_loss")))
    drawn = []
    for at, (name, points) in enumerate(lines.items()):
        points = sorted(points)
        hints = [f"{bits:g} bits: test loss {loss:.4f}" for bits, loss in points]
        drawn.append(Line(name, points, f"m{at % 8} d{at // 8}", hints=hints))
    return Plot("Test loss by bits of a gradient", drawn, Axis("bits"), Axis("test loss (nats)"), [(exact, "exact")])


def throughput(found: throughput_report.Findings) -> dict[str, list[Plot]]:
    """The speed-up of each model's step, by way."""
    ways = list(dict.fromkeys(str(row.way) for row in found.rows if not row.way.is_alone))
    lines = []
    for at, (model, rows) in enumerate(groupby(found.rows, key=lambda row: row.model)):
        rows = [row for row in rows if not row.way.is_alone]
        base = next(row.step_ms for row in rows if row.way.is_base)
        points = [(ways.index(str(row.way)), base / row.step_ms) for row in rows]
        hints = [f"{row.way}: {row.throughput:,.0f} {row.unit}/s" for row in rows]
        lines.append(Line(model, points, f"m{at % 8} d{at // 8}", hints=hints))
    if not lines:
        return {}
    x = Axis("how gradients are averaged", form=lambda at: ways[round(at)], ticks=range(len(ways)))
    y = Axis("times as fast", form="{:.2f}x".format)
    return {"": [Plot(f"Training steps, over {ways[0]}", lines, x, y, [(1.0, ways[0])])]}

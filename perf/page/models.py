"""The plots of what stands around an all-reduce: matmuls, training, the steps of models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from statistics import fmean

from graphar.timelines import PHASES
from perf.fused import report as fused_report
from perf.fused.methods import FLOORS
from perf.fused.timeline import Lane, Timeline
from perf.model import report as model_report
from perf.model.runs import ModelRow
from perf.model.ways import ALONE, UNSHARDED
from perf.norms import OWN, NormRow
from perf.page.bands import Band, Bands, Span
from perf.page.bars import Bar, Bars
from perf.page.plot import Axis, Line, Plot
from perf.throughput import report as throughput_report
from perf.training import report as training_report
from perf.training.report import TrainingRow

TIMELINE_WARPS = ("consumer 0", "consumer 1", "sender 0", "gatherer 0")
PHASE_STYLES = dict(zip(PHASES, ("own", "idle", "m0", "m2", "m1", "m3"), strict=True))


def fused(found: fused_report.Findings) -> dict[str, list[Plot | Bands]]:
    """Time by rows of activations, a plot a layer, and what one op did when."""
    plots = {}
    for sizes in dict.fromkeys((row.world_size, row.n, row.k) for row in found.rows):
        mine = [row for row in found.rows if (row.world_size, row.n, row.k) == sizes]
        plots[fused_report.title(*sizes)] = [floors(fused_report.by_rows(mine))]
        plots[fused_report.title(*sizes)] += map(timeline, fused_report.timelines_of(found, *sizes))
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


def timeline(one: Timeline) -> Bands:
    """A band a block: its consumers, the first sender, and the first warp that only gathers."""
    shown = [lane for lane in one.lanes if lane.warp in TIMELINE_WARPS]
    bands = [
        Band(str(block), [_spans(lane) for lane in lanes]) for block, lanes in groupby(shown, key=attrgetter("block"))
    ]
    warps = dict.fromkeys(lane.warp for lane in shown)
    note = f"Some of the first rank's blocks, one an SM. In each from the top: {', '.join(warps)}."
    note += " Before its first span a warp has not begun, and after its last it is done."
    wrong = "WRONG RESULT: " if one.wrong else ""
    title = f"{wrong}One op with M = {one.m}, {one.total_us:.1f} us: what its warps do when"
    return Bands(title, list(PHASE_STYLES.items()), bands, Axis("time (us)"), "block", note)


def _spans(lane: Lane) -> list[Span]:
    return [
        Span(event.begin_us, event.duration_us, event.phase, f"{event.phase}, {event.duration_us:.2f} us")
        for event in lane.events
    ]


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


def model(found: model_report.Findings) -> dict[str, list[Bars]]:
    """Computation and communication of each step, a plot a step and a bar a method."""
    plots = {}
    for title, by_method in model_report.by_step(found.rows).items():
        if alone := by_method.get(ALONE):
            bars = [_bar(row, alone) for name, row in by_method.items() if name != UNSHARDED]
            parts = [("computation", "m5"), ("communication, as far as it does not hide", "own")]
            note = f"Of the {alone.layers} layers that were timed. {ALONE}: without all-reduces, and so not the model."
            plots[title] = [Bars("Time of a step", parts, bars, note)]
    return plots


def _bar(row: ModelRow, alone: ModelRow) -> Bar:
    beyond = max(row.median - alone.median, 0.0)
    share = f", {beyond / row.median:.0%} of it communication" if row is not alone else ""
    text = f"{row.method}: {row.median:,.1f} us{share}" + (" (WRONG)" if row.wrong else "")
    return Bar(text, [row.median - beyond, beyond], wrong=bool(row.wrong))


def training(rows: Sequence[TrainingRow]) -> dict[str, list[Plot]]:
    """Training loss by step, and test loss by bits: those of each task."""
    plots = {}
    for _, mine in groupby(rows, key=lambda row: row.task):
        mine = list(mine)
        curves = [loss_by_step(mine)] if any(row.curve for row in mine) else []
        by_bits = [loss_by_bits(mine)] if any(row.run.codec for row in mine) else []
        plots[training_report.title(mine)] = curves + by_bits
    return plots


def loss_by_step(rows: Sequence[TrainingRow]) -> Plot:
    """A line for exact gradients and for each number of bits, each the mean over its seeds."""
    lines = []
    for at, runs in enumerate(shown(rows)):
        curves = [row.curve for row in runs if row.curve]
        points = [(step[0][0], fmean(loss for _, loss in step)) for step in zip(*curves, strict=True)]
        codec = runs[0].run.codec
        name = f"{codec.bits} bits" + (", EF" if runs[0].run.error_feedback else "") if codec else "exact"
        lines.append(Line(name, points, f"m{at - 1}" if codec else "own thin", label=name))
    codec = next((row.run.codec for row in rows if row.run.codec), None)
    of_codecs = f" Buckets of {codec.bucket_size}; EF: errors are fed back." if codec else ""
    note = f"Means over the ranks, {len(curves)} seeds and stretches of steps.{of_codecs}"
    return Plot("Training loss by step", lines, Axis("step"), Axis("training loss (nats)", log=True), note=note)


def shown(rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
    """Few enough to tell apart: the last exact way, each number of bits once, and the fewest with errors fed back.

    Of several ways with as many bits it is the first that rounds at random, or the first; the smallest bucket stands
    first.
    """
    alike = training_report.alike(rows)
    codecs = [runs for runs in alike if runs[0].run.codec]
    plain = [runs for runs in codecs if not runs[0].run.error_feedback]
    plain.sort(key=lambda runs: (-runs[0].run.codec.bits, runs[0].run.codec.rounding == "nearest"))
    each = [next(of_bits) for _, of_bits in groupby(plain, key=lambda runs: runs[0].run.codec.bits)]
    fed_back = [runs for runs in codecs if runs[0].run.error_feedback]
    fewest = min(fed_back, key=lambda runs: runs[0].run.codec.bits, default=None)
    exact = [runs for runs in alike if not runs[0].run.codec]
    return exact[-1:] + each + ([fewest] if fewest else [])


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
    """The speed-up of each model's step, by the ways that communicate beside the backward pass."""
    shown = [row for row in found.rows if not (row.way.is_alone or row.way.is_naive)]
    ways = list(dict.fromkeys(str(row.way) for row in shown))
    lines = []
    for at, (model, rows) in enumerate(groupby(shown, key=lambda row: row.model)):
        rows = list(rows)
        base = next(row.step_ms for row in rows if row.way.is_base)
        points = [(ways.index(str(row.way)), base / row.step_ms) for row in rows]
        hints = [f"{row.way}: {row.throughput:,.0f} {row.unit}/s" for row in rows]
        lines.append(Line(model, points, f"m{at % 8} d{at // 8}", hints=hints))
    if not lines:
        return {}
    x = Axis("how gradients are averaged", form=lambda at: ways[round(at)], ticks=range(len(ways)))
    y = Axis("times as fast", form="{:.2f}x".format)
    return {"": [Plot(f"Training steps, over {ways[0]}", lines, x, y, [(1.0, ways[0])])]}

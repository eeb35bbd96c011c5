"""The plots of what stands around an all-reduce: matmuls, training, the steps of models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from statistics import fmean

from graphar.matmul.timelines import PHASES
from perf import prefetch as prefetch_report
from perf.fused import report as fused_report
from perf.fused.methods import FLOORS
from perf.fused.sweep import FusedRow
from perf.fused.timeline import Lane, Timeline
from perf.model import report as model_report
from perf.model.runs import ModelRow
from perf.model.ways import ALONE, UNSHARDED
from perf.norms import BASES, OWN, NormRow
from perf.page.bands import Band, Bands, Span
from perf.page.bars import Bar, Bars
from perf.page.dots import Dot, Dots
from perf.page.plot import Axis, Line, Plot
from perf.throughput import report as throughput_report
from perf.throughput.report import ThroughputRow
from perf.training import report as training_report
from perf.training.report import TrainingRow

TIMELINE_WARPS = ("consumer 0", "consumer 1", "sender 0", "gatherer 0")
PHASE_STYLES = dict(zip(PHASES, ("own", "idle", "m0", "m2", "m1", "m3"), strict=True))


def fused(found: fused_report.Findings) -> dict[str, list[Plot | Bands]]:
    """Time by rows of activations, a plot a layer, and what one op did when."""
    plots = {}
    for sizes in dict.fromkeys((row.world_size, row.n, row.k) for row in found.rows):
        mine = [row for row in found.rows if (row.world_size, row.n, row.k) == sizes]
        by_rows = fused_report.by_rows(mine)
        plots[fused_report.title(*sizes)] = [floors(by_rows), overlap(by_rows)]
        plots[fused_report.title(*sizes)] += map(timeline, fused_report.timelines_of(found, *sizes))
    return plots


def floors(by_rows: Sequence[tuple[int, dict]]) -> Plot:
    """graphar's op and its best peer, above what either half takes alone."""
    picks = PICKS | {name: lambda by_method, name=name: by_method.get(name) for name in FLOORS}
    lines = []
    for style, (name, pick) in zip(("own", "m4", "m0", "m5 d1", "m5 d2"), picks.items(), strict=True):
        found = [(m, row) for m, by_method in by_rows if (row := pick(by_method))]
        lines.append(_by_rows(name, style, found, [row.median for _, row in found]))
    return Plot("Time, above the floors", _drawn(lines), M_AXIS, Axis("time (us)", log=True))


def overlap(by_rows: Sequence[tuple[int, dict]]) -> Plot:
    """The same over what both halves take one after the other: at 1 nothing hides."""
    timed = [
        (m, by_method)
        for m, by_method in by_rows
        if all(name in by_method and not by_method[name].wrong for name in FLOORS)
    ]
    both = {m: sum(by_method[name].median for name in FLOORS) for m, by_method in timed}
    longer = lambda by_method: max((by_method[name] for name in FLOORS), key=lambda row: row.median)  # noqa: E731
    lines = []
    for style, (name, pick) in zip(
        ("own", "m4", "m0", "m5 d1"), (PICKS | {"the longer floor": longer}).items(), strict=True
    ):
        found = [(m, row) for m, by_method in timed if (row := pick(by_method))]
        lines.append(_by_rows(name, style, found, [row.median / both[m] for m, row in found]))
    axis = Axis("time / (matmul + allreduce)", form="{:.2f}".format)
    note = "At 1.00 nothing of the all-reduce hides behind the matmul; at the dashed line all of the shorter one does."
    return Plot("Overlap", _drawn(lines), M_AXIS, axis, [(1.0, "one after the other")], note=note)


M_AXIS = Axis("M: rows of the activations", log=True, base=2)
PICKS = {
    "graphar, best": fused_report.best_own,
    "best peer": fused_report.best_peer,
    fused_report.SEQUENCE: lambda by_method: by_method.get(fused_report.SEQUENCE),
}


def _by_rows(name: str, style: str, found: Sequence[tuple[int, FusedRow]], values: Sequence[float]) -> Line:
    hints = [f"{row.method}, M = {m}: {row.median:.4g} us" for m, row in found]
    wrong = frozenset(at for at, (_, row) in enumerate(found) if row.wrong)
    points = [(m, value) for (m, _), value in zip(found, values, strict=True)]
    return Line(name, points, style, hints=hints, wrong=wrong)


def _drawn(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line.points]


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
    """Time by tokens, and the speed-up over the baseline: those of each number of ranks."""
    plots = {}
    for world_size in dict.fromkeys(row.world_size for row in found[0]):
        rows = [row for row in found[0] if row.world_size == world_size]
        base = {row.tokens: row for row in rows if row.method in BASES and not row.wrong}
        times, gains = [], []
        for at, method in enumerate(dict.fromkeys(row.method for row in rows)):
            mine = [row for row in rows if row.method == method]
            style = "own" if method == OWN else f"m{at % 8}"
            times.append(_by_tokens(mine, style, [row.time_us["median"] for row in mine], has_band=True))
            if all(row.tokens in base for row in mine):
                speeds = [base[row.tokens].time_us["median"] / row.time_us["median"] for row in mine]
                gains.append(_by_tokens(mine, style, speeds))
        title = f"{world_size} ranks, hidden {rows[0].hidden}"
        note = "Medians; bands from the 10th to the 90th percentile."
        plots[title] = [Plot("Time by tokens", times, TOKENS, Axis("time (us)", log=True), note=note)]
        if gains:
            of_what = next(iter(base.values())).method
            axis = Axis("times as fast", form="{:g}x".format)
            plots[title].append(Plot(f"Speed-up over {of_what}", gains, TOKENS, axis, [(1.0, of_what)]))
    return plots


TOKENS = Axis("tokens", log=True, base=2)


def _by_tokens(rows: Sequence[NormRow], style: str, values: Sequence[float], *, has_band: bool = False) -> Line:
    """One method's."""
    points = [(row.tokens, value) for row, value in zip(rows, values, strict=True)]
    band = [(row.time_us["p10"], row.time_us["p90"]) for row in rows] if has_band else ()
    hints = [f"{row.method}, {row.tokens} tokens: {row.time_us['median']:.4g} us" for row in rows]
    wrong = frozenset(at for at, row in enumerate(rows) if row.wrong)
    return Line(rows[0].method, points, style, band, hints, wrong=wrong)


def prefetch(found: prefetch_report.Found) -> dict[str, list[Plot]]:
    """What the hint gains, by rows of the sum: a line a layer, a plot a number of ranks."""
    plots = {}
    for world_size in dict.fromkeys(row.world_size for row in found[0]):
        rows = [row for row in found[0] if row.world_size == world_size]
        without, hinted = (
            {(row.n, row.m): row for row in rows if row.method == method}
            for method in (prefetch_report.SEQUENCE, prefetch_report.PREFETCHED)
        )
        lines = []
        for at, n in enumerate(dict.fromkeys(row.n for row in rows)):
            pairs = [(without[n, m], row) for (its_n, m), row in hinted.items() if its_n == n and (n, m) in without]
            times = [(before.time_us["median"], after.time_us["median"]) for before, after in pairs]
            points = [(after.m, old / new) for (_, after), (old, new) in zip(pairs, times, strict=True)]
            hints = [f"{new:.4g} us, without {old:.4g} us" for old, new in times]
            wrong = frozenset(i for i, pair in enumerate(pairs) if any(row.wrong for row in pair))
            lines.append(Line(f"N = {n}", points, f"m{at % 8}", hints=hints, wrong=wrong))
        axis = Axis("times as fast with the hint", form="{:g}x".format)
        x = Axis("M: rows of the sum", log=True, base=2)
        plots[f"{world_size} ranks"] = [Plot("All-reduce and matmul", lines, x, axis, [(1.0, "without")])]
    return plots


def model(found: model_report.Findings) -> dict[str, list[Bars]]:
    """Computation and communication of each step, a plot a step and a bar a method."""
    plots = []
    for title, by_method in model_report.by_step(found.rows).items():
        if alone := by_method.get(ALONE):
            bars = [_bar(row, alone) for name, row in by_method.items() if name != UNSHARDED]
            parts = [("computation", "m5"), ("communication, as far as it does not hide", "own")]
            note = f"Of the {alone.layers} layers that were timed. {ALONE}: without all-reduces, and so not the model."
            plots.append(Bars(f"Time of a step: {title}", parts, bars, note))
    return {"": plots} if plots else {}


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


def throughput(found: throughput_report.Findings) -> dict[str, list[Dots]]:
    """Of each model's step the speed-up by the ways that communicate beside the backward pass, and what communication
    takes of it."""
    rows = [row for row in found.rows if not row.way.is_alone]
    base = {row.model: row for row in rows if row.way.is_base and row.same_bits}
    alone = {row.model: row.step_ms for row in found.rows if row.way.is_alone}
    if not base:
        return {}
    of_what = str(next(iter(base.values())).way)
    compared = [row for row in rows if row.model in base and not (row.way.is_naive or row.way.is_base)]
    speeds = [_dot(row, base[row.model].step_ms / row.step_ms) for row in compared]
    exact = [row for row in rows if row.way.codec is None and row.model in alone]
    shares = [_dot(row, 1 - alone[row.model] / row.step_ms) for row in exact]
    times, percent = Axis("times as fast", form="{:.2f}x".format), Axis("share of a step", form="{:.0%}".format)
    naive = "One by one, flattened: blocking all-reduces behind the backward pass; the others overlap with it."
    note = naive if any(row.way.is_naive for row in exact) else ""
    gain = Dots(f"Training steps, over {of_what}", _ways(compared), speeds, times, (1.0, of_what))
    return {"": [gain, Dots("What communication adds to a step", _ways(exact), shares, percent, note=note)]}


def _dot(row: ThroughputRow, value: float) -> Dot:
    hint = f"{row.model}, {row.way}: {row.throughput:,.0f} {row.unit}/s, {row.step_ms:.2f} ms a step"
    return Dot(row.model, str(row.way), value, hint, wrong=not row.same_bits)


def _ways(rows: Sequence[ThroughputRow]) -> list[tuple[str, str]]:
    """With their colours; graphar's exact hook has its own."""
    names = list(dict.fromkeys(str(row.way) for row in rows))
    others = [name for name in names if name != "exact"]
    return [(name, "own" if name == "exact" else f"m{others.index(name) % 8}") for name in names]


def compiled(content: dict) -> dict[str, list[Dots]]:
    """What each kernel took to compile, a row a file."""
    kernels = sorted(content["kernels"], key=lambda one: one["file"])
    dots = [
        Dot(_stem(one["file"]), "a kernel", one["compile_s"], f"{one['kernel']}: {one['compile_s']:.2f} s")
        for one in kernels
    ]
    return {"": [Dots("Time to compile", [("a kernel", "own")], dots, Axis("s"))]} if dots else {}


def _stem(file: str) -> str:
    return file.rpartition("/")[2].removesuffix(".cu")

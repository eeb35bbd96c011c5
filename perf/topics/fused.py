"""`python -m perf fused`: times a fused matmul and all-reduce, its peers, and the matmul and all-reduce alone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from graphar.plan.call import Call, Operands
from graphar.plan.matmuls import fused_algorithm, owned_rows, tile_for
from graphar.plan.slices import rows_a_launch
from graphar.plan.tiles import MatmulTile
from graphar.plan.work import MATMUL_ALLREDUCE, Product
from graphar.product import timelines
from graphar.product.fused import fused_matmul
from graphar.product.timelines import PHASES
from graphar.runtime.registry import engine_of_group
from perf import fusion
from perf.charts import Axis, Figure, Mark, Rows
from perf.fusion import Cases, FusionRow, Trial
from perf.harness import verify
from perf.harness.ranks import Ranks, agreed
from perf.md import NOT_SERVED, number, plural, ratio_cell, table, time_cell
from perf.peers import matmuls as peers
from perf.products import sentence
from perf.ratios import by_method, ratio
from perf.report import Arguments, Section
from perf.timeline import DRAWN, Timeline, decode


def count_wrong(trial: Trial, launch: Callable[[], None], ranks: Ranks) -> int:
    """Runs the timed launch once more, and returns how many elements of this process's result are wrong."""
    if not trial.variant.whole:
        return fusion.count_wrong(trial, launch, ranks)
    result = verify.again(trial, launch, ranks).view(-1)
    alone = peers.own_product(*trial.layer.whole(ranks.device), partition="tp_invariant")
    return int(verify.differs(result, alone.view(-1)).sum())


class FusedRow(FusionRow):
    floors: ClassVar = peers.FLOORS


MAX_ROWS = 4096  # ops with more rows are not recorded


def recorded_layers(plan: peers.FusedPlan) -> list[peers.Layer]:
    """Returns the layers to record. For each K this is the layer with the most rows that runs as one launch."""
    if plan.device != "cuda":
        return []
    able = [layer for layer in plan.layers() if peers.MIN_ROWS <= layer.m <= MAX_ROWS and _is_one_launch(layer)]
    by_k = itertools.groupby(able, key=lambda layer: layer.k)
    return [max(mine, key=lambda layer: layer.m) for _, mine in by_k]


def _is_one_launch(layer: peers.Layer) -> bool:
    return max(owned_rows(layer.m, layer.world_size)) <= rows_a_launch(layer.world_size, layer.n)


class Recorder:
    """Calls graphar's op with ``partition="tiles"``. Each call in a CUDA graph records its own timeline."""

    def __init__(self, layer: peers.Layer, ranks: Ranks) -> None:
        self.work = Product(MATMUL_ALLREDUCE, tuple(owned_rows(layer.m, layer.world_size)), layer.n, partition="tiles")
        blocks = torch.cuda.get_device_properties(ranks.device).multi_processor_count
        self.timelines = [timelines.empty(blocks, ranks.device) for _ in range(layer.iterations)]
        self.calls = 0
        self.tile: MatmulTile | None = None  # known after the first call

    def __call__(self, a: Tensor, w: Tensor) -> Tensor:
        engine = engine_of_group("")
        out = a.new_empty(len(a), len(w))
        mine = self.timelines[self.calls % len(self.timelines)]
        algorithm = fused_algorithm(engine.table, self.work, engine.world_size)
        launches = fused_matmul(engine, Call.of(self.work, a), algorithm, timelines=[mine])
        launches.run([Operands((a, w), (out,))])
        self.tile = replace(tile_for(engine.table.matmul, launches.tiles, a.shape[1]), recorded=False)
        self.calls += 1
        return out

    @property
    def last(self) -> Tensor:
        """The timeline of the last call."""
        return self.timelines[(self.calls - 1) % len(self.timelines)]


def record(layer: peers.Layer, ranks: Ranks) -> Timeline | str:
    """Returns a timeline of the layer, or a message that says why there is none. Collective."""
    recorder = Recorder(layer, ranks)
    variant = peers.Variant(peers.TILES, recorder, exact=True, product=peers.product_of_tiles)
    trial = Trial(variant, layer, layer.operands(ranks.rank, ranks.device))
    ranks.barrier()
    launch, reason = agreed(ranks, trial.make_launch)
    if reason:
        return f"timeline, {layer}: {reason}"
    launch()
    ranks.barrier()
    for each in recorder.timelines:
        each.zero_()  # the number of events of warps that share work differs from call to call
    (wrong,) = ranks.total([count_wrong(trial, launch, ranks)])
    recorded = recorder.last.cpu()
    if recorded[:, :, -1].any():
        return f"timeline, {layer}: it has more events than there is room for"
    total_us, means, lanes = decode(recorded, recorder.tile.consumers)
    drawn = [lane for lane in lanes if lane.warp in DRAWN]
    return Timeline(layer.world_size, layer.m, layer.n, layer.k, str(recorder.tile), total_us, means, drawn, wrong)


SEQUENCE = f"{peers.AFTER}graphar"
# For each method that uses the partition "auto": whether another method uses a fixed partition or two ops instead.
VARIANTS = {
    "graphar": lambda name: name == SEQUENCE or (name.startswith("graphar:") and not name.endswith(peers.INT8)),
    f"graphar{peers.INT8}": lambda name: (
        name == f"{SEQUENCE}{peers.INT8}" or (name.startswith("graphar:") and name.endswith(peers.INT8))
    ),
}


@dataclass
class Fused(fusion.RowParallelReport):
    rows: list[FusedRow] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    order: ClassVar[int] = 9
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--rows 1 64 512 2048 8192", quick_on_gpus="--rows 64 2048 --features 8192"
    )
    added_fields: ClassVar[tuple[str, ...]] = ("skipped", "timelines")
    methods: ClassVar = (peers.CUDA_METHODS, peers.CPU_METHODS)
    make_variants: ClassVar = staticmethod(peers.make_variants)
    row_of: ClassVar = staticmethod(lambda layer: FusedRow)
    count_wrong: ClassVar = staticmethod(count_wrong)
    comparison: ClassVar = fusion.Comparison(peers.FLOORS, SEQUENCE)
    variants: ClassVar = VARIANTS

    @classmethod
    def recordings(cls, plan: peers.FusedPlan, layer: peers.Layer, ranks: Ranks) -> Iterator[Timeline | str]:
        if peers.TILES in plan.methods and layer in recorded_layers(plan):
            yield record(layer, ranks)

    def line(self, row: FusedRow | Timeline) -> str:
        if not isinstance(row, Timeline):
            return super().line(row)
        return f"{row.world_size:>2} ranks, timeline of {row.m} x {row.n} x {row.k}: {row.total_us:.2f} us"

    def wrong(self) -> list[str]:
        timelines = [f"the timeline at {one.m} x {one.n} x {one.k}" for one in self.timelines if one.wrong]
        return super().wrong() + timelines

    def checked(self) -> int:
        return super().checked() + len(self.timelines)

    def sections(self) -> list[Section]:
        layers = dict.fromkeys(map(self.layer_of, self.rows))
        return [self._with_timelines(*one) for one in zip(layers, super().sections(), strict=True)]

    def _with_timelines(self, layer: tuple, section: Section) -> Section:
        of_layer = [one for one in self.timelines if self.layer_of(one) == layer]
        body = [text for one in of_layer for text in (recorded(one), phases(one))]
        figures = [timeline_chart(one) for one in of_layer]
        return replace(section, body=[*section.body, *body], figures=[*section.figures, *figures])

    def tables_of(self, cases: Cases) -> list[str]:
        return [*super().tables_of(cases), *invariance_table(cases)]

    def findings(self) -> list[str]:
        found, cases = super().findings(), self.cases()
        for name, over in OF_INVARIANT.items():
            ratios = {self.in_words(case): one for case, rows in cases.items() if (one := of_invariant(rows, over))}
            found += [sentence(f"`tp_invariant` / {name}", plural(len(ratios), "case"), ratios)] if ratios else []
        return found

    def cases(self) -> dict[tuple[int, int, int], dict[str, FusedRow]]:
        return by_method(self.rows, lambda row: (row.world_size, row.k, row.m))

    @staticmethod
    def in_words(case: tuple[int, int, int]) -> str:
        world_size, k, m = case
        return f"M = {m}, K = {k}, {world_size} ranks"


# By name, the methods that "tp_invariant" is compared with: the first that was measured.
OF_INVARIANT = {"auto": ("graphar",), "torch": (f"{peers.AFTER}nccl", f"{peers.AFTER}gloo")}


def of_invariant(rows: Mapping[str, FusedRow], over: Sequence[str]) -> float | None:
    """Returns the time of "tp_invariant" / that of the first method of ``over`` that was measured."""
    return ratio(rows.get(peers.TP_INVARIANT), next((rows[name] for name in over if name in rows), None))


def invariance_table(cases: Cases) -> list[str]:
    """Returns a caption and a table with a row for each M; an empty list if "tp_invariant" was not measured."""
    lines = [
        [
            str(m),
            time_cell(rows[peers.TP_INVARIANT]),
            *(ratio_cell(of_invariant(rows, one)) for one in OF_INVARIANT.values()),
        ]
        for m, rows in cases.items()
        if peers.TP_INVARIANT in rows
    ]
    header = ["M", f"{peers.TP_INVARIANT} (us)", *(f"of_{name}" for name in OF_INVARIANT)]
    return ["The same bits at every number of ranks, `tp_invariant`:", table(header, lines)] if lines else []


def recorded(one: Timeline) -> str:
    """Returns a description of the recorded op."""
    wrong = " The result was **WRONG**." if one.wrong else ""
    return (
        f"Timeline of one call with M = {one.m} and the tile `{one.tile}`: {number(one.total_us)} us on the"
        f" first rank.{wrong} The table shows the mean time that warps of each kind spend in each phase."
    )


def phases(one: Timeline) -> str:
    time_us = {(mean.warp, mean.phase): f"{mean.time_us:.1f}" for mean in one.means}
    warps = dict.fromkeys(mean.warp for mean in one.means)
    lines = [[warp, *(time_us.get((warp, phase), NOT_SERVED) for phase in PHASES)] for warp in warps]
    return table(["warp", *(f"{phase} (us)" for phase in PHASES)], lines)


def timeline_chart(one: Timeline) -> Figure:
    """Returns a chart with a row for each drawn warp of each block."""
    marks = [
        Mark(
            f"{lane.block} {lane.warp}",
            event.phase,
            event.begin_us + event.duration_us,
            f"{lane.warp} of block {lane.block}, {event.phase}: {event.duration_us:.2f} us",
            event.begin_us,
        )
        for phase in PHASES
        for lane in one.lanes
        if lane.warp in DRAWN
        for event in lane.events
        if event.phase == phase
    ]
    wrong = "WRONG RESULT: " if one.wrong else ""
    title = f"{wrong}Timeline of one call with M = {one.m}, {number(one.total_us)} us"
    rows = list(dict.fromkeys(f"{lane.block} {lane.warp}" for lane in one.lanes if lane.warp in DRAWN))
    note = "Some warps of some of the first rank's blocks. Each SM runs one block."
    return Rows(title, marks, Axis("time (us)"), note=note, order=rows, bar_height=0.9, faint="waiting")

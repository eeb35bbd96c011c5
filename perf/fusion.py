"""The common code of `perf fused`, `fused_fp8` and `gathered`, which time matmuls fused with a collective.

A report compares the fused op with its peers, and with the matmul alone and the collective alone (the floors).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from perf.between_ranks import BetweenRanks
from perf.charts import OF_BEST_PEER, Axis, Line, Plot
from perf.choices import choice_table, choices
from perf.harness import ranks as ranks_of
from perf.harness import verify
from perf.harness.ranks import Ranks, case_by_case, timed_in_turn
from perf.harness.timing import Repeated, spread
from perf.md import NOT_SERVED, columns, name_cell, ratio_cell, time_cell, time_table
from perf.peers import fp8_matmuls, gathered, matmuls
from perf.peers.matmuls import FEATURES, HIDDEN, INT8, ROWS, FusedPlan, Layer, Variant
from perf.ratios import best, best_peer, by_method, group, of_best_peer, ratio, words_for
from perf.report import Choice, Glance, Section, Spread, Timing

CPU_ROWS, CPU_COLUMNS, CPU_FEATURES = (16, 256), 256, (256,)
FLOORS = {*matmuls.FLOORS, *fp8_matmuls.FLOORS, *gathered.FLOORS}  # methods that run one of the two steps alone
ROUNDED_SHARE = 2.0**-13  # tolerance for sums with cancellation, relative to the largest sum of magnitudes


class Trial(Repeated):
    """Runs one method on one layer."""

    def __init__(self, variant: Variant, layer: Layer, operands: Sequence[Tensor]) -> None:
        on_gpu = operands[0].is_cuda
        super().__init__(partial(variant.call, *operands), layer.iterations if on_gpu else 1, on_gpu)
        self.variant, self.layer, self.operands = variant, layer, operands


def is_far(result: Tensor, expected: Tensor, parts: list[Tensor], lost: Sequence[Tensor] = ()) -> Tensor:
    """Returns a mask of wrong elements. Rounding in sums, and products of another kernel, are allowed to differ.

    Args:
        lost: how much more each rank's product may differ.
    """
    magnitude = sum(part.float().abs() for part in parts)
    share = verify.tolerance(result.dtype) + torch.finfo(result.dtype).eps
    return verify.exceeds(result, expected, magnitude * share + magnitude.max() * ROUNDED_SHARE + sum(lost))


@dataclass(frozen=True)
class FusionRow(Timing):
    """The measured and verified time of one method on one layer, of the sizes [m, k] x [n, k]^T on one rank."""

    method: str
    world_size: int
    m: int
    n: int
    k: int
    time_us: Spread
    wrong: int

    @property
    def more(self) -> tuple[str, ...]:
        """What tells layers of the same sizes apart, in words."""
        return ()

    @property
    def what(self) -> tuple[str, ...]:
        return *self.more, f"{self.m} x {self.n} x {self.k}"

    @property
    def layer(self) -> str:
        return ", ".join([*self.more, f"{self.world_size} ranks", f"N = {self.n}", f"K = {self.k}"])

    @property
    def is_peer(self) -> bool:
        return not self.is_own and self.method not in FLOORS


Cases = Mapping[int, Mapping[str, FusionRow]]  # by rows and method


def best_own(rows: Mapping[str, FusionRow]) -> FusionRow | None:
    """Returns the fastest row of graphar's fused methods without a codec."""
    return best(row for name, row in rows.items() if name.split(":")[0] == "graphar" and not name.endswith(INT8))


M_AXIS = Axis("M: rows of the activations", 2)


def _line(name: str, rows: Mapping[int, FusionRow], over: Mapping[int, FusionRow]) -> Line:
    points = [(m, row.median / over[m].median) for m, row in rows.items()]
    return Line(name, points, wrong=frozenset(at for at, row in enumerate(rows.values()) if row.wrong))


def count_wrong(
    trial: Trial,
    launch: Callable[[], None],
    ranks: Ranks,
    product: Callable[..., Tensor] | None = None,
    most_lost: Callable[..., Tensor] | None = None,
) -> int:
    """Runs the timed launch once more, and returns how many elements of this process's result are wrong.

    Args:
        product: computes this rank's product, with the op's bits; None: as the method says.
        most_lost: how much more the product of a method that is not exact may differ, for this rank's operands.
    """
    result, variant = verify.again(trial, launch, ranks).view(-1), trial.variant
    whole = (product or variant.product)(*trial.operands).view(-1)
    lost = most_lost(*trial.operands).view(-1) if most_lost and not variant.exact else None

    def summands(x: Tensor, window: slice) -> list[Tensor]:
        return ranks.gather(x, window) if variant.summed else [x[window]]

    wrong = 0
    for window in verify.windows(whole.numel()):
        output, parts = result[window], summands(whole, window)
        expected = verify.reference(parts, 1, variant.codec)
        if variant.exact:
            bad = verify.differs(output, expected)
        else:
            bad = is_far(output, expected, parts, () if lost is None else summands(lost, window))
        wrong += int(bad.sum())
    return wrong


@dataclass
class FusionReport(BetweenRanks):
    """The base class of topics that compare a fused op with its variants and its peers.

    Class attributes:
        methods: the names of the methods on GPUs, and on the CPU.
        make_variants: ``make_variants(plan, ranks)`` returns a plan's methods, and why some are missing. Collective.
        row_of: ``row_of(layer)`` returns a function that makes a row, with the fields of :class:`FusionRow`.
        count_wrong: ``count_wrong(trial, launch, ranks)`` runs a launch once more, and returns how many elements of
            this process's result are wrong.
        floors: the methods that run only the matmul, and only the collective.
        sequence: the method that runs torch's matmul and graphar's collective as two ops.
        plans: makes a plan of a device, a number of ranks, rows, columns, features and methods.
        sizes: the rows, columns and features by default, on GPUs and on the CPU.
        width: the field of a row that tells the layers of a report apart: "k" or "n".
        variants: for each method that uses the partition "auto", a function that says whether another method is a
            variant: a fixed partition, or two ops instead.
    """

    has_spread: ClassVar[bool] = True
    methods: ClassVar[tuple[Sequence[str], Sequence[str]]]
    make_variants: ClassVar[Callable[..., tuple[list[Variant], list[str]]]]
    row_of: ClassVar[Callable[[Layer], Callable[..., FusionRow]]] = staticmethod(lambda layer: FusionRow)
    count_wrong: ClassVar[Callable[[Trial, Callable[[], None], Ranks], int]] = staticmethod(count_wrong)
    floors: ClassVar[tuple[str, str]]
    sequence: ClassVar[str]
    width: ClassVar[str] = "k"
    variants: ClassVar[Mapping[str, Callable[[str], bool]]]
    of_rows: ClassVar[str]  # the help text of --rows
    plans: ClassVar[type[FusedPlan]] = FusedPlan
    sizes: ClassVar[tuple] = ((ROWS, HIDDEN, FEATURES), (CPU_ROWS, CPU_COLUMNS, CPU_FEATURES))

    @classmethod
    def work(cls, plan: FusedPlan, rank: int, port: int) -> Iterator:
        ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
        variants, skipped = cls.make_variants(plan, ranks)
        yield from skipped
        ranks.warm_up()

        yield from case_by_case(ranks, (cls.rows_of(layer, variants, ranks) for layer in plan.layers()))

    @classmethod
    def rows_of(cls, layer: Layer, variants: Sequence[Variant], ranks: Ranks) -> Iterator[FusionRow | str]:
        """Yields a row for each method that can run the layer, and a message for each that cannot. Collective."""
        operands = layer.operands(ranks.rank, ranks.device)
        serving = [variant for variant in variants if variant.serves(layer)]
        trials = ((f"{variant.name}, {layer}", Trial(variant, layer, operands)) for variant in serving)
        how = ("graph", layer.iterations) if ranks.device.type == "cuda" else ("cpu", 1)
        timed, refused = timed_in_turn(ranks, trials, layer.repeats, *how)
        yield from refused
        if not timed:
            return
        wrong = ranks.total([cls.count_wrong(trial, launch, ranks) for trial, launch, _ in timed])
        for (trial, _, times), bad in zip(timed, wrong, strict=True):
            sizes = (layer.world_size, layer.m, layer.n, layer.k)
            yield cls.row_of(layer)(trial.variant.name, *sizes, spread(times), bad)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--rows", type=int, nargs="+", metavar="M", help=cls.of_rows)
        cls.add_shapes(parser)
        known = ", ".join(dict.fromkeys(name for of_device in cls.methods for name in of_device))
        told = f"{known} (default: all methods of the device)"
        parser.add_argument("--methods", nargs="+", choices=known.split(", "), metavar="METHOD", help=told)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int, **more) -> list[FusedPlan]:
        """Returns one plan for each world size. ``more`` are the fields that a topic's plans have besides."""
        device, at = ("cuda", 0) if gpu_count >= 2 else ("cpu", 1)
        world_sizes, methods = cls.world_sizes(options, gpu_count), options.methods or cls.methods[at]
        if unknown := [name for name in methods if name not in cls.methods[at]]:
            sys.exit(f"{', '.join(unknown)}: not on this machine, which has {', '.join(cls.methods[at])}")
        named = options.rows, options.columns, options.features
        sizes = [chosen or default for chosen, default in zip(named, cls.sizes[at], strict=True)]
        return [cls.plans(device, world_size, *sizes, methods, **more) for world_size in world_sizes]

    def sections(self) -> list[Section]:
        sections = []
        for title, of_layer in group(self.rows, lambda row: row.layer).items():
            cases = by_method(of_layer, lambda row: row.m)
            every = time_table("M", {str(m): rows for m, rows in cases.items()})
            body = [*self.tables_of(cases), "Times of all methods:", every]
            sections.append(Section(title[:1].upper() + title[1:], body, [self.ratios_plot(cases)]))
        return sections

    def table_of(self, cases: Cases) -> str:
        """Returns the table of one layer."""
        ours, peer = (lambda rows: rows.get("graphar")), (lambda rows: best_peer(rows.values()))
        cells = {
            "M": lambda rows: next(iter(rows.values())).m,
            **{f"{name} (us)": lambda rows, name=name: time_cell(rows.get(name)) for name in self.floors},
            f"{self.sequence} (us)": lambda rows: time_cell(rows.get(self.sequence)),
            "best peer": lambda rows: name_cell(peer(rows)),
            "best peer (us)": lambda rows: time_cell(peer(rows)),
            "graphar (us)": lambda rows: time_cell(ours(rows)),
            "best graphar": lambda rows: name_cell(best_own(rows)),
            "best graphar (us)": lambda rows: time_cell(best_own(rows)),
            "of_best_peer": lambda rows: ratio_cell(ratio(ours(rows), peer(rows))),
            "of_sequence": lambda rows: ratio_cell(ratio(ours(rows), rows.get(self.sequence))),
            "hidden (%)": lambda rows: self.hidden(rows, best_own(rows)),
        }
        return columns(cases.values(), cells)

    def hidden(self, rows: Mapping[str, FusionRow], row: FusionRow | None) -> str:
        """Returns the overlap of matmul and collective, as a percentage of the shorter one."""
        floors = [rows.get(name) for name in self.floors]
        if row is None or any(floor is None or floor.wrong for floor in floors):
            return NOT_SERVED
        times = [floor.median for floor in floors]
        return f"{100 * (sum(times) - row.median) / min(times):.0f}"

    @classmethod
    def ratios_plot(cls, cases: Cases) -> Plot | None:
        """Plots the times of graphar's methods / the best peer's time, for one layer."""
        peers = {m: best_peer(rows.values()) for m, rows in cases.items()}
        picks = {
            "graphar": lambda rows: rows.get("graphar"),
            "best graphar": best_own,
            cls.sequence: lambda rows: rows.get(cls.sequence),
        }
        lines = []
        for name, pick in picks.items():
            rows = {m: row for m, of_m in cases.items() if peers[m] and (row := pick(of_m))}
            lines += [_line(name, rows, peers)] if rows else []
        return Plot("Time / best peer's time", lines, M_AXIS, OF_BEST_PEER, 1.0) if lines else None

    def tables_of(self, cases: Cases) -> list[str]:
        """Returns the tables of a layer that stand before the times of all methods."""
        return [self.table_of(cases), *choice_table("M", choices(cases, self.variants))]

    def cases(self) -> dict:
        return by_method(self.rows, lambda row: (row.world_size, *row.more, getattr(row, self.width), row.m))

    @classmethod
    def in_words(cls, case: tuple) -> str:
        world_size, *more, width, m = case
        return ", ".join([f"M = {m}", f"{cls.width.upper()} = {width}", *more, f"{world_size} ranks"])

    def findings(self) -> list[str]:
        loss = self.loss_of_auto()
        return [f"The time of `auto` / the fastest variant's time is at most {loss}."] if loss else []

    def losses(self) -> list[tuple[str, Choice]]:
        return [(self.in_words(case), choice) for (case, _), choice in choices(self.cases(), self.variants).items()]

    def glance(self) -> Glance:
        named = {self.in_words(case): value for case, value in of_best_peer(self.cases()).items()}
        over = words_for([row.method for row in self.rows if row.is_peer])
        return Glance(f"graphar's time / the time of {over}, by number of rows", named)


@dataclass
class RowParallelReport(FusionReport):
    """The base class of topics of row-parallel layers."""

    of_rows: ClassVar[str] = "rows of the activations (default: 1 to 16384)"

    @classmethod
    def add_shapes(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--columns", type=int, metavar="N", help="columns of the result (default: 8192)")
        whole = "input features of the whole layers, over all ranks (default: 8192 28672)"
        parser.add_argument("--features", type=int, nargs="+", metavar="K", help=whole)

"""`python -m perf host`: times eager calls of every public op on the host."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from perf.between_ranks import BetweenRanks
from perf.host_calls import APART, CPU, PEERS_OP, PLAIN, SHARED, HostPlan, HostRow, run_rank
from perf.md import NOT_SERVED, columns, number, ratio_cell, time_cell
from perf.ratios import extent
from perf.report import Arguments, Glance, Section

WORDS = "host time of an eager call / that of a plain all-reduce with as many outputs"
# Ranks that share a GPU wait for each other's time slices, so that each call takes the GPU milliseconds.
CALLS, BURSTS = {APART: 64, SHARED: 16, CPU: 1}, {APART: 60, SHARED: 25, CPU: 5}


@dataclass
class Host(BetweenRanks):
    rows: list[HostRow] = field(default_factory=list)

    order: ClassVar[int] = 16
    arguments: ClassVar[Arguments] = Arguments(quick_on_gpus="--bursts 15", quick_on_cpu="--bursts 3")
    has_spread: ClassVar[bool] = True
    takes_many: ClassVar[bool] = False
    work: ClassVar = staticmethod(run_rank)

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--bursts", type=int, metavar="N", help="bursts of each call (default: by place)")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> HostPlan:
        (world_size,) = cls.world_sizes(options, gpu_count)
        place = APART if gpu_count >= 2 else SHARED if gpu_count else CPU
        return HostPlan(place, world_size, CALLS[place], options.bursts or BURSTS[place])

    def line(self, row: HostRow) -> str:
        what = f"{row.method} {row.op} {row.option}".rstrip()
        return f"{what:<70} {row.median:>9.2f} us {ratio_cell(row.of_allreduce):>6} {row.wrong:>4} wrong"

    def sections(self) -> list[Section]:
        if not self.rows:
            return []
        first = self.rows[0]
        title = f"{first.world_size} ranks, {first.place}"
        return [Section(title, [host_table(self.rows)])]

    def findings(self) -> list[str]:
        """Returns the time of an all-reduce beside the fastest peer's, and which calls exceed their limit."""
        limited = [row for row in self.rows if has_limit(row)]  # on the CPU there are no limits
        if not limited:
            return []
        over = [f"{named(row)} ({row.of_allreduce:.2f})" for row in limited if row.exceeds]
        exceed = f"{len(over)} of {len(limited)} calls exceed their limit{': ' if over else ''}{', '.join(over)}."
        return [*self._compared(), exceed]

    def _compared(self) -> list[str]:
        correct = [row for row in self.rows if not row.wrong]
        plain = next((row for row in correct if row.is_own and (row.op, row.option) == ("allreduce", PLAIN)), None)
        peer = min((row for row in correct if row.op == PEERS_OP), key=lambda row: row.median, default=None)
        if plain is None or peer is None:
            return []
        ours, other = number(plain.median), number(peer.median)
        return [f"An all-reduce takes the host {ours} us; with {peer.method}, the fastest peer, it takes {other} us."]

    def glance(self) -> Glance:
        ratios = {named(row): row.of_allreduce for row in self.rows if row.limit is not None and not row.wrong}
        return Glance(WORDS, figure=extent(ratios) if ratios else NOT_SERVED)


def has_limit(row: HostRow) -> bool:
    return row.limit is not None and row.place != CPU


def named(row: HostRow) -> str:
    """Returns the op, and its options in brackets."""
    return f"{row.op} ({row.option})" if row.option else row.op


def host_table(rows: Sequence[HostRow]) -> str:
    def compared(row: HostRow) -> str:
        ratio = ratio_cell(row.of_allreduce)
        return f"**{ratio}**" if has_limit(row) and row.exceeds else ratio

    cells = {
        "op": lambda row: row.op if row.is_own else f"{row.method}'s {row.op}",
        "option": lambda row: row.option or NOT_SERVED,
        "outputs": lambda row: row.outputs,
        "host time (us)": time_cell,
        "p10 - p90": lambda row: f"{number(row.time_us['p10'])} - {number(row.time_us['p90'])}",
        "of_allreduce": compared,
        "limit": lambda row: f"{row.limit:.1f}" if has_limit(row) else NOT_SERVED,
    }
    return columns(rows, cells)

"""`python -m perf nvlink`: reads the hardware's counters of NVLink traffic during all-reduces."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphar.cli.options import size
from graphar.plan.sizes import format_nbytes
from perf.harness import links
from perf.harness.cases import SIZES, Case, LinkCeiling, Plan, Row
from perf.machine import check_world_sizes
from perf.report import Arguments, Glance, Section, Timed
from perf.topics.allreduce import AllReduce, bandwidth, nvlink_sections

NO_LINKS = "NVLink traffic: needs at least 2 GPUs with NVLink"


@dataclass(frozen=True)
class TrafficPlan(Plan):
    """The sizes whose traffic is counted, in CUDA graphs."""

    def cases(self) -> Iterator[Case]:
        for nbytes in self.up_to_max(SIZES):
            if nbytes >= links.MIN_NBYTES:
                yield self.case("graph", nbytes)


@dataclass
class NVLink(AllReduce):
    order: ClassVar[int] = 1
    has_spread: ClassVar[bool] = False
    # A run of all topics skips this one, because `allreduce` counts the same traffic.
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus=None, on_cpu=None, quick_on_gpus="--max-nbytes 64M", quick_on_cpu="--max-nbytes 64M"
    )

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--world-size", type=int, nargs="+", metavar="N", help="ranks (default: all GPUs)")
        parser.add_argument("--max-nbytes", type=size, metavar="SIZE", help="the largest tensor (default: 2G)")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> list[TrafficPlan]:
        if gpu_count < 2:
            return []
        world_sizes, max_nbytes = options.world_size or [gpu_count], options.max_nbytes or SIZES[-1]
        check_world_sizes(world_sizes, gpu_count)
        return [TrafficPlan("cuda", n, "process", ("bfloat16",), links.METHODS, max_nbytes) for n in world_sizes]

    def measure(self, plan: Sequence[TrafficPlan]) -> Iterator[Row | LinkCeiling | str]:
        if not plan:
            yield NO_LINKS
        yield from super().measure(plan)

    def findings(self) -> list[str]:
        return []

    def sections(self) -> list[Section]:
        found = []
        for section, world_size in zip(
            nvlink_sections(self.rows), dict.fromkeys(row.world_size for row in self.rows if row.nvlink), strict=True
        ):
            mine = [row for row in self.rows if row.world_size == world_size]
            drawn = bandwidth(mine, (self.link_ceiling or {}).get(world_size))
            found.append(Section(section.title, section.body, [*section.figures, drawn]))
        return found

    def glance(self) -> Glance:
        """Returns a summary for the largest number of ranks and the largest size."""
        rows = [row for row in self.rows if row.method == "graphar" and row.nvlink and not row.wrong]
        if not rows:
            return Glance("nothing was counted here")
        row = max(rows, key=lambda one: (one.world_size, one.nbytes))
        overhead, raw = row.nvlink.protocol_overhead, row.nvlink.raw_share
        at = f"at {format_nbytes(row.nbytes)} between {row.world_size} ranks"
        return Glance(
            f"of the links' raw rate is used {at}; {overhead / (1 + overhead):.0%} of the traffic is protocol overhead",
            figure="not timed" if raw is None else f"{raw:.0%}",
        )

    def timed(self) -> list[Timed]:
        return []

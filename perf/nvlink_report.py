"""`python -m perf nvlink`: what the links carry while all-reduces run, by NVLink's own counters, link by link."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphar.cli.options import size
from graphar.plan.sizes import format_nbytes
from perf import files, live, report, sweep, traffic
from perf import machine as machines
from perf.cases import SIZES, Case, Plan
from perf.compare import verdict
from perf.machine import check_world_sizes
from perf.report import Findings
from perf.rows import Row
from perf.tables import nvlink_table, table

NO_LINKS = "NVLink: it needs at least 2 GPUs that it joins"


@dataclass(frozen=True)
class TrafficPlan(Plan):
    """The sizes whose traffic is counted, in CUDA graphs."""

    def cases(self) -> Iterator[Case]:
        for nbytes in self._up_to_max(SIZES):
            if nbytes >= traffic.MIN_NBYTES:
                yield self._case("graph", nbytes)


def add(commands) -> argparse.ArgumentParser:
    nvlink = commands.add_parser(
        "nvlink",
        help="what NVLink carries during all-reduces, link by link",
        description="Counts what each NVLink carries during all-reduces. The sweep of `allreduce` counts the same.",
    )
    nvlink.add_argument("--world-size", type=int, nargs="+", metavar="N", help="numbers of ranks (default: all GPUs)")
    nvlink.add_argument("--max-nbytes", type=size, metavar="SIZE", help="largest size (default: 2G)")
    return nvlink


def run(options: argparse.Namespace, folder: Path, block: dict[str, object], command: str) -> int:
    """What was counted is written even where a later size fails."""
    found, gpu_count = Findings(), block["gpu_count"]
    world_sizes = options.world_size or [gpu_count]
    max_nbytes = options.max_nbytes or SIZES[-1]
    if gpu_count < 2:
        world_sizes = []
        found.skipped.append(NO_LINKS)
    else:
        check_world_sizes(world_sizes, gpu_count)
    plans = [TrafficPlan("cuda", n, "process", ("bfloat16",), traffic.METHODS, max_nbytes) for n in world_sizes]

    def write_found() -> tuple[Path, str]:
        return write(folder, block, found, command), verdict(found.rows)

    with live.reported("nvlink", sum(plan.row_count() for plan in plans), found.skipped, write_found) as advance:
        for message in (message for plan in plans for message in sweep.run(plan)):
            advance()
            live.take(message, found)
    return int(any(row.wrong for row in found.rows))


# ---- the report -----------------------------------------------------------------------------------------------------


def write(folder: Path, machine: dict[str, object], found: Findings, command: str) -> Path:
    """Both files. Returns the one for people."""
    content = report.content_of(machine, found, command)
    return files.write(folder, "nvlink", content, markdown(machine, found, command))


def markdown(machine: dict[str, object], found: Findings, command: str) -> str:
    parts = ["# What NVLink carries", machines.one_line(machine) + ".", verdict(found.rows)]
    counted = [row for row in found.rows if row.nvlink]
    for world_size in dict.fromkeys(row.world_size for row in counted):
        mine = [row for row in counted if row.world_size == world_size]
        parts += [f"## {world_size} ranks", report.NVLINK_TABLE, nvlink_table(mine)]
        largest = max(row.nbytes for row in mine)
        if links := link_table([row for row in mine if row.nbytes == largest]):
            parts += [f"Each link's share of its raw rate, at {format_nbytes(largest)}:", links]
    if found.skipped:
        parts += ["## Not measured", report.bullets(found.skipped)]
    return "\n\n".join([*parts, "## How to reproduce", f"```\n{command}\n```"]) + "\n"


def link_table(rows: Sequence[Row]) -> str:
    """Links down, methods across; nothing where links were not counted one by one."""
    shares: dict[str, Mapping[int, float | None]] = {
        row.method: {link["link"]: link["raw_share"] for link in row.nvlink["links"]} for row in rows
    }
    links = sorted({link for by_link in shares.values() for link in by_link})
    cells = [[str(link), *(_percent(by_link.get(link)) for by_link in shares.values())] for link in links]
    return table(["link", *shares], cells) if links else ""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


found_in = report.found_in

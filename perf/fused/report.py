"""The report of fused matmuls: fused.json for machines, fused.md for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from graphar.matmul.timelines import PHASES
from perf import files
from perf import machine as machines
from perf.fused.methods import AFTER, ALLREDUCE, FLOORS, INT8, MATMUL
from perf.fused.sweep import FusedRow
from perf.fused.timeline import Timeline
from perf.report import bullets
from perf.tables import table

SEQUENCE = f"{AFTER}graphar"

COLUMNS = """\
- M: rows of the activations. Every rank has [M, K] of them and [N, K] of the weight; K is one rank's.
- times: microseconds of one operation in a CUDA graph of independent ones, bfloat16; the median over the repeats, each
  repeat the slowest rank's time. Methods took turns within each repeat.
- matmul, allreduce: either alone, torch's matmul and graphar's all-reduce: the floors.
- graphar: `graphar.fused_matmul_allreduce` as a user calls it. best graphar: the fastest of it and its partitions,
  cut, number, and after the @ the blocks of the sums that have a matmul beside them, by two_shot_pipelined or TMA.
- best peer: the fastest method of others in the same run that sends all bits and whose result was right.
- of_best_peer: graphar's time / the best peer's; below 1.00 graphar is faster. Under 3 % is noise.
- of_sequence: graphar's time / that of torch's matmul followed by graphar's all-reduce.
- hidden: of the shorter of the two floors, the share that best graphar's time does not show.

Methods: `matmul+...` is torch's matmul, then that all-reduce; `chunked_nccl@...` torch's matmul of so many chunks of
rows, each summed by NCCL beside the next; `symm_fused` torch's pipelined matmul and reduce-scatter over symmetric
memory, then NCCL's all-gather; `..._int8` graphar's with that codec on the wire.

Where the time goes: one op in one kernel, `graphar:tiles`, the last of some in a row in a CUDA graph, whose kernel
tells what its warps do when; times begin with its first product. Consumers are multiplying (waits for loads count),
adding all ranks' parts of what the rank itself sums, and staging what senders then are sending; waiting is for other
warps and ranks. Senders, and the loader, whose loading is not told, in the end do what gatherers do: gathering what
other ranks have summed into the output. Before and after all this a warp is idle.

Every figure's result was verified on random data, on all ranks: graphar's bit for bit against the specification's sum
of the products that the op itself makes; the others', which have torch's products or round at every hop, to within 2
machine epsilons of the sum of magnitudes. What was checked is a replay of the timed graph. NVLink multicast was off for
all, unless a user of this command turned it on."""


@dataclass
class Findings:
    """What a run has found so far; ``skipped`` is what was not measured, and why."""

    rows: list[FusedRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)


def write(folder: Path, machine: dict[str, object], found: Findings, command: str) -> Path:
    """Both files. Returns the one for people."""
    content = {
        "machine": machine,
        "command": command,
        "rows": [asdict(row) for row in found.rows],
        "timelines": [asdict(timeline) for timeline in found.timelines],
        "skipped": found.skipped,
    }
    return files.write(folder, "fused", content, markdown(machine, found, command))


def found_in(content: dict) -> Findings:
    """What :func:`write` was given, from its JSON."""
    rows = [FusedRow(**row) for row in content["rows"]]
    return Findings(rows, content["skipped"], [Timeline.from_json(timeline) for timeline in content["timelines"]])


def markdown(machine: dict[str, object], found: Findings, command: str) -> str:
    parts = ["# Matmul and all-reduce as one op", machines.one_line(machine) + ".", verdict(found)]
    for world_size, n, k in dict.fromkeys((row.world_size, row.n, row.k) for row in found.rows):
        mine = [row for row in found.rows if (row.world_size, row.n, row.k) == (world_size, n, k)]
        parts += [f"## {title(world_size, n, k)}", comparison(mine), "Every method:", every_method(mine)]
        for timeline in timelines_of(found, world_size, n, k):
            parts += [recorded(timeline), phases(timeline)]
    if found.skipped:
        parts += ["## Not measured", bullets(found.skipped)]
    parts += ["## Columns and methods", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def title(world_size: int, n: int, k: int) -> str:
    """Of one layer."""
    return f"{world_size} ranks, N = {n}, K = {k}"


def timelines_of(found: Findings, world_size: int, n: int, k: int) -> list[Timeline]:
    """Of one layer, in the order in which they were recorded."""
    return [one for one in found.timelines if (one.world_size, one.n, one.k) == (world_size, n, k)]


def verdict(found: Findings) -> str:
    wrong = [(row.method, row) for row in found.rows if row.wrong]
    wrong += [("the timeline", one) for one in found.timelines if one.wrong]
    if wrong:
        named = ", ".join(f"{name} at {one.m} x {one.n} x {one.k}" for name, one in wrong)
        return f"**WRONG RESULTS: {named}.**"
    return f"{len(found.rows)} rows, every one verified."


def comparison(rows: Sequence[FusedRow]) -> str:
    header = ["M", MATMUL, ALLREDUCE, SEQUENCE, "best peer", "best peer (us)", "graphar", "best graphar"]
    header += ["best graphar (us)", "of_best_peer", "of_sequence", "hidden"]
    lines = []
    for m, by_method in by_rows(rows):
        own = by_method.get("graphar")
        peer, best = best_peer(by_method), best_own(by_method)
        lines.append(
            [
                str(m),
                *(_us(by_method.get(name)) for name in (MATMUL, ALLREDUCE, SEQUENCE)),
                peer.method if peer else "-",
                _us(peer),
                _us(own),
                best.method if best else "-",
                _us(best),
                _ratio(own, peer),
                _ratio(own, by_method.get(SEQUENCE)),
                hidden(by_method, best),
            ]
        )
    return table(header, lines)


def every_method(rows: Sequence[FusedRow]) -> str:
    methods = list(dict.fromkeys(row.method for row in rows))
    lines = [[str(m), *(_us(by_method.get(name)) for name in methods)] for m, by_method in by_rows(rows)]
    return table(["M", *methods], lines)


def recorded(timeline: Timeline) -> str:
    """What :func:`phases` is of."""
    wrong = ", whose result was WRONG" if timeline.wrong else ""
    return (
        f"Where the time of one op with M = {timeline.m} goes, `{timeline.tile}`: {timeline.total_us:.1f} us on the"
        f" first rank{wrong}. Of each kind of warp the mean time of each phase, in us:"
    )


def phases(timeline: Timeline) -> str:
    """Mean us by kind of warp and phase."""
    time_us = {(mean.warp, mean.phase): f"{mean.time_us:.1f}" for mean in timeline.means}
    warps = dict.fromkeys(mean.warp for mean in timeline.means)
    lines = [[warp, *(time_us.get((warp, phase), "-") for phase in PHASES)] for warp in warps]
    return table(["warp", *PHASES], lines)


def by_rows(rows: Sequence[FusedRow]) -> list[tuple[int, dict[str, FusedRow]]]:
    return [(m, {row.method: row for row in rows if row.m == m}) for m in sorted({row.m for row in rows})]


def best_peer(by_method: Mapping[str, FusedRow]) -> FusedRow | None:
    """The fastest that has nothing of graphar's; a wrong result wins nothing."""
    peers = [row for name, row in by_method.items() if "graphar" not in name and name not in FLOORS and not row.wrong]
    return min(peers, key=lambda row: row.median, default=None)


def best_own(by_method: Mapping[str, FusedRow]) -> FusedRow | None:
    """The fastest of the op's ways that send all bits."""
    exact = [row for name, row in by_method.items() if name.split(":")[0] == "graphar" and not name.endswith(INT8)]
    own = [row for row in exact if not row.wrong]
    return min(own, key=lambda row: row.median, default=None)


def hidden(by_method: Mapping[str, FusedRow], best: FusedRow | None) -> str:
    """Of the shorter of matmul and all-reduce, the share that does not show."""
    floors = [by_method.get(name) for name in FLOORS]
    if best is None or any(row is None or row.wrong for row in floors):
        return "-"
    times = [row.median for row in floors]
    return f"{(sum(times) - best.median) / min(times):.0%}"


def _us(row: FusedRow | None) -> str:
    if row is None or row.wrong:
        return "wrong" if row else "-"
    return f"{row.median:.1f}"


def _ratio(row: FusedRow | None, other: FusedRow | None) -> str:
    return f"{row.median / other.median:.2f}" if row and other and not row.wrong and not other.wrong else "-"

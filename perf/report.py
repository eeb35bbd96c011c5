"""The all-reduce report: allreduce.json for machines, allreduce.md for people."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from perf.cases import Row, format_nbytes
from perf.machine import one_line

MODES = {
    "graph": "in a CUDA graph, back to back",
    "eager": "eager, one call after another",
    "host": "eager, the host's share: until the call returns",
    "cpu": "on the CPU, one call after another",
}
FORMS = {"process": "one process a rank", "list": "one process, one tensor a rank"}

COLUMNS = """\
- size: one rank's input, binary (1 MB = 2^20 B).
- a method's column: microseconds an operation; the median over the repeats, each repeat the slowest rank's time.
- busbw: graphar's algbw x 2(N-1)/N in GB/s (1e9 B), what a link carries in one direction; algbw is size / time.
- best peer: the fastest other method of the same run whose result was right.
- ratio: the best peer's time / graphar's; above 1.00 graphar is faster. Under 3 % is noise.
- algorithm: what `graphar.explain` names.

Every figure's result was verified on random data: graphar's bit for bit against `graphar.reference` on all ranks, a
peer's to within 2 machine epsilons of the sum of magnitudes (2^-6 for bfloat16), since it rounds at every hop. What was
checked is a replay of the timed graph; for in-place peers, whose repeats multiply the data, one call of its own.
Methods took turns within each repeat. The 10th and 99th percentiles are in `allreduce.json`."""


def write(folder: Path, machine: dict[str, object], rows: list[Row], skipped: list[str], command: str) -> Path:
    """Both files, into the folder. Returns the one for people."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine, "command": command, "rows": [asdict(row) for row in rows], "skipped": skipped}
    (folder / "allreduce.json").write_text(json.dumps(content, indent=1) + "\n")
    path = folder / "allreduce.md"
    path.write_text(markdown(machine, rows, skipped, command))
    return path


def markdown(machine: dict[str, object], rows: list[Row], skipped: list[str], command: str) -> str:
    parts = ["# All-reduce", one_line(machine) + ".", verdict(rows)]
    for key in groups(rows):
        world_size, mode, form, dtype = key
        parts += [f"## {world_size} ranks, {dtype}, {MODES[mode]} ({FORMS[form]})", size_table(members(rows, key))]
    parts += ["## What ran where", bullets(what_ran_where(rows))]
    if skipped:
        parts += ["Not measured, because the method refused:", bullets(skipped)]
    parts += ["## Columns", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def groups(rows: Iterable[Row]) -> list[tuple[int, str, str, str]]:
    """One table each: by world size, then in the order of MODES and FORMS."""
    keys = {(row.world_size, row.mode, row.form, row.dtype) for row in rows}
    return sorted(keys, key=lambda key: (key[0], list(MODES).index(key[1]), list(FORMS).index(key[2]), key[3]))


def members(rows: Iterable[Row], key: tuple[int, str, str, str]) -> list[Row]:
    return [row for row in rows if (row.world_size, row.mode, row.form, row.dtype) == key]


def verdict(rows: Sequence[Row]) -> str:
    bad = [row for row in rows if row.wrong]
    if not rows:
        return "Nothing was measured."
    if not bad:
        return f"All {len(rows)} results were verified: none is wrong."
    names = ", ".join(dict.fromkeys(row.method for row in bad))
    return f"**WRONG RESULTS: {len(bad)} of {len(rows)} rows ({names}).** They are marked in the tables."


def summary(rows: Sequence[Row]) -> str:
    """A few lines for the terminal: whether all is right, and how graphar compares in each table."""
    lines = [verdict(rows)]
    for key in groups(rows):
        if ratios := list(compared(members(rows, key)).values()):
            world_size, mode, form, _ = key
            span = f"{min(ratios):.2f} to {max(ratios):.2f}, geometric mean {statistics.geometric_mean(ratios):.2f}"
            lines.append(f"{world_size} ranks, {mode}, {form}: best peer's time / graphar's {span}")
    return "\n".join(lines)


def size_table(rows: Sequence[Row]) -> str:
    """Sizes down, methods across; the last columns set graphar beside its best peer."""
    methods = list(dict.fromkeys(row.method for row in rows))
    header = ["size", *(f"{method} (us)" for method in methods), "busbw (GB/s)", "best peer", "ratio", "algorithm"]
    ratios = compared(rows)
    lines = []
    for nbytes in sorted({row.nbytes for row in rows}):
        by_method = {row.method: row for row in rows if row.nbytes == nbytes}
        ours, best = by_method.get("graphar"), best_peer(by_method.values())
        lines.append(
            [
                format_nbytes(nbytes),
                *(time_cell(by_method.get(method)) for method in methods),
                f"{ours.busbw:.1f}" if ours else "-",
                best.method if best else "-",
                f"{ratios[nbytes]:.2f}" if nbytes in ratios else "-",
                (ours and ours.algorithm) or "-",
            ]
        )
    return table(header, lines)


def time_cell(row: Row | None) -> str:
    if row is None:
        return "-"
    time_us = row.time_us["median"]
    text = f"{time_us:.3g}" if time_us < 100 else f"{time_us:.0f}"
    return f"{text} **({row.wrong} WRONG)**" if row.wrong else text


def best_peer(rows: Iterable[Row]) -> Row | None:
    """The fastest method besides graphar. A wrong result wins nothing."""
    peers = [row for row in rows if row.method != "graphar" and not row.wrong]
    return min(peers, key=lambda row: row.time_us["median"], default=None)


def compared(rows: Sequence[Row]) -> dict[int, float]:
    """By size, the best peer's time over graphar's, where both are right."""
    ratios = {}
    for ours in (row for row in rows if row.method == "graphar" and not row.wrong):
        if best := best_peer(row for row in rows if row.nbytes == ours.nbytes):
            ratios[ours.nbytes] = best.time_us["median"] / ours.time_us["median"]
    return ratios


def what_ran_where(rows: Sequence[Row]) -> list[str]:
    """One sentence a method, mode and form, from the rows alone."""
    sentences = []
    for method, mode, form in dict.fromkeys((row.method, row.mode, row.form) for row in rows):
        mine = [row for row in rows if (row.method, row.mode, row.form) == (method, mode, form)]
        world_sizes = ", ".join(str(size) for size in sorted({row.world_size for row in mine}))
        sizes = sorted({row.nbytes for row in mine})
        span = f"{format_nbytes(sizes[0])} to {format_nbytes(sizes[-1])}"
        sentences.append(f"{method}: {span} on {world_sizes} ranks, {MODES[mode]}, {FORMS[form]}.")
    return sentences


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table: the first column left, the rest right."""
    rule = ["---", *("---:" for _ in header[1:])]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

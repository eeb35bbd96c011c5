"""The report of quantised all-reduces: quantized.json for machines, quantized.md and a figure for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from graphar.numerics.codecs import codec
from graphar.plan.sizes import format_nbytes
from perf import files, report
from perf import machine as machines
from perf.compare import baseline
from perf.quantized import figure
from perf.quantized.errors import ErrorRow
from perf.rows import Row
from perf.tables import by_size, table

CODEC_PREFIX = "graphar_"
PEER = "flashinfer_fp8"

COLUMNS = """\
- bits: of an element on the wire, its share of the scales included.
- relative L2: the error's length over the exact sum's. relative max: the largest error over the largest magnitude of
  the exact sum. cosine: of the angle between result and exact sum. The exact sum is made in double precision; "exact"
  is the all-reduce without a codec, which rounds to bfloat16 once.
- normal: independent of variance 1. heavy-tailed: Student's t with 3 degrees of freedom. activations: what the ranks of
  a tensor-parallel Llama block with random weights, run on real text, have to sum up after its last matmul.
- times: microseconds of one operation in a CUDA graph of independent ones, bfloat16, as in `allreduce.md`; in brackets
  the speed-up over NCCL.
- what the links carried: what a rank must send, 2(N-1)/N of the encoded tensor, over the time; GB/s (1e9 B) in one
  direction.

The errors are those of `graphar.reference.quantized_allreduce`. Every timed result of graphar's was compared with it on
all ranks, bit for bit."""


@dataclass
class Findings(report.Findings):
    """What a run has found so far; rows are of machines with GPUs."""

    errors: list[ErrorRow] = field(default_factory=list)


def write(folder: Path, machine: dict[str, object], found: Findings, command: str) -> Path:
    """All files; the figure where there are errors to draw. Returns the one for people."""
    content = {
        "machine": machine,
        "command": command,
        "errors": [asdict(row) for row in found.errors],
        "times": [asdict(row) for row in found.rows],
        "skipped": found.skipped,
    }
    path = files.write(folder, "quantized", content, markdown(machine, found, command))
    if found.errors:
        figure.draw(folder / "quantized.svg", found.errors, found.rows)
    return path


def found_in(content: dict) -> Findings:
    """What :func:`write` was given, from its JSON."""
    errors = [ErrorRow(**row) for row in content["errors"]]
    return Findings([Row(**row) for row in content["times"]], content["skipped"], errors=errors)


def markdown(machine: dict[str, object], found: Findings, command: str) -> str:
    parts = ["# Quantised all-reduce", machines.one_line(machine) + ".", verdict(found), "![error](quantized.svg)"]
    for world_size in dict.fromkeys(row.world_size for row in found.rows):
        mine = [row for row in found.rows if row.world_size == world_size]
        parts += [f"## Times, {world_size} ranks", time_table(mine), "### What the links carried", wire_table(mine)]
    for world_size in dict.fromkeys(row.world_size for row in found.errors):
        mine = [row for row in found.errors if row.world_size == world_size]
        parts += [f"## Errors, {world_size} ranks", error_table(mine)]
    if found.skipped:
        parts += ["## Not measured", report.bullets(found.skipped)]
    parts += ["## Columns", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def verdict(found: Findings) -> str:
    wrong = [row for row in found.rows if row.wrong]
    if wrong:
        named = ", ".join(f"{row.method} at {format_nbytes(row.nbytes)}" for row in wrong)
        return f"**WRONG RESULTS: {named}.**"
    timed = f"{len(found.rows)} timed rows, every one verified" if found.rows else "no times: they need GPUs"
    return f"{len(found.errors)} errors; {timed}."


def error_table(rows: Sequence[ErrorRow]) -> str:
    kinds = list(dict.fromkeys(row.data for row in rows))
    header = ["codec", "bits"]
    header += [f"{kind}: {what}" for kind in kinds for what in ("relative L2", "relative max", "1 - cosine")]
    lines = []
    for name in dict.fromkeys(row.codec for row in rows):
        mine = {row.data: row for row in rows if row.codec == name}
        cells = [name, f"{next(iter(mine.values())).bits:g}"]
        for kind in kinds:
            row = mine[kind]
            cells += [f"{row.relative_l2:.2e}", f"{row.relative_max:.2e}", f"{1 - row.cosine:.1e}"]
        lines.append(cells)
    return table(header, lines)


def time_table(rows: Sequence[Row]) -> str:
    methods = list(dict.fromkeys(row.method for row in rows))
    lines = []
    for nbytes, by_method in by_size(rows):
        base = baseline(by_method.values())
        cells = [_time_cell(by_method.get(method), base) for method in methods]
        lines.append([format_nbytes(nbytes), *cells])
    return table(["size", *methods], lines)


def _time_cell(row: Row | None, base: Row | None) -> str:
    if row is None or row.wrong:
        return "wrong" if row else "-"
    return f"{row.median:.1f}" + (f" ({base.median / row.median:.2f})" if base else "")


def wire_table(rows: Sequence[Row]) -> str:
    """GB/s of graphar's methods with a codec."""
    methods = [name for name in dict.fromkeys(row.method for row in rows) if name.startswith(CODEC_PREFIX)]
    lines = []
    for nbytes, by_method in by_size(rows):
        present = {name: by_method[name] for name in methods if name in by_method}
        cells = ["wrong" if row.wrong else f"{wire_rate(row):.0f}" for row in present.values()]
        if len(cells) == len(methods):
            lines.append([format_nbytes(nbytes), *cells])
    sent = [f"{codec(name.removeprefix(CODEC_PREFIX)).bits_per_element / 16:.0%}" for name in methods]
    return table(["size", *methods], [["share of bfloat16's bytes", *sent], *lines])


def wire_rate(row: Row) -> float:
    """GB/s that a rank sends, where a codec is on the wire."""
    nbytes = codec(row.method.removeprefix(CODEC_PREFIX)).wire_nbytes(row.nbytes // 2)
    return 2 * (row.world_size - 1) / row.world_size * nbytes / row.median / 1e3

"""The all-reduce report: allreduce.json for machines, allreduce.md for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from graphar.plan.sizes import format_nbytes
from perf import files
from perf.cases import BACKEND_SIZES, HIDDEN, PLAIN_METHODS, SIZES, token_sizes
from perf.compare import FORMS, MODES, comparisons, groups, members, methods_of, title, verdict
from perf.machine import one_line
from perf.rows import Row
from perf.tables import BACKENDS, backend_table, dtype_table, method_table, nvlink_table, size_table, token_table

METHOD_TABLE = "Every method, in milliseconds, with its speed-up over nccl or gloo; -1: it does not serve the size."

BACKEND_TABLE = """\
Milliseconds of one all-reduce, one after another; in CUDA graphs, but for gloo, which sums CPU tensors. In brackets
graphar's speed-up over NCCL, or without GPUs over gloo. -1: not measured; `--max-nbytes 1G` has gloo go so far."""

NVLINK_HEADING = "What NVLink carried, by its own counters"
NVLINK_TABLE = """\
Of the first rank's GPU, over one replay of the timed graph.

- payload efficiency: what an all-reduce must send, 2(N-1)/N of its size, over the payload that was sent.
- protocol overhead: what was sent besides the payload, over the payload.
- link balance: the payload of the least loaded link over that of the most loaded.
- raw share: all that was sent, over what the links' raw rate allows in the time."""

COLUMNS = """\
- size: one rank's input, binary (1 MB = 2^20 B).
- times: of one operation; the median over the repeats, each repeat the slowest rank's time.
- algbw: size / time, in GB/s (1e9 B). busbw: algbw x 2(N-1)/N, what a link carries in one direction.
- best peer: the fastest method of others in the same run that sends all bits and whose result was right.
- of_best_peer: graphar's time / the best peer's; below 1.00 graphar is faster. Under 3 % is noise.
- of_link: graphar's busbw / what the links carry when all ranks do nothing but push to all others, in the same run.
- algorithm: what `graphar.explain` names.

Methods: `graphar` as a user calls it, with ordinary tensors; `graphar_symmetric` between tensors of `graphar.empty`;
`graphar:...` held to one algorithm; `nccl`, and `nccl_window` with registered memory; `symm` torch's symmetric memory;
`vllm` vLLM's custom all-reduce in FlashInfer's copy, with registered input and without; `flashinfer` TensorRT-LLM's
one-shot and two-shot, and an FP8-quantised two-shot; `sglang` SGLang's.

Every figure's result was verified on random data: graphar's bit for bit against `graphar.reference` on all ranks, a
peer's to within 2 machine epsilons of the sum of magnitudes (2^-6 for bfloat16), since it rounds at every hop, and the
FP8 one's to within 9/64 of it, since FP8 rounds by up to 2^-4, twice. What was checked is a replay of the timed graph;
for in-place peers, whose repeats multiply the data, one call of its own; in chains, graphar's last result, and of peers
that of two calls. NVLink multicast was off for all, unless a user of this command turned it on. Methods took turns
within each repeat. The 10th and 99th percentiles are in `allreduce.json`."""


@dataclass
class Findings:
    """What a run has found so far.

    Attributes:
        skipped: what was not measured, and why.
        link_ceiling: by world size, GB/s in one direction of a GPU's links.
    """

    rows: list[Row] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    link_ceiling: dict[int, float] = field(default_factory=dict)


def write(folder: Path, machine: dict[str, object], found: Findings, command: str) -> Path:
    """Both files, into the folder. Returns the one for people."""
    content = content_of(machine, found, command)
    return files.write(folder, "allreduce", content, markdown(machine, found, command))


def content_of(machine: dict[str, object], found: Findings, command: str) -> dict[str, object]:
    """For machines, as the schema asks."""
    return {
        "machine": machine,
        "command": command,
        "link_ceiling": found.link_ceiling or None,
        "rows": [asdict(row) for row in found.rows],
        "skipped": found.skipped,
    }


def found_in(content: dict) -> Findings:
    """What :func:`content_of` was given."""
    ceiling = {int(world_size): rate for world_size, rate in (content["link_ceiling"] or {}).items()}
    return Findings([Row(**row) for row in content["rows"]], content["skipped"], ceiling)


def markdown(machine: dict[str, object], found: Findings, command: str) -> str:
    rows = found.rows
    parts = ["# All-reduce", one_line(machine) + ".", verdict(rows), bullets(comparisons(rows))]
    parts += sections(rows, found.link_ceiling)
    parts += ["## What ran where", bullets(what_ran_where(rows))]
    if found.skipped:
        parts += ["Not measured:", bullets(found.skipped)]
    parts += ["## Columns and methods", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(part for part in parts if part) + "\n"


def summary(rows: Sequence[Row]) -> str:
    """A few lines for the terminal: whether all is right, and how graphar compares in each table."""
    return "\n".join([verdict(rows), *comparisons(rows)])


def sections(rows: Sequence[Row], link_ceiling: Mapping[int, float]) -> list[str]:
    """Two tables a world, mode and form; those of the widest world alone; and what the links carried."""
    parts = []
    for key in groups(rows):
        mine = members(rows, key)
        parts += [f"## {title(key)}", size_table(mine, link_ceiling.get(key[0])), METHOD_TABLE, method_table(mine)]
    if backends := backend_rows(rows):
        of_what = ", ".join(name for name in BACKENDS if name in methods_of(backends))
        parts += [f"## {of_what}: {span_of(backends)}, by ranks", BACKEND_TABLE, backend_table(backends)]
    if tokens := token_rows(rows):
        of_what = f"{tokens[0].world_size} ranks, {tokens[0].dtype}, hidden size {HIDDEN}, {MODES['graph']}"
        parts += [f"## {of_what}", "Microseconds.", token_table(tokens)]
    if dtypes := dtype_rows(rows):
        of_what = f"{dtypes[0].world_size} ranks, per byte beside {dtypes[0].dtype}, {MODES[dtypes[0].mode]}"
        parts += [f"## {of_what}", "Microseconds; in brackets, how many times the first.", dtype_table(dtypes)]
    if any(row.nvlink for row in rows):
        parts += [f"## {NVLINK_HEADING}", NVLINK_TABLE, nvlink_table(rows)]
    return parts


def backend_rows(rows: Sequence[Row]) -> list[Row]:
    """Those at the sizes of backends; none where only such were measured as every sweep has."""
    found = [
        row
        for row in rows
        if row.nbytes in BACKEND_SIZES
        and row.method in PLAIN_METHODS
        and (row.mode in ("graph", "cpu") and row.form == "process" and row.dtype == rows[0].dtype)
    ]
    return found if any(row.nbytes not in SIZES for row in found) else []


def token_rows(rows: Sequence[Row]) -> list[Row]:
    """Those at the sizes of tokens, of the world that was measured at all of them."""
    if not rows:
        return []
    dtype = rows[0].dtype
    sizes = token_sizes(dtype)
    widest = max((row.world_size for row in rows if row.nbytes in sizes and row.nbytes not in SIZES), default=None)
    return [
        row for row in rows if (row.world_size, row.mode, row.dtype) == (widest, "graph", dtype) and row.nbytes in sizes
    ]


def dtype_rows(rows: Sequence[Row]) -> list[Row]:
    """Those of other dtypes than the first, and what they are compared with; the first dtype's come first."""
    others = [row for row in rows if row.dtype != rows[0].dtype]
    like = {(row.world_size, row.mode, row.form, row.method, row.nbytes) for row in others}
    return [row for row in rows if (row.world_size, row.mode, row.form, row.method, row.nbytes) in like]


def what_ran_where(rows: Sequence[Row]) -> list[str]:
    """One sentence a method and form, from the rows alone."""
    sentences = []
    for method in methods_of(rows):
        for form in FORMS:
            mine = [row for row in rows if (row.method, row.form) == (method, form)]
            if mine:
                world_sizes = ", ".join(str(size) for size in sorted({row.world_size for row in mine}))
                modes = ", ".join(f"{mode} {span(mine, mode)}" for mode in dict.fromkeys(row.mode for row in mine))
                sentences.append(f"{method}: on {world_sizes} ranks, {FORMS[form]}: {modes}.")
    return sentences


def span(rows: Iterable[Row], mode: str) -> str:
    return span_of([row for row in rows if row.mode == mode])


def span_of(rows: Sequence[Row]) -> str:
    sizes = [row.nbytes for row in rows]
    ends = dict.fromkeys([min(sizes), max(sizes)])
    return " to ".join(format_nbytes(size) for size in ends)


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)

"""The model's report: model.json for machines, model.md for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from perf import files
from perf import machine as machines
from perf.model.cases import CONTEXT, SIZES
from perf.model.runs import ModelRow
from perf.model.ways import ALONE, BASES, BOTH, CODEC, MATMUL, NORM, UNSHARDED
from perf.report import bullets
from perf.tables import table

OWN = ("graphar", MATMUL, NORM, BOTH)  # those that send all bits

COLUMNS = f"""\
- step: of the layers that were timed, in microseconds: on GPUs in a CUDA graph, bfloat16; the median over the repeats,
  each repeat the slowest rank's time. Methods took turns within each repeat. A step of decode has one new token of each
  of so many sequences, each with {CONTEXT} tokens in its cache; a step of prefill has all tokens of one sequence.
- speed-up: over NCCL's all-reduce (on the CPU gloo's).
- communication: the time of a step beyond that of `{ALONE}`, a layer; and its share of the step. With fused ops it is
  what they leave to be seen: a norm in the kernel, or a matmul beside it, is taken off.
- of N layers, calculated: the step's time for all layers of the model, as if each took what the timed ones do on the
  average; embedding and head, which are not timed, left out. tokens/s: of those.
- error: how far any token's logits are from the unsharded model's, at most: the length of the difference as a share of
  theirs.

Methods: `{ALONE}` is the model with its all-reduces left out: its results are wrong by design, and it competes with
nothing. `{UNSHARDED}` is the whole model on one GPU, each rank on its own. All others sum behind the row-parallel
linear layers: `nccl`, `gloo` torch.distributed's all-reduce, `symm_two_shot` torch's symmetric memory, `graphar`
`graphar.allreduce`, and `{CODEC}` with `codec="int8"`, each between torch's matmul, and residual and norm as one
function; `{MATMUL}` has `graphar.fused_matmul_allreduce` in the place of matmul and all-reduce, `{NORM}`
`graphar.allreduce_residual_rmsnorm` in that of all-reduce, residual and norm, and `{BOTH}`
`graphar.fused_matmul_allreduce_residual_rmsnorm` in that of all four. The rest of the model is the same code:
torch's matmuls and attention, and three functions of elements, which torch.compile has made on GPUs, with Inductor's
`deterministic`: else ranks may take different kernels for a norm, whose results differ in their last bits.

Weights, cache and inputs are random, from one seed on all ranks. Every figure's logits were compared with the unsharded
model's, token by token, on all ranks: an error beyond 2^-6, or with a codec 2^-4, times the root of the number of
layers is wrong; so is, of graphar's, a token whose logits are not the same bits on all ranks. What was checked is a
replay of the timed graph. NVLink multicast was off for all, unless a user of this command turned it on."""


@dataclass
class Findings:
    """What a run has found so far; ``skipped`` is what was not measured, and why."""

    rows: list[ModelRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def write(folder: Path, machine: dict[str, object], found: Findings, command: str) -> Path:
    """Both files. Returns the one for people."""
    rows = [asdict(row) for row in found.rows]
    content = {"machine": machine, "command": command, "rows": rows, "skipped": found.skipped}
    return files.write(folder, "model", content, markdown(machine, found, command))


def found_in(content: dict) -> Findings:
    """What :func:`write` was given, from its JSON."""
    return Findings([ModelRow(**row) for row in content["rows"]], content["skipped"])


def markdown(machine: dict[str, object], found: Findings, command: str) -> str:
    parts = ["# A tensor-parallel decoder", machines.one_line(machine) + ".", *verdict(found).split("\n", 1)]
    for title, by_method in by_step(found.rows).items():
        parts += [f"## {title}", method_table(by_method)]
    if found.skipped:
        parts += ["## Not measured", bullets(found.skipped)]
    parts += ["## Columns and methods", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def by_step(rows: Sequence[ModelRow]) -> dict[str, dict[str, ModelRow]]:
    """The rows of each step by method, under the step's title."""
    found: dict[str, dict[str, ModelRow]] = {}
    for row in rows:
        found.setdefault(title(row), {})[row.method] = row
    return found


def title(row: ModelRow) -> str:
    """Of the step that a row is about."""
    return f"{row.world_size} ranks, {row.layers} layers of {row.size}: {row.phase} of {_tokens(row)}"


def _tokens(row: ModelRow) -> str:
    return f"{row.tokens} token{'s' if row.tokens > 1 else ''}"


def verdict(found: Findings) -> str:
    """Whether all is right; and, a line a step, what the layers that were timed mean for the whole model."""
    wrong = [f"{row.method} at {title(row)}" for row in found.rows if row.wrong]
    if wrong:
        return f"**WRONG RESULTS: {'; '.join(wrong)}.**"
    checked = sum(row.error is not None for row in found.rows)
    head = f"{checked} of {len(found.rows)} rows have sums of ranks, every one verified."
    lines = [line for by_method in by_step(found.rows).values() if (line := in_words(by_method))]
    return "\n".join([head, bullets(lines)]) if lines else head


def in_words(by_method: Mapping[str, ModelRow]) -> str:
    """A step with the baseline and with graphar's fastest exact way, for all layers; nothing where one is missing."""
    base, best, alone = base_of(by_method), best_own(by_method), by_method.get(ALONE)
    if not (base and best and alone):
        return ""
    told = [f"{row.method} {whole_us(row) / 1e3:.4g} ms, {share(row, alone):.0%} communication" for row in (base, best)]
    layers = SIZES[best.size].layers
    what = f"{best.phase} of {_tokens(best)}, {layers} layers of {best.size} on {best.world_size} ranks"
    known = "" if layers == best.layers else f" (calculated from {best.layers})"
    return f"{what}{known}: {'; '.join(told)}; {base.median / best.median:.2f} times as fast"


def method_table(by_method: Mapping[str, ModelRow]) -> str:
    """One step's: methods down."""
    first = next(iter(by_method.values()))
    layers = SIZES[first.size].layers
    whole = f"of {layers} layers{', calculated' if layers != first.layers else ''} (ms)"
    header = ["method", "step (us)", "speed-up", "communication (us a layer)", "share", whole, "tokens/s", "error"]
    base, alone = base_of(by_method), by_method.get(ALONE)
    lines = [_cells(row, base, alone) for row in by_method.values()]
    return table(header, lines)


def _cells(row: ModelRow, base: ModelRow | None, alone: ModelRow | None) -> list[str]:
    is_sum = alone is not None and row.method not in (ALONE, UNSHARDED)
    return [
        row.method + (f" **({row.wrong} WRONG)**" if row.wrong else ""),
        f"{row.median:.1f}",
        f"{base.median / row.median:.2f}" if base and row.method != ALONE else "-",
        f"{(row.median - alone.median) / row.layers:.1f}" if is_sum else "-",
        f"{share(row, alone):.1%}" if is_sum else "-",
        f"{whole_us(row) / 1e3:.4g}",
        f"{row.tokens / whole_us(row) * 1e6:,.0f}",
        "-" if row.error is None else f"{row.error:.4f}",
    ]


def share(row: ModelRow, alone: ModelRow) -> float:
    """Of a step, what it takes beyond one without communication."""
    return 1 - alone.median / row.median


def whole_us(row: ModelRow) -> float:
    """Of a step of all the model's layers."""
    return row.median * SIZES[row.size].layers / row.layers


def base_of(by_method: Mapping[str, ModelRow]) -> ModelRow | None:
    return next((row for name, row in by_method.items() if name in BASES and not row.wrong), None)


def best_own(by_method: Mapping[str, ModelRow]) -> ModelRow | None:
    """The fastest of graphar's that send all bits."""
    own = [row for name, row in by_method.items() if name in OWN and not row.wrong]
    return min(own, key=lambda row: row.median, default=None)

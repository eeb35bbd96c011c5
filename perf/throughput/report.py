"""The throughput report: throughput.json for machines, throughput.md for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from graphar.numerics.codecs import Codec, codec
from perf import files
from perf import machine as machines
from perf.report import bullets
from perf.tables import table

COLUMNS = """\
- one by one, flattened: without DistributedDataParallel; after the backward pass each gradient is summed by a blocking
  all-reduce of its own, or all by one, to which they are copied together.
- nccl or gloo: torch's own reduction of DistributedDataParallel. exact: graphar's exact hook. 8 .. 2 bits: graphar's
  hook with a codec of so many bits, buckets of 128, absmax scales in bfloat16, stochastic rounding; tensors of one
  dimension (biases, norms) are averaged exactly. alone: no communication, each rank on its own.
- img/s, tokens/s: of all ranks together. In brackets the speed-up over torch's own reduction.
- step: of forward, backward and optimiser, in milliseconds: the median over blocks of 10 steps, each block the slowest
  rank's time. The ways took turns, block by block; of gpt2_xl, which fits a GPU once, one was trained after another.
- communication: the share of a step by which it is longer than one alone: what does not hide behind the backward pass.
- sent: what a rank must send in a step, 2(N-1)/N of its gradients' bytes on the wire, in MB (1e6 B).
- loss: mean cross-entropy of the ranks' batches after so many steps, in nats.

The models have random parameters, and each rank one random batch, of the real shape, that it is given again and again:
the loss says that training works, and no more. All ways start from the same parameters, and see the same batches and
dropout. Gradients and parameters are fp32; on GPUs matrices are multiplied in bfloat16 (autocast) and images lie
channels last. AdamW. Batch norms' buffers are sent as DistributedDataParallel does. Afterwards the parameters of all
ranks were compared bit for bit."""

ALONE = "alone"
NAIVE = ("one by one", "flattened")


@dataclass(frozen=True)
class Way:
    """How ranks average their gradients.

    Attributes:
        backend: "nccl" or "gloo" for torch's own reduction; "graphar"; one of NAIVE for blocking all-reduces over the
            former, after the backward pass; "alone": they do not.
        codec: graphar's; None: exact.
    """

    backend: str
    codec: Codec | None = None

    @property
    def is_alone(self) -> bool:
        return self.backend == ALONE

    @property
    def is_naive(self) -> bool:
        return self.backend in NAIVE

    @property
    def is_base(self) -> bool:
        """Whether speed-ups are over it."""
        return self.backend not in (ALONE, *NAIVE, "graphar")

    @property
    def bits(self) -> float:
        """Of an element on the wire, its share of the scales included."""
        return self.codec.bits_per_element if self.codec else 32

    def __str__(self) -> str:
        if self.backend != "graphar":
            return self.backend
        return f"{self.codec.bits} bits" if self.codec else "exact"


@dataclass(frozen=True)
class ThroughputRow:
    """One model, trained in one way.

    Attributes:
        unit: what throughput counts, "img" or "tokens".
        exact_parameters: those whose gradients no codec rounds.
        batch_size: samples of a rank.
        items: units of all ranks in a step.
        steps: that were made, those before the timing included.
        step_ms: the median.
        loss: after the last step.
        same_bits: whether all ranks ended with the same parameters, where they are meant to.
    """

    model: str
    unit: str
    parameters: int
    exact_parameters: int
    world_size: int
    batch_size: int
    items: int
    way: Way
    steps: int
    step_ms: float
    loss: float
    same_bits: bool

    @property
    def throughput(self) -> float:
        """Units a second."""
        return self.items / self.step_ms * 1e3

    @property
    def sent_nbytes(self) -> float:
        if self.way.is_alone:
            return 0
        exact = 32 * self.exact_parameters if self.way.codec else 0  # they travel with the rest as well
        on_wire = (self.parameters * self.way.bits + exact) / 8
        return on_wire * 2 * (self.world_size - 1) / self.world_size


@dataclass
class Findings:
    """What a run has found so far; ``skipped`` says what was not measured, and why."""

    rows: list[ThroughputRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def one_line(row: ThroughputRow) -> str:
    """For the terminal."""
    return (
        f"{row.model:>20} {row.way!s:>10}: {row.throughput:>10,.0f} {row.unit}/s, {row.step_ms:.2f} ms a step,"
        f" loss {row.loss:.3f} after {row.steps} steps"
    )


def write(folder: Path, machine: dict[str, object], found: Findings, command: str) -> Path:
    """Both files. Returns the one for people."""
    rows = [_plain(row) for row in found.rows]
    content = {"machine": machine, "command": command, "rows": rows, "skipped": found.skipped}
    return files.write(folder, "throughput", content, markdown(machine, found, command))


def _plain(row: ThroughputRow) -> dict[str, object]:
    text = row.way.codec.text if row.way.codec else None
    way = {"backend": row.way.backend, "codec": text, "bits": row.way.bits}
    return asdict(row) | {"way": way, "throughput": row.throughput, "sent_nbytes": row.sent_nbytes}


def found_in(content: dict) -> Findings:
    """What :func:`write` was given, from its JSON."""
    return Findings([_row(plain) for plain in content["rows"]], content["skipped"])


def _row(plain: dict) -> ThroughputRow:
    fields = {name: plain[name] for name in ThroughputRow.__dataclass_fields__}
    text = plain["way"]["codec"]
    return ThroughputRow(**fields | {"way": Way(plain["way"]["backend"], codec(text) if text else None)})


def markdown(machine: dict[str, object], found: Findings, command: str) -> str:
    parts = ["# Throughput of training", machines.one_line(machine) + ".", verdict(found.rows)]
    by_model = [list(rows) for _, rows in groupby(found.rows, key=lambda row: row.model)]
    if by_model:
        parts += [overview(by_model)]
    for rows in by_model:
        one = rows[0]
        title = f"{one.model}: {one.parameters:,} parameters, {one.world_size} ranks, batch {one.batch_size} a rank"
        parts += [f"## {title}", *shares(rows), details(rows)]
    if found.skipped:
        parts += ["## Not measured", bullets(found.skipped)]
    parts += ["## Columns", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def verdict(rows: Sequence[ThroughputRow]) -> str:
    """Whether all ranks had the same parameters."""
    apart = [f"{row.model} {row.way}" for row in rows if not row.same_bits]
    if apart:
        return f"**WRONG: the ranks' parameters differ after {', '.join(apart)}.**"
    return f"{len(rows)} trainings; after each, all ranks had the same parameters, bit for bit."


def overview(by_model: Sequence[Sequence[ThroughputRow]]) -> str:
    """Models down, ways across: throughput, and the speed-up."""
    ways = list(dict.fromkeys(str(row.way) for rows in by_model for row in rows if not row.way.is_alone))
    lines = []
    for rows in by_model:
        base = _step_of(rows, "is_base")
        cells = {str(row.way): flagged(f"{row.throughput:,.0f}{_brackets(base, row)}", row) for row in rows}
        lines.append([f"{rows[0].model}, {rows[0].unit}/s", *(cells.get(way, "-") for way in ways)])
    return table(["model", *ways], lines)


def shares(rows: Sequence[ThroughputRow]) -> list[str]:
    """What part of a step communication takes, done naively and beside the backward pass, in a sentence."""
    alone = _step_of(rows, "is_alone")
    compared = [row for row in rows if row.way.is_naive or row.way.is_base or str(row.way) == "exact"]
    if alone is None or not any(row.way.is_naive for row in compared):
        return []
    told = [f"{row.way} {1 - alone / row.step_ms:.1%}" for row in compared]
    return [f"Communication takes of a step, with exact gradients: {', '.join(told)}."]


def details(rows: Sequence[ThroughputRow]) -> str:
    """One model's ways."""
    base, alone = _step_of(rows, "is_base"), _step_of(rows, "is_alone")
    header = ["gradients", "bits", "step (ms)", f"{rows[0].unit}/s", "speed-up", "communication", "sent (MB)"]
    lines = [
        [
            *(flagged(str(row.way), row), "-" if row.way.is_alone else f"{row.way.bits:g}", f"{row.step_ms:.2f}"),
            f"{row.throughput:,.0f}",
            "-" if base is None else f"{base / row.step_ms:.2f}",
            "-" if alone is None else f"{1 - alone / row.step_ms:.1%}",
            *(f"{row.sent_nbytes / 1e6:.1f}", f"{row.loss:.3f}", str(row.steps)),
        ]
        for row in rows
    ]
    return table([*header, "loss", "after steps"], lines)


def flagged(text: str, row: ThroughputRow) -> str:
    return text if row.same_bits else f"{text} **(WRONG)**"


def _brackets(base: float | None, row: ThroughputRow) -> str:
    return "" if base is None else f" ({base / row.step_ms:.2f})"


def _step_of(rows: Sequence[ThroughputRow], which: str) -> float | None:
    """None where there is no such row, as in a run that was ended, or none that is right."""
    return next((row.step_ms for row in rows if getattr(row.way, which) and row.same_bits), None)

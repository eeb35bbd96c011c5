"""The training report: training.json for machines, training.md for people."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path

from graphar.numerics.codecs import codec
from perf import files
from perf import machine as machines
from perf.report import bullets
from perf.training.runs import Outcome, Run, stretches

COLUMNS = """\
- backend: torch's own reduction over NCCL or gloo, or graphar's.
- mode, bits, bucket: the gradients' codec, with EF where each rank feeds its rounding errors back; bits are those of an
  element on the wire, its share of the scales included. Biases and norms are averaged exactly.
- loss: mean cross-entropy in nats; perplexity is its exponential. acc: share of right predictions, of classes or of
  next bytes. Mean over the seeds, and how far seeds lie apart (standard deviation) where there are several.
- time: of all steps, in seconds, evaluation left out. step: of one, after the first few, in milliseconds.
- sent: what a rank must send in a step, 2(N-1)/N of its gradients.
- speed-up: of the step, over the first row's.

Seeds decide the model, the order of the samples, and stochastic rounding; every row has the same ones. After each run
the parameters of all ranks were compared bit for bit."""


@dataclass(frozen=True)
class TrainingRow:
    """One run. See Run and Outcome for the figures."""

    task: str
    data: str
    backend: str
    world_size: int
    batch_size: int
    epochs: float
    run: Run
    outcome: Outcome

    @property
    def mode(self) -> str:
        if self.run.codec is None:
            return "exact"
        codec = self.run.codec
        words = [codec.scheme, codec.rounding, "EF" if self.run.error_feedback else ""]
        return " ".join(word for word in words if word)

    @property
    def bits(self) -> float:
        return self.run.codec.bits_per_element if self.run.codec else 32

    @property
    def sent_nbytes(self) -> float:
        return self.outcome.parameters * self.bits / 8 * 2 * (self.world_size - 1) / self.world_size

    @property
    def curve(self) -> list[tuple[float, float]]:
        """The step in the middle of each stretch, and the loss there; nothing where it was not kept."""
        middles = [(begin + end + 1) / 2 for begin, end in pairwise(stretches(self.run.steps))]
        return list(zip(middles, self.outcome.losses, strict=True)) if self.outcome.losses else []

    def like(self) -> tuple:
        """Equal in runs that differ in their seed alone."""
        return self.task, self.backend, self.mode, str(self.run.codec)


@dataclass
class Findings:
    """What a run has found so far; ``skipped`` says what was not measured, and why."""

    rows: list[TrainingRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def one_line(row: TrainingRow) -> str:
    """For the terminal."""
    run, outcome = row.run, row.outcome
    bucket = f"/{run.codec.bucket_size}" if run.codec else ""
    return (
        f"{row.task:>7} {row.backend:>8} {row.mode:>22} {row.bits:>5g}{bucket:<5} seed {run.seed}:"
        f" test loss {outcome.test_loss:.3f}, accuracy {outcome.test_accuracy:.1%}, {outcome.step_ms:.2f} ms a step"
    )


def write(folder: Path, machine: dict[str, object], found: Findings, command: str) -> Path:
    """Both files. Returns the one for people."""
    rows = [_plain(row) for row in found.rows]
    content = {"machine": machine, "command": command, "rows": rows, "skipped": found.skipped}
    return files.write(folder, "training", content, markdown(machine, found, command))


def _plain(row: TrainingRow) -> dict[str, object]:
    found = asdict(row)
    if row.run.codec:
        found["run"]["codec"]["scale_dtype"] = str(row.run.codec.scale_dtype).removeprefix("torch.")
    return found | {"mode": row.mode, "bits": row.bits, "sent_nbytes": row.sent_nbytes}


def found_in(content: dict) -> Findings:
    """What :func:`write` was given, from its JSON."""
    return Findings([_row(plain) for plain in content["rows"]], content["skipped"])


def _row(plain: dict) -> TrainingRow:
    fields = {name: plain[name] for name in TrainingRow.__dataclass_fields__}
    given = plain["run"]["codec"]
    if given:  # its text says all of it, but for the seed, which is the run's
        given = replace(codec(given["text"]), seed=given["seed"])
    return TrainingRow(
        **fields | {"run": Run(**plain["run"] | {"codec": given}), "outcome": Outcome(**plain["outcome"])}
    )


def markdown(machine: dict[str, object], found: Findings, command: str) -> str:
    parts = ["# Training", machines.one_line(machine) + ".", verdict(found.rows)]
    for _, mine in groupby(found.rows, key=lambda row: row.task):
        mine = list(mine)
        parts += [f"## {title(mine)}", conclusion(mine), table(mine)]
    if found.skipped:
        parts += ["## Not measured", bullets(found.skipped)]
    parts += ["## Columns", COLUMNS, "## How to reproduce", f"```\n{command}\n```"]
    return "\n\n".join(parts) + "\n"


def title(rows: Sequence[TrainingRow]) -> str:
    """Of one task's rows."""
    one = rows[0]
    return f"{one.task}: {one.outcome.parameters:,} parameters, {one.run.steps} steps, data {one.data}"


def verdict(rows: Sequence[TrainingRow]) -> str:
    apart = [f"{row.task} {row.backend} {row.mode}" for row in rows if not row.outcome.same_bits]
    if apart:
        return f"**WRONG: the ranks' parameters differ after {', '.join(dict.fromkeys(apart))}.**"
    if not rows:
        return "No runs."
    return f"{len(rows)} runs; in each, all ranks ended with the same parameters, bit for bit."


def conclusion(rows: Sequence[TrainingRow]) -> str:
    """What one task's rows show, in a few sentences."""
    exact = [row for row in rows if row.run.codec is None]
    base, noise = mean(exact, "test_loss"), _spread(exact, "test_loss")
    near, far = ([f"{runs[0].bits:g} bits ({runs[0].mode})" for runs in of] for of in near_and_far(rows))
    apart = f" (runs {noise:.3f} apart)" if len(exact) > 1 else ""
    sentences = [f"Exact gradients end at a test loss of {base:.3f}{apart}."]
    if near:
        sentences.append(f"Within 2 % of it, or twice what those runs differ by: {', '.join(near)}.")
    if far:
        sentences.append(f"Worse: {', '.join(far)}.")
    return " ".join(sentences)


def near_and_far(rows: Sequence[TrainingRow]) -> tuple[list[list[TrainingRow]], list[list[TrainingRow]]]:
    """One task's runs with codecs, alike ones together: those that end within 2 % of exact gradients' test loss, or
    twice what runs with exact ones differ by, by seed and backend; and the others."""
    exact = [row for row in rows if row.run.codec is None]
    base, noise = mean(exact, "test_loss"), _spread(exact, "test_loss")
    near, far = [], []
    for runs in alike([row for row in rows if row.run.codec]):
        worse = mean(runs, "test_loss") - base
        (near if worse <= max(0.02 * base, 2 * noise) else far).append(runs)
    return near, far


def table(rows: Sequence[TrainingRow]) -> str:
    header = (
        *("backend", "mode", "ranks", "bits", "bucket", "epochs", "batch", "train loss", "train acc", "test loss"),
        *("test acc", "time (s)", "step (ms)", "sent (MB)", "speed-up"),
    )
    lines = ["| " + " | ".join(header) + " |", "| --- | --- |" + " ---: |" * (len(header) - 2)]
    first = mean(alike(rows)[0], "step_ms")
    for runs in alike(rows):
        one = runs[0]
        loss = lambda name, runs=runs: _figure(runs, name, "{:.3f}".format)  # noqa: E731
        share = lambda name, runs=runs: _figure(runs, name, "{:.1%}".format)  # noqa: E731
        cells = (
            one.backend + ("" if all(row.outcome.same_bits for row in runs) else " **(WRONG)**"),
            *(one.mode, one.world_size, f"{one.bits:g}"),
            *(one.run.codec.bucket_size if one.run.codec else "-", f"{one.epochs:.1f}", one.batch_size),
            *(loss("train_loss"), share("train_accuracy"), loss("test_loss"), share("test_accuracy")),
            *(f"{mean(runs, 'time_s'):.1f}", f"{mean(runs, 'step_ms'):.2f}", f"{one.sent_nbytes / 1e6:.2f}"),
            f"{first / mean(runs, 'step_ms'):.2f}",
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines)


def alike(rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
    """The rows in groups that differ in their seed alone."""
    found: dict[tuple, list[TrainingRow]] = {}
    for row in rows:
        found.setdefault(row.like(), []).append(row)
    return list(found.values())


def _values(rows: Sequence[TrainingRow], name: str) -> list[float]:
    return [getattr(row.outcome, name) for row in rows]


def mean(rows: Sequence[TrainingRow], name: str) -> float:
    """Of a figure of Outcome."""
    return statistics.fmean(_values(rows, name))


def _spread(rows: Sequence[TrainingRow], name: str) -> float:
    values = _values(rows, name)
    return statistics.stdev(values) if len(values) > 1 and all(math.isfinite(value) for value in values) else 0.0


def _figure(rows: Sequence[TrainingRow], name: str, form: Callable[[float], str]) -> str:
    spread = f" ± {form(_spread(rows, name))}" if len(rows) > 1 else ""
    return form(mean(rows, name)) + spread

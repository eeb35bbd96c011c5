"""`python -m perf convergence`: final accuracies and perplexities with exact and with quantised gradients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from graphar.numerics.codecs import ROUNDINGS, Codec
from perf.md import NOT_SERVED, columns
from perf.report import Arguments, Section
from perf.topics.training import Run, Training, TrainingPlan, TrainingRow, by_configuration, deviation, title

BITS, BUCKET_SIZES = (8, 4, 2), (512, 1024)
OF_BYTES = ("bytes", "text")  # the tasks whose measure is perplexity


class ConvergencePlan(TrainingPlan):
    """The runs with exact gradients, and with each number of bits, rounding and bucket, on any device."""

    def runs(self) -> list[Run]:
        return [run for run in super().runs() if run.backend == "graphar"]

    def _quantised(self) -> list[tuple[Codec, bool]]:
        return [(Codec(bits, size, rule), False) for bits in BITS for rule in ROUNDINGS for size in BUCKET_SIZES]


@dataclass
class Convergence(Training):
    order: ClassVar[int] = 22
    # A run of all topics skips this one: it takes ten minutes of CPU time.
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus=None, on_cpu=None, quick_on_gpus="--tasks text --steps 10", quick_on_cpu="--tasks text --steps 10"
    )
    command: ClassVar[str] = "convergence"
    kind_of_plan: ClassVar[type[TrainingPlan]] = ConvergencePlan
    reached: ClassVar[str] = "codecs end at the test loss of exact gradients, within noise"
    tasks: ClassVar[tuple[str, ...]] = ("animals", "text")
    steps_on_gpus: ClassVar[int] = 240
    steps_on_cpu: ClassVar[int] = 240
    seeds_on_cpu: ClassVar[int] = 3

    def sections(self) -> list[Section]:
        return [Section(title(rows), [final_table(rows)]) for rows in self._by_task().values()]


def final_table(rows: Sequence[TrainingRow]) -> str:
    """Returns one task's results: each is a mean over seeds, with its standard deviation, beside exact training."""
    name, measure, digits = measure_of(rows)
    base = statistics.fmean(measure(row) for row in rows if row.run.codec is None)
    cells = {
        "gradients": gradients,
        "rounding": lambda runs: runs[0].run.codec.rounding if runs[0].run.codec else NOT_SERVED,
        "bucket": lambda runs: str(runs[0].run.codec.bucket_size) if runs[0].run.codec else NOT_SERVED,
        "bits sent": lambda runs: f"{runs[0].bits:g}",
        "seeds": lambda runs: str(len(runs)),
        "train loss": lambda runs: figure([row.outcome.train_loss for row in runs], 3),
        "test loss": lambda runs: figure([row.outcome.test_loss for row in runs], 3),
        name: lambda runs: figure([measure(row) for row in runs], digits),
        "of exact": lambda runs: f"{statistics.fmean(map(measure, runs)) - base:+.{digits}f}",
    }
    return columns(by_configuration(rows), cells)


def gradients(runs: Sequence[TrainingRow]) -> str:
    codec = runs[0].run.codec
    words = f"{codec.bits} bits" if codec else "exact"
    return words + ("" if all(row.outcome.same_bits for row in runs) else " **(WRONG)**")


def measure_of(rows: Sequence[TrainingRow]) -> tuple[str, Callable[[TrainingRow], float], int]:
    """Returns what a task is measured by, its value for a row, and its digits."""
    if rows[0].task in OF_BYTES:
        return "test perplexity", lambda row: math.exp(row.outcome.test_loss), 2
    return "test acc (%)", lambda row: 100 * row.outcome.test_accuracy, 1


def figure(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {deviation(values):.{digits}f}"

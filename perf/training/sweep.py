"""Which runs a machine makes of each task, and the ranks that make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from graphar.numerics.codecs import Codec
from perf import world
from perf.ranks import ProcessRanks
from perf.training.report import TrainingRow
from perf.training.runs import Run, train
from perf.training.tasks import TASKS

BITS, BUCKET_SIZES = (8, 6, 5, 4, 2), (128, 1024)
FEWEST_BITS = 4  # from here down errors are fed back, too


@dataclass(frozen=True)
class TrainingPlan:
    """Attributes:
    device: "cuda" or "cpu".
    tasks: their names.
    every_codec: or only a few.
    """

    device: str
    world_size: int
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    every_codec: bool

    def runs(self) -> list[Run]:
        """Of one task."""
        kinds = [("torch", None, False), ("graphar", None, False), *(("graphar", *kind) for kind in self._quantised())]
        return [Run(*kind, seed, self.steps) for kind in kinds for seed in self.seeds]

    def run_count(self) -> int:
        return len(self.tasks) * len(self.runs())

    def _quantised(self) -> list[tuple[Codec, bool]]:
        bits, buckets = (BITS, BUCKET_SIZES) if self.every_codec else ((8, 4, 2), BUCKET_SIZES[:1])
        plain = [
            (Codec(bit, bucket, rounding), False)
            for bit in bits
            for bucket in buckets
            for rounding in ("nearest", "stochastic")
            if self.every_codec or (rounding == "nearest") == (bit > FEWEST_BITS)
        ]
        return plain + [(Codec(bit, buckets[0]), True) for bit in bits if bit <= FEWEST_BITS]


def run(plan: TrainingPlan) -> Iterator[TrainingRow]:
    """Rows as they are done."""
    yield from world.run(plan.world_size, partial(run_rank, plan))


def run_rank(plan: TrainingPlan, rank: int, port: int) -> Iterator[TrainingRow]:
    """Makes the runs as one of the ranks."""
    ranks = world.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()  # or the first run, which the others are compared with, would pay for it
    yield from rows_of(plan, ranks)
    ranks.level()


def rows_of(plan: TrainingPlan, ranks: ProcessRanks) -> Iterator[TrainingRow]:
    """Collective."""
    torch.backends.cudnn.deterministic = True
    for name in plan.tasks:
        task = TASKS[name]
        data = task.load()
        epochs = plan.steps * task.batch_size / len(data.train[0])
        for one in plan.runs():
            outcome = train(task, data, one, ranks.device)
            yield TrainingRow(name, data.digest(), one.backend, plan.world_size, task.batch_size, epochs, one, outcome)

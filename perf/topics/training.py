"""`python -m perf train`: trains small models on real data, with exact and with quantised gradients."""

from __future__ import annotations

import argparse
import importlib.util
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphar
from graphar.numerics.codecs import Codec
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks
from perf.md import NOT_SERVED, columns
from perf.models.tasks import TASKS, Data, Task
from perf.ratios import group
from perf.report import Arguments, Glance, Section
from perf.training_steps import Trainer, TrainingReport, data_parallel, loss_of, same_on_all_ranks

SEEDS, CPU_SEEDS = 3, 1
WARM_UP_STEPS = 5  # the first steps, which are not timed
BITS, BUCKET_SIZES = (8, 6, 5, 4, 2), (128, 1024)
FEEDBACK_MAX_BITS = 4  # codecs of at most 4 bits are also run with error feedback


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        backend: "torch" for DistributedDataParallel's built-in all-reduce, or "graphar".
        codec: the codec for gradients. None: exact gradients.
        error_feedback: whether each rank adds the rounding errors of its gradients to its next gradients.
        seed: the seed for the model, the order of samples, and stochastic rounding.
    """

    backend: str
    codec: Codec | None
    error_feedback: bool
    seed: int
    steps: int

    @property
    def hook(self) -> Callable | None:
        """graphar's hook; None for torch's all-reduce."""
        if self.backend == "torch":
            return None
        if self.codec is None:
            return graphar.ddp.exact_hook()
        return graphar.ddp.quantized_hook(replace(self.codec, seed=self.seed), error_feedback=self.error_feedback)


@dataclass(frozen=True)
class Outcome:
    """The result of a run. A loss is a mean cross-entropy in nats. An accuracy is the share of correct predictions.

    Attributes:
        train_loss, train_accuracy: of the trained model, on as many training samples as there are test samples.
        test_loss, test_accuracy: of the trained model, on the test data.
        time_s: the time of all steps, without evaluation.
        step_ms: the mean time of a step, without the first WARM_UP_STEPS steps.
        same_bits: whether all ranks ended with the same parameters, bit for bit.
    """

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    time_s: float
    step_ms: float
    parameters: int
    same_bits: bool


@dataclass(frozen=True)
class TrainingRow:
    """One run and its outcome."""

    task: str
    data: str
    backend: str
    world_size: int
    batch_size: int
    epochs: float
    run: Run
    outcome: Outcome

    derived: ClassVar[tuple[str, ...]] = ("mode", "bits", "sent_nbytes")

    @property
    def is_own(self) -> bool:
        return self.backend == "graphar"

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

    def configuration(self) -> tuple:
        return self.task, self.backend, self.mode, str(self.run.codec)


@dataclass(frozen=True)
class TrainingPlan:
    """The runs to make.

    Attributes:
        every_codec: whether to run all codecs, or only a few.
    """

    device: str
    world_size: int
    tasks: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    every_codec: bool

    def runs(self) -> list[Run]:
        kinds = [("torch", None, False), ("graphar", None, False), *(("graphar", *kind) for kind in self._quantised())]
        return [Run(*kind, seed, self.steps) for kind in kinds for seed in self.seeds]

    def _quantised(self) -> list[tuple[Codec, bool]]:
        bits, buckets = (BITS, BUCKET_SIZES) if self.every_codec else ((8, 4, 2), BUCKET_SIZES[:1])
        plain = [
            (Codec(bit, bucket, rounding), False)
            for bit in bits
            for bucket in buckets
            for rounding in ("nearest", "stochastic")
            if self.every_codec or (rounding == "nearest") == (bit > FEEDBACK_MAX_BITS)
        ]
        return plain + [(Codec(bit, buckets[0]), True) for bit in bits if bit <= FEEDBACK_MAX_BITS]


def run_rank(plan: TrainingPlan, rank: int, port: int) -> Iterator[TrainingRow]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    ranks.warm_up()  # the first run is the baseline of the others
    yield from rows_of(plan, ranks)
    ranks.barrier()


def rows_of(plan: TrainingPlan, ranks: ProcessRanks) -> Iterator[TrainingRow]:
    torch.backends.cudnn.deterministic = True
    for name in plan.tasks:
        task = TASKS[name]
        data = task.load()
        epochs = plan.steps * task.batch_size / len(data.train[0])
        for run in plan.runs():
            outcome = train(task, data, run, ranks.device)
            yield TrainingRow(name, data.digest(), run.backend, plan.world_size, task.batch_size, epochs, run, outcome)


def train(task: Task, data: Data, run: Run, device: torch.device) -> Outcome:
    torch.manual_seed(run.seed)
    model = task.model().to(device)
    trainer = Trainer(data_parallel(model, run.hook), task.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, run.steps)
    begin = time.perf_counter()
    for step, (x, y) in enumerate(batches(task, data, run)):
        if step == WARM_UP_STEPS:
            settled = finished(device)
        trainer.step(x.to(device), y.to(device))
        schedule.step()
    end = finished(device)
    for buffer in model.buffers():  # batch norms have different statistics on each rank
        dist.broadcast(buffer, 0)
    return Outcome(
        *evaluate(model, tuple(part[: len(data.test[0])] for part in data.train), task.batch_size, device),
        *evaluate(model, data.test, task.batch_size, device),
        time_s=end - begin,
        step_ms=(end - settled) / (run.steps - WARM_UP_STEPS) * 1e3,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        same_bits=same_on_all_ranks(model),
    )


def batches(task: Task, data: Data, run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields this rank's share of each step's samples. The order depends only on the seed."""
    xs, ys = data.train
    order, rank, world_size = torch.Generator().manual_seed(run.seed), dist.get_rank(), dist.get_world_size()
    in_epoch = len(xs) // task.batch_size
    for step in range(run.steps):
        if step % in_epoch == 0:
            samples = torch.randperm(len(xs), generator=order)
        batch = samples[step % in_epoch * task.batch_size :][: task.batch_size]
        mine = batch[rank::world_size]
        yield xs[mine], ys[mine]


def finished(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[Tensor, Tensor], batch_size: int, device: torch.device):
    """Returns mean loss and accuracy. Each rank evaluates a share of the batches. Collective."""
    model.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    parts = [part.split(batch_size) for part in data]
    for x, y in list(zip(*parts, strict=True))[dist.get_rank() :: dist.get_world_size()]:
        logits, classes = model(x.to(device)), y.to(device)
        right = (logits.argmax(-1) == classes).sum().item()
        totals += torch.tensor([loss_of(logits, classes, "sum").item(), right, classes.numel()], dtype=torch.float64)
    model.train()
    shares: list = [None] * dist.get_world_size()
    dist.all_gather_object(shares, totals)
    loss, right, count = torch.stack(shares).sum(0).tolist()
    return loss / count if math.isfinite(loss) else math.inf, right / count


@dataclass
class Training(TrainingReport):
    rows: list[TrainingRow] = field(default_factory=list)

    command: ClassVar[str] = "train"
    order: ClassVar[int] = 13
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--seeds 1 --steps 200",
        quick_on_gpus="--tasks digits --seeds 1 --steps 100",
        on_cpu="--tasks digits",
        quick_on_cpu="--tasks digits --steps 10",
    )
    work: ClassVar = staticmethod(run_rank)
    kind_of_plan: ClassVar[type[TrainingPlan]] = TrainingPlan
    reached: ClassVar[str] = "codecs reach the test loss of exact gradients, within noise"
    tasks: ClassVar[tuple[str, ...]] = ("digits", "bytes")
    seeds_on_cpu: ClassVar[int] = CPU_SEEDS
    steps_on_gpus: ClassVar[int] = 600
    steps_on_cpu: ClassVar[int] = 30

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument(
            "--tasks",
            nargs="+",
            choices=list(TASKS),
            default=list(cls.tasks),
            help=f"tasks to train on (default: {', '.join(cls.tasks)})",
        )
        seeds = (
            f"seeds, each of which is a run of every configuration (default: {SEEDS}; {cls.seeds_on_cpu} on the CPU)"
        )
        parser.add_argument("--seeds", type=int, metavar="N", help=seeds)

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> TrainingPlan:
        device, world_size, steps = cls.world(options, gpu_count)
        seeds = options.seeds or (SEEDS if device == "cuda" else cls.seeds_on_cpu)
        if steps <= WARM_UP_STEPS:
            sys.exit(f"--steps must be more than the {WARM_UP_STEPS} that are not timed")
        for task in options.tasks:
            if task in PACKAGES and importlib.util.find_spec(PACKAGES[task][0]) is None:
                sys.exit(f"{task} needs {PACKAGES[task][1]}")
        every_codec = device == "cuda"
        return cls.kind_of_plan(device, world_size, tuple(options.tasks), tuple(range(seeds)), steps, every_codec)

    @classmethod
    def count(cls, plan: TrainingPlan) -> int:
        return len(plan.tasks) * len(plan.runs())

    def line(self, row: TrainingRow) -> str:
        run, outcome = row.run, row.outcome
        bucket = f"/{run.codec.bucket_size}" if run.codec else ""
        return (
            f"{row.task:>7} {row.backend:>8} {row.mode:>22} {row.bits:>5g}{bucket:<5} seed {run.seed}:"
            f" test loss {outcome.test_loss:.3f}, accuracy {outcome.test_accuracy:.1%}, {outcome.step_ms:.2f} ms a step"
        )

    def is_wrong(self, row: TrainingRow) -> bool:
        return not row.outcome.same_bits

    def where(self, row: TrainingRow) -> str:
        return f"{row.task} {row.backend} {row.mode}"

    def findings(self) -> list[str]:
        return [f"{task}: {conclusion(rows)}" for task, rows in self._by_task().items()]

    def sections(self) -> list[Section]:
        return [Section(title(rows), [run_table(rows)]) for rows in self._by_task().values()]

    def _by_task(self) -> dict[str, list[TrainingRow]]:
        return {task: list(rows) for task, rows in groupby(self.rows, key=lambda row: row.task)}

    def glance(self) -> Glance:
        halves = [near_and_far(rows) for rows in self._by_task().values()]
        near, far = (sum(len(half[at]) for half in halves) for at in (0, 1))
        if not near + far:
            return Glance("no codec was trained with")
        return Glance(self.reached, figure=f"{near} of {near + far}")


# By task, the module that has its data, and how to install it.
PACKAGES = {
    "digits": ("sklearn", "scikit-learn: pip install 'graphar-nvlink[train]'; or leave them out: --tasks bytes"),
    "animals": ("animal_mnist", "animal-mnist: pip install --no-deps animal-mnist; or leave them out: --tasks text"),
}


def title(rows: Sequence[TrainingRow]) -> str:
    first = rows[0]
    return f"{first.task}: {first.outcome.parameters:,} parameters, {first.run.steps} steps, data hash {first.data}"


def conclusion(rows: Sequence[TrainingRow]) -> str:
    exact = [row for row in rows if row.run.codec is None]
    base, noise = mean(exact, "test_loss"), _spread(exact, "test_loss")
    near, far = ([f"{runs[0].bits:g} bits ({runs[0].mode})" for runs in of] for of in near_and_far(rows))
    more = f" (standard deviation {noise:.3f})" if len(exact) > 1 else ""
    sentences = [f"With exact gradients the test loss is {base:.3f}{more}."]
    if near:
        sentences.append(f"No more than 2 % or two standard deviations above it: {', '.join(near)}.")
    if far:
        sentences.append(f"Worse: {', '.join(far)}.")
    return " ".join(sentences)


def near_and_far(rows: Sequence[TrainingRow]) -> tuple[list[list[TrainingRow]], list[list[TrainingRow]]]:
    """Splits one task's runs with codecs into runs that train as well as exact gradients, and the other runs.

    Each result is grouped by :func:`by_configuration`. Runs train as well if their mean test loss exceeds the loss with
    exact gradients by at most 2 %, or by at most two standard deviations of the runs with exact gradients.
    """
    exact = [row for row in rows if row.run.codec is None]
    base, noise = mean(exact, "test_loss"), _spread(exact, "test_loss")
    near, far = [], []
    for runs in by_configuration([row for row in rows if row.run.codec]):
        worse = mean(runs, "test_loss") - base
        (near if worse <= max(0.02 * base, 2 * noise) else far).append(runs)
    return near, far


def run_table(rows: Sequence[TrainingRow]) -> str:
    groups = by_configuration(rows)
    base = mean(groups[0], "step_ms")
    loss, percent = "{:.3f}".format, lambda share: f"{100 * share:.1f}"
    cells = {
        "backend": lambda runs: runs[0].backend + ("" if all(r.outcome.same_bits for r in runs) else " **(WRONG)**"),
        "mode": lambda runs: runs[0].mode,
        "ranks": lambda runs: runs[0].world_size,
        "bits": lambda runs: f"{runs[0].bits:g}",
        "bucket": lambda runs: runs[0].run.codec.bucket_size if runs[0].run.codec else NOT_SERVED,
        "epochs": lambda runs: f"{runs[0].epochs:.1f}",
        "batch": lambda runs: runs[0].batch_size,
        "train loss": lambda runs: _figure(runs, "train_loss", loss),
        "train acc (%)": lambda runs: _figure(runs, "train_accuracy", percent),
        "test loss": lambda runs: _figure(runs, "test_loss", loss),
        "test acc (%)": lambda runs: _figure(runs, "test_accuracy", percent),
        "time (s)": lambda runs: f"{mean(runs, 'time_s'):.1f}",
        "step (ms)": lambda runs: f"{mean(runs, 'step_ms'):.2f}",
        "of_torch": lambda runs: f"{mean(runs, 'step_ms') / base:.2f}",
        "sent (MB)": lambda runs: f"{runs[0].sent_nbytes / 1e6:.2f}",
    }
    return columns(groups, cells)


def by_configuration(rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
    return list(group(rows, TrainingRow.configuration).values())


def mean(rows: Sequence[TrainingRow], name: str) -> float:
    return statistics.fmean(getattr(row.outcome, name) for row in rows)


def _spread(rows: Sequence[TrainingRow], name: str) -> float:
    return deviation([getattr(row.outcome, name) for row in rows])


def deviation(values: Sequence[float]) -> float:
    """Returns the standard deviation; 0 for one value, and where a training has diverged."""
    return statistics.stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else 0.0


def _figure(rows: Sequence[TrainingRow], name: str, form: Callable[[float], str]) -> str:
    return form(mean(rows, name)) + (f" ± {form(_spread(rows, name))}" if len(rows) > 1 else "")

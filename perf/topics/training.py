"""`python -m perf train`: training on real data with exact and with quantised gradients, its accuracy and its time."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar.numerics.codecs import Codec
from perf.charts import Axis, Line, Plot
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks
from perf.machine import check_world_sizes
from perf.models.tasks import TASKS, Data, Task
from perf.report import NOT_SERVED, Arguments, Glance, Report, Section, Timed, table

CPU_WORLD_SIZE, CPU_SEEDS, CPU_STEPS = 2, 1, 30
SEEDS, STEPS = 3, 600
WARM_UP_STEPS = 5  # left out of the time of a step
CURVE_POINTS = 50  # at most, of a curve of the loss over the steps
BITS, BUCKET_SIZES = (8, 6, 5, 4, 2), (128, 1024)
FEWEST_BITS = 4  # from here down errors are fed back, too


@dataclass(frozen=True)
class Run:
    """Attributes:
    backend: "torch", whose own reduction DistributedDataParallel takes, or "graphar".
    codec: of gradients, with graphar; None: exact.
    error_feedback: each rank adds what rounding took from its gradients to the next ones.
    seed: of the model, the order of the samples, and stochastic rounding.
    steps: of the optimiser.
    """

    backend: str
    codec: Codec | None
    error_feedback: bool
    seed: int
    steps: int


@dataclass(frozen=True)
class Outcome:
    """Losses are mean cross-entropies in nats, accuracies shares of right predictions; both of the finished model.

    Attributes:
        time_s: of all steps, evaluation left out.
        step_ms: of one step, the mean after the first few.
        same_bits: whether all ranks ended with the same parameters, bit for bit.
        losses: the mean over all ranks' batches in each stretch of steps, in training; see :func:`stretches`.
    """

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float
    time_s: float
    step_ms: float
    parameters: int
    same_bits: bool
    losses: list[float] = field(default_factory=list)


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

    derived: ClassVar[tuple[str, ...]] = ("mode", "bits", "sent_nbytes")

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


# ---- on a rank ------------------------------------------------------------------------------------------------------


def run_rank(plan: TrainingPlan, rank: int, port: int) -> Iterator[TrainingRow]:
    """Makes the runs as one of the ranks."""
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
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


def train(task: Task, data: Data, run: Run, device: torch.device) -> Outcome:
    """Collective."""
    torch.manual_seed(run.seed)
    model = task.model().to(device)
    ranks = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    if run.backend == "graphar":
        ranks.register_comm_hook(None, hook_of(run))
    optimizer = torch.optim.AdamW(ranks.parameters(), lr=task.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, run.steps)
    losses = []
    begin = time.perf_counter()
    for step, (x, y) in enumerate(batches(task, data, run)):
        if step == WARM_UP_STEPS:
            settled = finished(device)
        optimizer.zero_grad()
        loss = loss_of(ranks(x.to(device)), y.to(device))
        loss.backward()
        losses.append(loss.detach())  # on the device: to read it would hold up the next step
        optimizer.step()
        schedule.step()
    end = finished(device)
    for buffer in model.buffers():  # each rank's batch norms have seen other samples
        dist.broadcast(buffer, 0)
    return Outcome(
        *evaluate(model, tuple(part[: len(data.test[0])] for part in data.train), task.batch_size, device),
        *evaluate(model, data.test, task.batch_size, device),
        time_s=end - begin,
        step_ms=(end - settled) / (run.steps - WARM_UP_STEPS) * 1e3,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        same_bits=same_on_all_ranks(model),
        losses=curve_of(torch.stack(losses)),
    )


def stretches(steps: int) -> list[int]:
    """Where the stretches of a curve's points begin, and, last, where the last one ends."""
    points = min(CURVE_POINTS, steps)
    return [steps * point // points for point in range(points + 1)]


def curve_of(losses: Tensor) -> list[float]:
    """The mean of each stretch of this rank's losses, and over the ranks. Collective."""
    bounds = stretches(len(losses))
    means = torch.stack([losses[begin:end].mean() for begin, end in pairwise(bounds)]).double()
    dist.all_reduce(means)
    return [mean if math.isfinite(mean) else math.inf for mean in (means / dist.get_world_size()).tolist()]


def hook_of(run: Run):
    if run.codec is None:
        return graphar.ddp.exact_hook()
    return graphar.ddp.quantized_hook(replace(run.codec, seed=run.seed), error_feedback=run.error_feedback)


def batches(task: Task, data: Data, run: Run) -> Iterator[tuple[Tensor, Tensor]]:
    """This rank's share of each step's samples, in an order that depends on the seed alone."""
    xs, ys = data.train
    order, rank, world_size = torch.Generator().manual_seed(run.seed), dist.get_rank(), dist.get_world_size()
    in_epoch = len(xs) // task.batch_size
    for step in range(run.steps):
        if step % in_epoch == 0:
            samples = torch.randperm(len(xs), generator=order)
        batch = samples[step % in_epoch * task.batch_size :][: task.batch_size]
        mine = batch[rank::world_size]
        yield xs[mine], ys[mine]


def loss_of(logits: Tensor, classes: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), classes.flatten(), reduction=reduction)


def finished(device: torch.device) -> float:
    """The time, once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def evaluate(model: nn.Module, data: tuple[Tensor, Tensor], batch_size: int, device: torch.device):
    """Mean loss, and accuracy. Each rank does a share of the batches."""
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


def same_on_all_ranks(model: nn.Module) -> bool:
    """Whether every rank has the first one's parameters, bit for bit; they are fp32. Collective."""
    differ = []
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        differ.append((first.view(torch.int32) != parameter.detach().view(torch.int32)).any())
    count = torch.stack(differ).sum()
    dist.all_reduce(count)
    return count.item() == 0


# ---- the topic ------------------------------------------------------------------------------------------------------


@dataclass
class Training(Report):
    rows: list[TrainingRow] = field(default_factory=list)

    name: ClassVar[str] = "training"
    command: ClassVar[str] = "train"
    title: ClassVar[str] = "Training with quantised gradients"
    place: ClassVar[int] = 8
    help: ClassVar[str] = "train small models with exact and with quantised gradients"
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--seeds 1 --steps 200",
        quick_on_gpus="--tasks digits --seeds 1 --steps 100",
        on_cpu="--tasks digits",
        quick_on_cpu="--tasks digits --steps 10",
    )
    notes: ClassVar[str] = """\
- backend: torch's own reduction over NCCL or gloo, or graphar's.
- mode, bits, bucket: the codec of the gradients. bits: bits of an element on the wire, its share of the scales
  included. EF: with error feedback. Biases and norms are averaged exactly.
- loss: mean cross-entropy in nats; perplexity is its exponential. acc: share of right predictions, of classes or of
  next bytes. Both are means over the seeds, with the standard deviation if there are several.
- time: seconds of all steps, without evaluation. step: of one step, after the first few.
- of_torch: the step's time / that of torch's own reduction; below 1.00 the method is faster.
- sent: what a rank must send in a step, 2(N-1)/N of its gradients.

A seed decides the model, the order of the samples, and stochastic rounding. Every row has the same seeds. After each
run the parameters of all ranks were compared bit for bit."""

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--world-size", type=int, metavar="N", help="ranks (default: all GPUs; 2 on the CPU)")
        parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
        seeds = f"how many (default: {SEEDS}; {CPU_SEEDS} on the CPU)"
        parser.add_argument("--seeds", type=int, metavar="N", help=seeds)
        parser.add_argument("--steps", type=int, metavar="N", help=f"default: {STEPS}; {CPU_STEPS} on the CPU")

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> TrainingPlan:
        """Every codec on GPUs, a few on the CPU."""
        on_gpus = gpu_count >= 2
        world_size = options.world_size or (gpu_count if on_gpus else CPU_WORLD_SIZE)
        seeds = options.seeds or (SEEDS if on_gpus else CPU_SEEDS)
        steps = options.steps or (STEPS if on_gpus else CPU_STEPS)
        check_world_sizes([world_size], gpu_count)
        if steps <= WARM_UP_STEPS:
            sys.exit(f"--steps must be more than the {WARM_UP_STEPS} that are not timed")
        if "digits" in options.tasks:
            check_digits()
        device = "cuda" if on_gpus else "cpu"
        return TrainingPlan(device, world_size, tuple(options.tasks), tuple(range(seeds)), steps, every_codec=on_gpus)

    @classmethod
    def count(cls, plan: TrainingPlan) -> int:
        return plan.run_count()

    def measure(self, plan: TrainingPlan) -> Iterator[TrainingRow]:
        yield from ranks_of.run(plan.world_size, partial(run_rank, plan))

    def line(self, row: TrainingRow) -> str:
        run, outcome = row.run, row.outcome
        bucket = f"/{run.codec.bucket_size}" if run.codec else ""
        return (
            f"{row.task:>7} {row.backend:>8} {row.mode:>22} {row.bits:>5g}{bucket:<5} seed {run.seed}:"
            f" test loss {outcome.test_loss:.3f}, accuracy {outcome.test_accuracy:.1%}, {outcome.step_ms:.2f} ms a step"
        )

    # ---- what is said ----

    def wrong(self) -> list[str]:
        """Runs of graphar's whose ranks ended with different parameters."""
        return self._apart(own=True)

    def wrong_peers(self) -> list[str]:
        return self._apart(own=False)

    def _apart(self, own: bool) -> list[str]:
        mine = [row for row in self.rows if (row.backend == "graphar") is own]
        return [f"{row.task} {row.backend} {row.mode}" for row in mine if not row.outcome.same_bits]

    def findings(self) -> list[str]:
        return [f"{task}: {conclusion(rows)}" for task, rows in self._by_task().items()]

    def sections(self) -> list[Section]:
        found = []
        for rows in self._by_task().values():
            figures = [loss_by_step(rows)] if any(row.curve for row in rows) else []
            figures += [loss_by_bits(rows)] if any(row.run.codec for row in rows) else []
            found.append(Section(title(rows), [run_table(rows)], figures))
        return found

    def _by_task(self) -> dict[str, list[TrainingRow]]:
        return {task: list(rows) for task, rows in groupby(self.rows, key=lambda row: row.task)}

    def glance(self) -> Glance:
        halves = [near_and_far(rows) for rows in self._by_task().values()]
        near, far = (sum(len(half[at]) for half in halves) for at in (0, 1))
        if not near + far:
            return Glance("no codec was trained with")
        return Glance("codecs train as exact gradients do, within noise", figure=f"{near} of {near + far}")

    def timed(self) -> list[Timed]:
        return [
            Timed(
                (
                    rows[0].backend,
                    f"{rows[0].world_size} ranks",
                    rows[0].task,
                    f"{rows[0].mode}, {rows[0].bits:g} bits",
                    f"buckets of {rows[0].run.codec.bucket_size}" if rows[0].run.codec else "",
                ),
                mean(rows, "step_ms") * 1e3,
                not all(row.outcome.same_bits for row in rows),
                rows[0].backend == "graphar",
            )
            for rows in alike(self.rows)
        ]


def check_digits() -> None:
    """Ends the program where the digits' package is missing."""
    try:
        import sklearn  # noqa: F401
    except ImportError:
        sys.exit("digits needs scikit-learn: pip install 'graphar-nvlink[train]'; or leave them out: --tasks bytes")


def title(rows: Sequence[TrainingRow]) -> str:
    """Of one task's rows."""
    one = rows[0]
    return f"{one.task}: {one.outcome.parameters:,} parameters, {one.run.steps} steps, data {one.data}"


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


def run_table(rows: Sequence[TrainingRow]) -> str:
    header = [
        "backend",
        "mode",
        "ranks",
        "bits",
        "bucket",
        "epochs",
        "batch",
        "train loss",
        "train acc (%)",
        "test loss",
    ]
    header += ["test acc (%)", "time (s)", "step (ms)", "of_torch", "sent (MB)"]
    first, lines = mean(alike(rows)[0], "step_ms"), []
    for runs in alike(rows):
        one = runs[0]
        loss = partial(_figure, runs, form="{:.3f}".format)
        accuracy = partial(_figure, runs, form=lambda share: f"{100 * share:.1f}")
        cells = (
            one.backend + ("" if all(row.outcome.same_bits for row in runs) else " **(WRONG)**"),
            *(one.mode, one.world_size, f"{one.bits:g}"),
            *(one.run.codec.bucket_size if one.run.codec else NOT_SERVED, f"{one.epochs:.1f}", one.batch_size),
            *(loss("train_loss"), accuracy("train_accuracy"), loss("test_loss"), accuracy("test_accuracy")),
            *(f"{mean(runs, 'time_s'):.1f}", f"{mean(runs, 'step_ms'):.2f}", f"{mean(runs, 'step_ms') / first:.2f}"),
            f"{one.sent_nbytes / 1e6:.2f}",
        )
        lines.append([str(cell) for cell in cells])
    return table(header, lines)


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


# ---- figures --------------------------------------------------------------------------------------------------------


def loss_by_step(rows: Sequence[TrainingRow]) -> Plot:
    """A line for exact gradients and for each of some numbers of bits, each the mean over its seeds."""
    lines = []
    for runs in drawn(rows):
        curves = [row.curve for row in runs if row.curve]
        points = [(step[0][0], statistics.fmean(loss for _, loss in step)) for step in zip(*curves, strict=True)]
        codec = runs[0].run.codec
        name = f"{codec.bits} bits" + (", EF" if runs[0].run.error_feedback else "") if codec else "exact"
        lines.append(Line(name, points))
    codec = next((row.run.codec for row in rows if row.run.codec), None)
    of_codecs = f" Buckets of {codec.bucket_size}; EF: errors are fed back." if codec else ""
    note = f"Means over the ranks, the seeds and stretches of steps.{of_codecs}"
    return Plot("Training loss by step", lines, Axis("step"), Axis("training loss (nats)", 10), note=note)


DRAWN_BITS = (8, 6, 4, 2)


def drawn(rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
    """Few enough to tell apart: the last exact backend, DRAWN_BITS once each, and the fewest with errors fed back.

    Of several codecs with as many bits it is the first that rounds stochastically, or the first; the smallest bucket
    stands first.
    """
    codecs = [runs for runs in alike(rows) if runs[0].run.codec]
    plain = [runs for runs in codecs if not runs[0].run.error_feedback and runs[0].run.codec.bits in DRAWN_BITS]
    plain.sort(key=lambda runs: (-runs[0].run.codec.bits, runs[0].run.codec.rounding == "nearest"))
    each = [next(of_bits) for _, of_bits in groupby(plain, key=lambda runs: runs[0].run.codec.bits)]
    fed_back = [runs for runs in codecs if runs[0].run.error_feedback]
    fewest = min(fed_back, key=lambda runs: runs[0].run.codec.bits, default=None)
    exact = [runs for runs in alike(rows) if not runs[0].run.codec]
    return exact[-1:] + each + ([fewest] if fewest else [])


def loss_by_bits(rows: Sequence[TrainingRow]) -> Plot:
    """A line a mode and bucket size; the exact gradients' is a rule."""
    exact = mean([row for row in rows if row.run.codec is None], "test_loss")
    found: dict[str, list[tuple[float, float]]] = {}
    for runs in alike([row for row in rows if row.run.codec]):
        name = f"{runs[0].mode.removeprefix('absmax ')}, {runs[0].run.codec.bucket_size}"
        found.setdefault(name, []).append((runs[0].bits, mean(runs, "test_loss")))
    lines = []
    for name, points in found.items():
        points.sort()
        lines.append(Line(name, points, [f"{bits:g} bits: test loss {loss:.4f}" for bits, loss in points]))
    note = "Lines: rounding, and elements that share a scale."
    axes = Axis("bits of a gradient on the wire"), Axis("test loss (nats)")
    return Plot("Test loss by bits", lines, *axes, [(exact, "exact")], note)

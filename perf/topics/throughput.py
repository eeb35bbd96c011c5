"""`python -m perf throughput`: times training steps of well-known models with several gradient reductions."""

from __future__ import annotations

import argparse
import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import nn

import graphar
from graphar.numerics.codecs import Codec, codec
from graphar.ops.preparation import prepare
from graphar.runtime.registry import engine_of_group
from perf import training_steps
from perf.harness import ranks as ranks_of
from perf.harness.ranks import ProcessRanks, Ranks, agreed
from perf.md import NOT_SERVED, columns, table
from perf.models.workloads import TINY, WORKLOADS, Workload
from perf.ratios import LIBRARIES, group
from perf.report import Arguments, Glance, Section
from perf.training_steps import Batch, Trainer, data_parallel

BITS, BUCKET_SIZE = (8, 6, 5, 4, 2), 128
NAIVE = ("one by one", "flattened")


@dataclass(frozen=True)
class Reduction:
    """How ranks average their gradients.

    Attributes:
        backend: "nccl" or "gloo": DistributedDataParallel's built-in all-reduce. "graphar": graphar's hook. One of
            NAIVE: blocking all-reduces with NCCL or gloo after the backward pass. "alone": gradients are not averaged.
        codec: the text of graphar's codec. None: exact gradients.
        algorithm: the algorithm of graphar's exact hook.
        overlap: whether the exact hook sums buckets beside the backward pass.
    """

    backend: str
    codec: str | None = None
    algorithm: str = "auto"
    overlap: bool = True

    derived: ClassVar[tuple[str, ...]] = ("bits",)

    @property
    def is_alone(self) -> bool:
        return self.backend == training_steps.ALONE

    @property
    def is_naive(self) -> bool:
        return self.backend in NAIVE

    @property
    def seeded(self) -> Codec | None:
        """The codec with a fixed seed; None for exact gradients."""
        return replace(codec(self.codec), seed=0) if self.codec else None

    @property
    def bits(self) -> float:
        """The bits of an element on the wire, including its share of the scales."""
        return self.seeded.bits_per_element if self.seeded else 32

    @property
    def hook(self) -> Callable | None:
        """graphar's hook; None for other backends."""
        if self.backend != "graphar":
            return None
        if self.codec:
            return graphar.ddp.quantized_hook(self.seeded)
        return graphar.ddp.exact_hook(algorithm=self.algorithm, overlap=self.overlap)

    def __str__(self) -> str:
        if self.backend != "graphar":
            return self.backend
        how = "" if self.algorithm == "auto" else ", copies"
        return f"{self.seeded.bits} bits" if self.seeded else f"exact{how}{'' if self.overlap else ', afterwards'}"


@dataclass(frozen=True)
class ThroughputRow(training_steps.StepRow):
    """The measured training steps of one model with one gradient reduction.

    Attributes:
        unit: the unit of throughput, "img" or "tokens".
        exact_parameters: the number of parameters whose gradients are averaged exactly even with a codec.
        batch_size: samples per rank and step.
        items: the images or tokens of a step, over all ranks.
        way: the gradient reduction.
        steps: the number of steps, including warm-up.
        step_ms: the median time of a step.
        loss: the loss of the last step.
        same_bits: whether all ranks ended with the same parameters. True if gradients are not averaged.
    """

    model: str
    unit: str
    parameters: int
    exact_parameters: int
    world_size: int
    batch_size: int
    items: int
    way: Reduction
    steps: int
    step_ms: float
    loss: float
    same_bits: bool

    derived: ClassVar[tuple[str, ...]] = ("throughput", "sent_nbytes")

    @property
    def method(self) -> str:
        return str(self.way)

    @property
    def what(self) -> tuple[str, ...]:
        return self.model, f"batch {self.batch_size}"

    @property
    def wrong(self) -> int:
        return int(not self.same_bits)

    @property
    def is_own(self) -> bool:
        return self.way.backend == "graphar"

    @property
    def throughput(self) -> float:
        return self.items / self.step_ms * 1e3

    @property
    def sent_nbytes(self) -> float:
        if self.is_alone:
            return 0
        exact = 32 * self.exact_parameters if self.way.codec else 0  # sent twice: exactly, and with the codec
        on_wire = (self.parameters * self.way.bits + exact) / 8
        return on_wire * 2 * (self.world_size - 1) / self.world_size


@dataclass(frozen=True)
class ThroughputPlan:
    """The models to measure.

    Attributes:
        models: names in WORKLOADS.
        steps: the number of timed steps of each reduction.
        batch_size: samples per rank and step. None: each model's default.
        budget_s: the time limit for one model in seconds. No steps are timed after it. None: no limit.
    """

    device: str
    world_size: int
    models: tuple[str, ...]
    steps: int
    batch_size: int | None
    budget_s: float | None


def run_rank(plan: ThroughputPlan, rank: int, port: int) -> Iterator[ThroughputRow | str]:
    ranks = ranks_of.join(rank, plan.world_size, plan.device, port)
    codecs = [reduction.seeded for reduction in reductions(dist.get_backend()) if reduction.codec]
    # The time limit of the first model must not include compilation.
    prepare(engine_of_group(""), ["allreduce"], [torch.float32], None, codecs)
    ranks.warm_up()
    for name in plan.models:
        yield from rows_of(plan, WORKLOADS[name], ranks)
        release(plan.device)
    ranks.barrier()


def release(device: str) -> None:
    if device == "cuda":
        gc.collect()  # DistributedDataParallel has reference cycles
        torch.cuda.empty_cache()


def rows_of(plan: ThroughputPlan, workload: Workload, ranks: ProcessRanks) -> Iterator[ThroughputRow | str]:
    """Yields a row for each reduction of one model's gradients. Collective."""
    begin = time.perf_counter()
    model, reason = make(workload, ranks)
    if model is None:
        yield reason
        return
    batch_size = plan.batch_size or workload.batch_size
    batch = workload.batch(batch_size, ranks.device, seed=ranks.rank)
    every = reductions(dist.get_backend())
    groups = [every] if workload.copies_fit else [[reduction] for reduction in every]
    for at, together in enumerate(groups, start=1):
        limited = replace(plan, budget_s=plan.budget_s and plan.budget_s * at / len(groups))
        trainers = {reduction: trainer_with(reduction, model) for reduction in together}
        times = train_and_time(trainers, batch, limited, ranks, begin)
        for (reduction, trainer), blocks in zip(trainers.items(), times, strict=True):
            yield row_of(reduction, trainer, blocks, workload, batch_size, plan.world_size)
        del trainer, trainers  # the last references to these copies of the model
        release(plan.device)


def trainer_with(reduction: Reduction, model: nn.Module) -> Trainer:
    """Returns the trainer of a copy of the model. Collective."""
    model, around = copy.deepcopy(model), nullcontext
    if not reduction.is_naive:
        model = data_parallel(model, reduction.hook, gradient_as_bucket_view=True)
        around = model.no_sync if reduction.is_alone else nullcontext
    trainer = Trainer(model, fused=next(model.parameters()).is_cuda, autocast=True, around=around)
    if reduction.is_naive:
        flattened = reduction.backend == "flattened"
        trainer.optimizer.register_step_pre_hook(lambda *_: average(model, flattened=flattened))
    return trainer


def train_and_time(
    trainers: Mapping[Reduction, Trainer], batch: Batch, plan: ThroughputPlan, ranks: ProcessRanks, begin: float
) -> list[list[float]]:
    """Times blocks of steps of all trainers in turn. Returns their times. Collective."""
    turns = [partial(trainer.make_steps, batch) for trainer in trainers.values()]
    for make_steps in turns:
        make_steps(training_steps.WARM_UP_STEPS, seed=0)
    return training_steps.time_blocks(turns, plan, ranks, begin)


def row_of(
    reduction: Reduction, trainer: Trainer, blocks: list[float], workload: Workload, batch_size: int, world_size: int
) -> ThroughputRow:
    parameters = list(trainer.model.parameters())
    return ThroughputRow(
        model=workload.name,
        unit=workload.unit,
        parameters=sum(parameter.numel() for parameter in parameters),
        exact_parameters=sum(p.numel() for p in parameters if graphar.ddp.has_one_dimension(p)),
        world_size=world_size,
        batch_size=batch_size,
        items=workload.items * batch_size * world_size,
        way=reduction,
        steps=training_steps.WARM_UP_STEPS + training_steps.BLOCK * len(blocks),
        step_ms=training_steps.step_ms_of(blocks),
        loss=trainer.mean_loss(),
        same_bits=reduction.is_alone or training_steps.same_on_all_ranks(trainer.model),
    )


def make(workload: Workload, ranks: Ranks) -> tuple[nn.Module | None, str]:
    """Returns the model, or None and a message that names the missing package. Collective."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        with ranks.device:
            model = workload.make()
        images_on_gpu = ranks.device.type == "cuda" and workload.unit == "img"
        return model.to(memory_format=torch.channels_last) if images_on_gpu else model

    if not workload.package:
        return make(), ""
    # A package built for another version of torch may raise any exception.
    model, reason = agreed(ranks, make)
    return model, f"{workload.name}: needs {workload.package} ({reason})" if reason else ""


def reductions(backend: str) -> list[Reduction]:
    """Returns the reductions to compare: none, two naive ones, the built-in one, graphar's exact ones, and codecs."""
    codecs = [Codec(bits, BUCKET_SIZE, "stochastic").text for bits in BITS]
    plain = [*map(Reduction, ("alone", *NAIVE, backend, "graphar"))]
    afterwards = Reduction("graphar", overlap=False)
    copies = [Reduction("graphar", algorithm="two_shot_copies")] if backend == "nccl" else []
    return [*plain, afterwards, *copies, *(Reduction("graphar", text) for text in codecs)]


def average(model: nn.Module, *, flattened: bool) -> None:
    """Averages the gradients over the ranks in place with blocking all-reduces. Collective."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    world_size = dist.get_world_size()
    if not flattened:
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= world_size
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= world_size
    parts = flat.split([gradient.numel() for gradient in gradients])
    means = [part.view_as(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    torch._foreach_copy_(gradients, means)


@dataclass
class Throughput(training_steps.TrainingReport):
    rows: list[ThroughputRow] = field(default_factory=list)

    order: ClassVar[int] = 14
    arguments: ClassVar[Arguments] = Arguments(
        on_gpus="--models resnet50 bert_base gpt2_xl --seconds 15",
        quick_on_gpus="--models transformer_xl_base --steps 20",
        on_cpu="--steps 10",
        quick_on_cpu="--steps 10",
    )
    work: ClassVar = staticmethod(run_rank)
    steps_on_gpus: ClassVar[int] = 200
    steps_on_cpu: ClassVar[int] = 20

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        models = f"{', '.join(WORKLOADS)} (default: all but {TINY}; on the CPU {TINY} alone)"
        parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), metavar="MODEL", help=models)
        samples = "samples per rank (default: depends on the model)"
        parser.add_argument("--batch-size", type=int, metavar="N", help=samples)
        parser.add_argument(
            "--seconds", type=float, metavar="S", help="time limit per model. The steps finished by then are reported"
        )

    @classmethod
    def plan(cls, options: argparse.Namespace, gpu_count: int) -> ThroughputPlan:
        device, world_size, steps = cls.world(options, gpu_count)
        training_steps.check_blocks(steps, (options.batch_size, options.seconds), "--batch-size and --seconds")
        default = tuple(name for name in WORKLOADS if (name == TINY) != (device == "cuda"))
        models = tuple(options.models or default)
        return ThroughputPlan(device, world_size, models, steps, options.batch_size, options.seconds)

    @classmethod
    def count(cls, plan: ThroughputPlan) -> int:
        return len(plan.models) * len(reductions("nccl" if plan.device == "cuda" else "gloo"))

    def line(self, row: ThroughputRow) -> str:
        return (
            f"{row.model:>20} {row.way!s:>10}: {row.throughput:>10,.0f} {row.unit}/s, {row.step_ms:.2f} ms a step,"
            f" loss {row.loss:.3f} after {row.steps} steps"
        )

    def where(self, row: ThroughputRow) -> str:
        return f"{row.model} {row.way}"

    def sections(self) -> list[Section]:
        by_model = list(group(self.rows, lambda row: row.model).values())
        if not by_model:
            return []
        sections = [Section("All models", [overview(by_model)])]
        for rows in by_model:
            first = rows[0]
            ranks = f"{first.world_size} ranks, batch of {first.batch_size} per rank"
            title = f"{first.model}: {first.parameters:,} parameters, {ranks}"
            sections.append(Section(title, [details(rows)]))
        return sections

    def glance(self) -> Glance:
        ratios, base = {}, "torch's own reduction"
        for rows in group(self.rows, lambda row: row.model).values():
            exact = next((row for row in rows if str(row.way) == "exact" and row.same_bits), None)
            if exact and (step_ms := training_steps.baseline_ms(rows)):
                base = next(f"DistributedDataParallel over {LIBRARIES[row.method]}" for row in rows if row.is_baseline)
                ratios[exact.model] = exact.step_ms / step_ms
        return Glance(f"time of a training step with graphar's exact hook / with {base}, by model", ratios)


def overview(by_model: Sequence[Sequence[ThroughputRow]]) -> str:
    """Returns a table of step time / time with the built-in all-reduce, by model (rows) and reduction (columns)."""
    names = list(dict.fromkeys(str(row.way) for rows in by_model for row in rows if not row.is_alone))
    lines = []
    for rows in by_model:
        cells = {str(row.way): flagged(training_steps.of_torch(row, rows), row) for row in rows}
        first = next((row for row in rows if row.is_baseline), None)
        rate = f"{first.throughput:,.0f}" if first else NOT_SERVED
        lines.append([f"{rows[0].model}, {rows[0].unit}", rate, *(cells.get(name, NOT_SERVED) for name in names)])
    return table(["model, items", "torch's own (items/s)", *(f"{name} (of_torch)" for name in names)], lines)


def details(rows: Sequence[ThroughputRow]) -> str:
    alone = training_steps.alone_ms(rows)
    cells = {
        "gradients": lambda row: flagged(str(row.way), row),
        "bits": lambda row: NOT_SERVED if row.is_alone else f"{row.way.bits:g}",
        "step (ms)": lambda row: f"{row.step_ms:.2f}",
        "of_torch": lambda row: training_steps.of_torch(row, rows),
        f"{rows[0].unit}/s": lambda row: f"{row.throughput:,.0f}",
        "communication (%)": lambda row: NOT_SERVED if alone is None else f"{100 * (1 - alone / row.step_ms):.1f}",
        "sent (MB)": lambda row: f"{row.sent_nbytes / 1e6:.1f}",
        "loss (nats)": lambda row: f"{row.loss:.3f}",
        "after steps": lambda row: row.steps,
    }
    return columns(rows, cells)


def flagged(text: str, row: ThroughputRow) -> str:
    return text if row.same_bits else f"{text} **(WRONG)**"

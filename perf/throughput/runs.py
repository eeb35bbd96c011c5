"""Trains one model in several ways side by side, and times their steps."""

from __future__ import annotations

import contextlib
import copy
import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar.numerics.codecs import Codec
from graphar.runtime.registry import engine_of_group
from perf import world
from perf.ranks import ProcessRanks, Ranks, agreed
from perf.throughput.models import WORKLOADS, Workload
from perf.throughput.report import NAIVE, ThroughputRow, Way
from perf.training.runs import loss_of, same_on_all_ranks

BITS, BUCKET_SIZE = (8, 6, 5, 4, 2), 128
BLOCK = 10  # steps that one way makes before the next has its turn
WARM_UP_STEPS = 3  # the second one's buckets are not the first one's
FEWEST_BLOCKS = 2
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class ThroughputPlan:
    """Attributes:
    device: "cuda" or "cpu".
    models: names of WORKLOADS.
    steps: that are timed, of each way.
    batch_size: samples of a rank; None: each model's own.
    budget_s: what one model may take; where it is spent fewer steps are timed. None: all.
    """

    device: str
    world_size: int
    models: tuple[str, ...]
    steps: int
    batch_size: int | None
    budget_s: float | None


def run(plan: ThroughputPlan) -> Iterator[ThroughputRow | str]:
    """Rows as they are done; a string says what was not measured, and why."""
    yield from world.run(plan.world_size, partial(run_rank, plan))


def run_rank(plan: ThroughputPlan, rank: int, port: int) -> Iterator[ThroughputRow | str]:
    """Takes part as one of the ranks."""
    ranks = world.join(rank, plan.world_size, plan.device, port)
    codecs = [way.codec for way in ways(dist.get_backend()) if way.codec]
    engine_of_group("").prepare(["allreduce"], [torch.float32], None, codecs)  # or the first model would pay for it
    ranks.warm_up()
    for name in plan.models:
        yield from rows_of(plan, WORKLOADS[name], ranks)
        release(plan.device)
    ranks.level()


def release(device: str) -> None:
    """Gives back what was trained."""
    if device == "cuda":
        gc.collect()  # DistributedDataParallel refers to itself
        torch.cuda.empty_cache()


def rows_of(plan: ThroughputPlan, workload: Workload, ranks: ProcessRanks) -> Iterator[ThroughputRow | str]:
    """One model's, a row for each way. Collective."""
    begin = time.perf_counter()
    model, reason = make(workload, ranks)
    if model is None:
        yield reason
        return
    batch_size = plan.batch_size or workload.batch_size
    batch = workload.batch(batch_size, ranks.device, seed=ranks.rank)
    every = ways(dist.get_backend())
    turns = [every] if workload.fits_often else [[way] for way in every]
    for at, turn in enumerate(turns, start=1):
        until = replace(plan, budget_s=plan.budget_s and plan.budget_s * at / len(turns))
        for training, blocks in side_by_side([Training(way, model, batch) for way in turn], until, ranks, begin):
            yield row_of(training, blocks, workload, batch_size, plan.world_size)
        del training  # the last copy
        release(plan.device)


def side_by_side(
    trainings: list[Training], plan: ThroughputPlan, ranks: ProcessRanks, begin: float
) -> list[tuple[Training, list[float]]]:
    """Each with its blocks' times. Collective."""
    for training in trainings:
        training.make_steps(WARM_UP_STEPS, seed=0)
    return list(zip(trainings, time_blocks(trainings, plan, ranks, begin), strict=True))


def row_of(
    training: Training, blocks: list[float], workload: Workload, batch_size: int, world_size: int
) -> ThroughputRow:
    """Collective."""
    parameters = list(training.model.parameters())
    return ThroughputRow(
        model=workload.name,
        unit=workload.unit,
        parameters=sum(parameter.numel() for parameter in parameters),
        exact_parameters=sum(p.numel() for p in parameters if graphar.ddp.has_one_dimension(p)),
        world_size=world_size,
        batch_size=batch_size,
        items=workload.items * batch_size * world_size,
        way=training.way,
        steps=WARM_UP_STEPS + BLOCK * len(blocks),
        step_ms=statistics.median(blocks) / BLOCK / 1e3,
        loss=training.mean_loss(),
        same_bits=training.way.is_alone or same_on_all_ranks(training.model),
    )


def make(workload: Workload, ranks: Ranks) -> tuple[nn.Module | None, str]:
    """The model; or None, and what it needs that cannot be imported. Collective."""

    def make() -> nn.Module:
        torch.manual_seed(0)
        with ranks.device:
            model = workload.make()
        images_on_gpu = ranks.device.type == "cuda" and workload.unit == "img"
        return model.to(memory_format=torch.channels_last) if images_on_gpu else model

    if not workload.package:
        return make(), ""
    # Packages that do not fit the installed torch may raise anything.
    model, reason = agreed(ranks, make)
    return model, f"{workload.name}: needs {workload.package} ({reason})" if reason else ""


def ways(backend: str) -> list[Way]:
    """What is compared: no communication, naive ones, the backend itself, and graphar, exact and with codecs."""
    codecs = [None, *(Codec(bits, BUCKET_SIZE, "stochastic", seed=0) for bits in BITS)]
    return [Way("alone"), *map(Way, NAIVE), Way(backend), *(Way("graphar", codec) for codec in codecs)]


class Training:
    """A copy of a model that is trained in one way, on the same batch over and over."""

    def __init__(self, way: Way, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.way, self._batch = way, batch
        self._device = batch[0].device
        self.model = copy.deepcopy(model)
        on_gpu = self._device.type == "cuda"
        self._ranks = self.model
        if not way.is_naive:
            self._ranks = DistributedDataParallel(
                self.model, device_ids=[self._device] if on_gpu else None, gradient_as_bucket_view=True
            )
        if way.backend == "graphar":
            hook = graphar.ddp.quantized_hook(way.codec) if way.codec else graphar.ddp.exact_hook()
            self._ranks.register_comm_hook(None, hook)
        self._optimizer = torch.optim.AdamW(self._ranks.parameters(), lr=LEARNING_RATE, fused=on_gpu)

    def make_steps(self, count: int, seed: int) -> None:
        """Enqueues them. ``seed`` is dropout's: the same for all ways at the same step."""
        torch.manual_seed(seed)
        x, y = self._batch
        for _ in range(count):
            self._optimizer.zero_grad()
            with self._ranks.no_sync() if self.way.is_alone else contextlib.nullcontext():
                with torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda"):
                    logits = self._ranks(x)
                loss = loss_of(logits.float(), y)
                loss.backward()
            if self.way.is_naive:
                average(self.model, flattened=self.way.backend == "flattened")
            self._optimizer.step()
        self._loss = loss.detach()

    def mean_loss(self) -> float:
        """The ranks' mean, of the last step. Collective."""
        total = self._loss.double()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


def average(model: nn.Module, *, flattened: bool) -> None:
    """The mean over the ranks of each gradient, in its place, as one writes it at first. Collective."""
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
    torch._foreach_copy_(gradients, [part.view(one.shape) for part, one in zip(parts, gradients, strict=True)])


def time_blocks(
    trainings: list[Training], plan: ThroughputPlan, ranks: ProcessRanks, begin: float
) -> list[list[float]]:
    """Microseconds of each way's blocks, each that of the slowest rank; the ways take turns. Collective.

    Args:
        begin: when the work on the model began, by this rank's clock.
    """
    mode = "cpu" if plan.device == "cpu" else "eager"
    times: list[list[float]] = [[] for _ in trainings]
    for block in range(max(1, plan.steps // BLOCK)):
        (spent,) = ranks.slowest([time.perf_counter() - begin])
        if plan.budget_s and block >= FEWEST_BLOCKS and spent > plan.budget_s:
            break
        mine = [ranks.time_us(partial(one.make_steps, BLOCK, seed=1 + block), mode) for one in trainings]
        for of_way, time_us in zip(times, ranks.slowest(mine), strict=True):
            of_way.append(time_us)
    return times

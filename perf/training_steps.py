"""The common code of `train`, `throughput`, `fsdp` and `slow_links`: training steps, their times and their reports.

A report compares the steps of several methods with steps of torch's own collectives, and with steps without any.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from perf.between_ranks import BetweenRanks
from perf.harness.ranks import ProcessRanks
from perf.md import ratio_cell
from perf.report import Timing

BLOCK = 10  # steps that are timed together, before the next training's turn
MIN_BLOCKS = 2
WARM_UP_STEPS = 3  # DistributedDataParallel rebuilds its buckets after the first step
ALONE = "alone"  # the method without communication
TORCHS = ("nccl", "gloo")  # the methods with torch's own collectives
LEARNING_RATE = 1e-4

Batch = tuple[Tensor, Tensor]  # inputs, and the classes to predict


class Trainer:
    """Trains a model with AdamW. The model reduces its gradients itself, under DistributedDataParallel or fully_shard.

    Args:
        fused: whether the optimizer has one kernel for all parameters. Otherwise torch chooses.
        autocast: whether forward passes are in bf16 on GPUs.
        around: makes the context in which steps are enqueued.

    Attributes:
        losses: of each step of the last ``make_steps``, on this rank.
    """

    def __init__(
        self,
        model: nn.Module,
        learning_rate: float = LEARNING_RATE,
        *,
        fused: bool = False,
        autocast: bool = False,
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.model = model
        self.losses: list[Tensor] = []
        self._learning_rate, self._fused, self._autocast, self._around = learning_rate, fused, autocast, around
        self.forget()

    def forget(self) -> None:
        """Begins with a new optimizer, which has no moments."""
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=self._learning_rate, fused=self._fused or None)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """Enqueues one step, and returns its loss."""
        self.optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self._autocast and x.is_cuda):
            logits = self.model(x)
        loss = loss_of(logits.float(), y)
        del logits  # their memory is free in the backward pass
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def make_steps(self, batch: Batch, count: int, seed: int) -> None:
        """Enqueues ``count`` steps with one batch. ``seed`` determines dropout."""
        torch.manual_seed(seed)
        with self._around():
            self.losses = [self.step(*batch) for _ in range(count)]

    def mean_loss(self) -> float:
        """Returns the last step's loss, averaged over the ranks. Collective."""
        total = self.losses[-1].double()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()


def data_parallel(model: nn.Module, hook: Callable | None, **options) -> DistributedDataParallel:
    """Returns the model under DistributedDataParallel, with ``hook`` in place of its all-reduces."""
    device = next(model.parameters()).device
    parallel = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None, **options)
    if hook:
        parallel.register_comm_hook(None, hook)
    return parallel


def loss_of(logits: Tensor, classes: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), classes.flatten(), reduction=reduction)


def same_on_all_ranks(model: nn.Module) -> bool:
    """Whether every rank has the first rank's parameters, which are fp32, bit for bit. Collective."""
    differ = []
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        differ.append((first.view(torch.int32) != parameter.detach().view(torch.int32)).any())
    count = torch.stack(differ).sum()
    dist.all_reduce(count)
    return count.item() == 0


def time_blocks(trainings: Sequence[Callable], plan, ranks: ProcessRanks, begin: float) -> list[list[float]]:
    """Returns the microseconds of each training's blocks on the slowest rank. Trainings take turns. Collective.

    Args:
        trainings: each enqueues steps: ``(count, seed)``. ``seed`` determines what is random in them.
        plan: the device, the number of steps, and the time limit ``budget_s``, or None.
        begin: the time.perf_counter at which this rank began to work on the model.
    """
    mode = "cpu" if plan.device == "cpu" else "eager"
    times: list[list[float]] = [[] for _ in trainings]
    for block in range(max(1, plan.steps // BLOCK)):
        (spent,) = ranks.slowest([time.perf_counter() - begin])
        if plan.budget_s and block >= MIN_BLOCKS and spent > plan.budget_s:
            break
        mine = [ranks.time_us(partial(make_steps, BLOCK, 1 + block), mode) for make_steps in trainings]
        for of_training, time_us in zip(times, ranks.slowest(mine), strict=True):
            of_training.append(time_us)
    return times


@dataclass(frozen=True)
class StepRow(Timing):
    """The base of rows. A subclass adds ``step_ms``, the median time of a step."""

    @property
    def is_baseline(self) -> bool:
        return self.method in TORCHS

    @property
    def is_alone(self) -> bool:
        return self.method == ALONE


def step_ms_of(blocks_us: Sequence[float]) -> float:
    """Returns the median time of a step, from the times of blocks."""
    return statistics.median(blocks_us) / BLOCK / 1e3


def baseline_ms(rows: Iterable[StepRow]) -> float | None:
    """Returns the time of a step. None if there is no correct one, for example in a partial run."""
    return next((row.step_ms for row in rows if row.is_baseline and not row.wrong), None)


def alone_ms(rows: Iterable[StepRow]) -> float | None:
    return next((row.step_ms for row in rows if row.is_alone), None)


def of_torch(row: StepRow, rows: Iterable[StepRow]) -> str:
    """Returns the step's time / the time with torch's own collectives among ``rows``."""
    base = baseline_ms(rows)
    return ratio_cell(base and row.step_ms / base)


class TrainingReport(BetweenRanks):
    """The base of the topics.

    Class attributes:
        steps_on_gpus, steps_on_cpu: the number of timed steps unless another is named.
    """

    takes_many: ClassVar[bool] = False
    steps_on_gpus: ClassVar[int]
    steps_on_cpu: ClassVar[int]

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        steps = f"steps of each training (default: {cls.steps_on_gpus}; {cls.steps_on_cpu} on the CPU)"
        parser.add_argument("--steps", type=int, metavar="N", help=steps)

    @classmethod
    def world(cls, options: argparse.Namespace, gpu_count: int) -> tuple[str, int, int]:
        """Returns the device, the number of ranks, and the number of steps."""
        (world_size,) = cls.world_sizes(options, gpu_count)
        device, steps = ("cuda", cls.steps_on_gpus) if gpu_count >= 2 else ("cpu", cls.steps_on_cpu)
        return device, world_size, options.steps or steps

    def is_wrong(self, row: StepRow) -> bool:
        return bool(row.wrong)

    def wrong(self) -> list[str]:
        return [self.where(row) for row in self.rows if row.is_own and self.is_wrong(row)]

    def wrong_peers(self) -> list[str]:
        return [self.where(row) for row in self.rows if not row.is_own and self.is_wrong(row)]


def check_blocks(steps: int, positive: Iterable[float | None], named: str) -> None:
    """Ends the program if there is no whole block of steps, or if one of the numbers is not positive."""
    if steps < BLOCK:
        sys.exit(f"--steps must be at least {BLOCK}, which are timed as one block")
    if any(number is not None and number <= 0 for number in positive):
        sys.exit(f"{named} must be positive")

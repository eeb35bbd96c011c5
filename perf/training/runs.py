"""One training run: a task, by ranks that average their gradients in one of several ways."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar.numerics.codecs import Codec
from perf.training.tasks import Data, Task

WARM_UP_STEPS = 5  # left out of the time of a step
CURVE_POINTS = 50  # at most, of a curve of the loss over the steps


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
    losses: list[float]


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

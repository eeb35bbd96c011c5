"""Hooks for DistributedDataParallel on GPUs: averaged beside the backward pass, on a stream of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphar
from graphar import Codec, reference
from tests.gpu import kernel_calls
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

STEPS = 4
WORLD_SIZES = [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (2, 4)]


def make_model() -> nn.Module:
    """A model of several buckets, each with matrices, biases and norms."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.LayerNorm(1024), nn.GELU()) for _ in range(8)]
    return nn.Sequential(*layers)


def backward(model: nn.Module, rank: int, step: int) -> None:
    x = torch.randn(256, 1024, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
    model(x).square().mean().backward()


def exact_means(rank, world_size) -> list[list[Tensor]]:
    """The expected gradients of every step."""
    model, steps = make_model().cuda(), []
    for step in range(STEPS):
        model.zero_grad()
        backward(model, rank, step)
        parts = [[torch.empty_like(p, device="cpu") for _ in range(world_size)] for p in model.parameters()]
        for of_one, parameter in zip(parts, model.parameters(), strict=True):
            dist.all_gather(of_one, parameter.grad.cpu())
        steps.append([reference.allreduce([one / world_size for one in of_one]) for of_one in parts])
    return steps


def steps_with(rank, hook) -> list[list[Tensor]]:
    ranks = DistributedDataParallel(
        make_model().cuda(), device_ids=[torch.cuda.current_device()], bucket_cap_mb=8, gradient_as_bucket_view=True
    )
    ranks.register_comm_hook(None, hook)
    steps = []
    for step in range(STEPS):
        ranks.zero_grad()
        backward(ranks, rank, step)
        steps.append([parameter.grad.clone() for parameter in ranks.parameters()])  # in order behind the hook's stream
    found = [[gradient.cpu() for gradient in gradients] for gradients in steps]
    assert kernel_calls() >= STEPS
    return found


def exactly(rank, world_size, options):
    expected, found = exact_means(rank, world_size), steps_with(rank, graphar.ddp.exact_hook(**options))
    return [torch.equal(*pair) for step in zip(found, expected, strict=True) for pair in zip(*step, strict=True)]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exact_gradients_are_the_specifications_bit_for_bit(world_size, overlap):
    assert all(map(all, run_on_gpus(exactly, world_size, {"overlap": overlap})))


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_gradients_that_copy_engines_bring_are_the_specifications(world_size):
    assert all(map(all, run_on_gpus(exactly, world_size, {"algorithm": "two_shot_copies"})))


def with_a_codec(rank, world_size, feedback):
    """The relative error of each gradient in each step, and sums that must be equal on all ranks."""
    codec = Codec(4, 128, "stochastic", seed=1)
    steps = steps_with(rank, graphar.ddp.quantized_hook(codec, error_feedback=feedback))
    errors = [
        ((gradient - exact).norm() / exact.norm()).item()
        for found, wanted in zip(steps, exact_means(rank, world_size), strict=True)
        for gradient, exact in zip(found, wanted, strict=True)
    ]
    return errors, [gradient.double().sum().item() for gradients in steps for gradient in gradients]


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_matrices_are_rounded_alike_on_all_ranks_and_the_rest_stays_exact(world_size, feedback):
    (errors, sums), *others = run_on_gpus(with_a_codec, world_size, feedback)

    assert all(other == sums for _, other in others)
    dimensions = [parameter.dim() for parameter in make_model().parameters()] * STEPS
    for dimension, error in zip(dimensions, errors, strict=True):
        assert error == 0 if dimension == 1 else 0 < error < 0.5

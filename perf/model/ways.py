"""The ways to sum over ranks behind a row-parallel linear layer, up to the norm that follows, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

import graphar
from perf import catalogue
from perf.cases import Plan as AllreducePlan
from perf.methods import Method
from perf.model.cases import SIZES, Plan
from perf.model.decoder import Finish
from perf.norms import EPS
from perf.ranks import Ranks

UNSHARDED, ALONE = "unsharded", "alone"
MATMUL, NORM, BOTH, CODEC = "graphar + matmul", "graphar + norm", "graphar + matmul + norm", "graphar_int8"
BASES = ("nccl", "gloo")
CUDA_METHODS = (UNSHARDED, ALONE, "nccl", "symm_two_shot", "graphar", MATMUL, NORM, BOTH, CODEC)
CPU_METHODS = (UNSHARDED, ALONE, "gloo", "graphar", MATMUL, NORM, BOTH, CODEC)

AddAndNorm = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # of the sum, the residual and a norm's weight


@dataclass(frozen=True)
class Way:
    """One way to finish a block of the decoder.

    Attributes:
        sharded: whether the model is divided between ranks; otherwise each has the whole.
        summed: whether the result is the model's: False where the sum is left out.
        same_bits: whether it promises the same bits on all ranks.
        quantised: whether it sends fewer bits than it is given.
        keeps: what a call uses that nothing else holds.
    """

    name: str
    finish: Finish
    sharded: bool = True
    summed: bool = True
    same_bits: bool = False
    quantised: bool = False
    keeps: object = None


def make_ways(plan: Plan, ranks: Ranks, add_and_norm: AddAndNorm) -> tuple[list[Way], list[str]]:
    """All that this machine has, and why others are missing. Collective: memory is allocated here, once."""
    names = CUDA_METHODS if plan.device == "cuda" else CPU_METHODS
    largest = max(case.tokens for case in plan.cases()) * SIZES[plan.size].hidden * 2
    sums = tuple(name for name in names if name not in (UNSHARDED, ALONE, MATMUL, NORM, BOTH))
    found, skipped = catalogue.make_methods(
        AllreducePlan(plan.device, plan.world_size, "process", ("bfloat16",), sums, largest), ranks
    )
    product = partial(after_linear, torch.nn.functional.linear, add_and_norm)
    own_product = partial(after_linear, graphar.fused_matmul_allreduce, add_and_norm)
    ways = [
        Way(UNSHARDED, product, sharded=False),
        Way(ALONE, product, summed=False),
        Way(MATMUL, own_product, same_bits=True),
        Way(NORM, normed_in_kernel, same_bits=True),
        Way(BOTH, partial(graphar.fused_matmul_allreduce_residual_rmsnorm, eps=EPS), same_bits=True),
        *(after_sum(method, add_and_norm) for method in found),
    ]
    return sorted(ways, key=lambda way: names.index(way.name)), skipped


def after_linear(linear: Callable[[Tensor, Tensor], Tensor], add_and_norm: AddAndNorm, a, weight, residual, scale):
    return add_and_norm(linear(a, weight), residual, scale)


def normed_in_kernel(a: Tensor, weight: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return graphar.allreduce_residual_rmsnorm(torch.nn.functional.linear(a, weight), residual, scale, EPS)


def after_sum(method: Method, add_and_norm: AddAndNorm) -> Way:
    """torch's matmul, an all-reduce of its result in the memory that this wants it in, and the norm."""

    def finish(a: Tensor, weight: Tensor, residual: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(a), len(weight))
        if method.buffer is None:
            product = torch.mm(a, weight.t())
        else:
            product = torch.mm(a, weight.t(), out=method.buffer[: shape[0] * shape[1]].view(shape))
        return add_and_norm(method.call(product.view(-1)).view(shape), residual, scale)

    return Way(method.name, finish, same_bits=method.exact, quantised=method.quantised, keeps=method)

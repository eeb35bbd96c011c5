"""A call that is refused, and arguments for such calls."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

import graphar

FP8 = torch.float8_e4m3fn
REDUCE, SCATTER, GATHER = graphar.allreduce, graphar.reducescatter, graphar.allgather
FUSED, FUSED_SCATTER = graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter
FUSED_GATHER = graphar.fused_allgather_matmul
NORM, FUSED_NORM = graphar.allreduce_residual_rmsnorm, graphar.fused_matmul_allreduce_residual_rmsnorm
SCATTERED_NORM = graphar.reducescatter_residual_rmsnorm
FUSED_SCATTERED_NORM = graphar.fused_matmul_reducescatter_residual_rmsnorm


class Refusal(NamedTuple):
    """A call that is refused.

    Attributes:
        name: of the test and in refusals.json.
        argument: what the message names.
        error: its type.
        call: makes the call, which must leave its outputs unchanged.
    """

    name: str
    argument: str
    error: type[Exception]
    call: functools.partial


def row(name: str, argument: str, error: type[Exception], op: Callable, *given, **options) -> Refusal:
    return Refusal(name, argument, error, functools.partial(op, *given, **options))


X, Y = torch.arange(8.0), torch.ones(8)
A, W, BIAS = torch.ones(6, 5), torch.ones(4, 5), torch.ones(4)
ROWS, WEIGHT, SCALE = torch.ones(4, 8), torch.ones(8), torch.ones(1)
SUMMED, SUMMED_WEIGHT = torch.ones(6, 4), torch.ones(4)

"""Sums for one loss that every rank computes. Each function's gradient is the other, as at every order it has to be."""

from __future__ import annotations

import torch

from graphar.ops.register import ops_by_name


def summed(x: torch.Tensor, communicator: str) -> torch.Tensor:
    """Returns the sum over ranks. Its gradient, equal on all ranks, is the gradient of each summand."""
    if is_recorded(x):
        return _OfReplicas.apply(x, communicator, True)
    return ops_by_name["allreduce"].dispatched(x=x, communicator=communicator)


def copied(x: torch.Tensor, communicator: str) -> torch.Tensor:
    """Returns ``x``, equal on all ranks. Its gradient is the sum of the gradients that the ranks have of it."""
    return _OfReplicas.apply(x, communicator, False) if is_recorded(x) else x


def is_recorded(x: torch.Tensor) -> bool:
    """Whether ``x`` may need a gradient: a tensor of torch.vmap does not tell, and torch refuses the function below."""
    return torch.is_grad_enabled() and (x.requires_grad or torch._C._functorch.is_batchedtensor(x))  # type: ignore


class _OfReplicas(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, communicator, sums):
        ctx.communicator, ctx.sums = communicator, sums
        return summed(x, communicator) if sums else x.view_as(x)  # nothing is recorded here

    @staticmethod
    def backward(ctx, *gradient):
        return (copied if ctx.sums else summed)(gradient[0], ctx.communicator), None, None

"""The gradients of ops that end with residual and RMSNorm."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics import norm_gradients
from graphar.ops.register import define
from graphar.runtime.bind import residual_norm


def of_rows_and_weights(
    ctx, saved: Sequence, gradients: Sequence[torch.Tensor | None], ranks: int = 0
) -> tuple[list, list]:
    """Returns the gradients of each rank's rows before the norm, and of its weight; None for a weight that needs none.

    ``saved`` are the op's tensors, the weight last, and the rows, as lists of ranks. ``gradients`` are those of normed
    rows and of the rows, rank by rank. None: zeros. With ``ranks`` the weights' gradients are the fp32 partials of
    :func:`graphar.numerics.norm_gradients.weight_partial`.
    """
    *tensors, weights, summed = saved
    wanted = ctx.needs_input_grad[len(tensors)]
    wanted = wanted if ctx.in_list else [wanted]
    numbers = ctx.given["eps"], ctx.given["weight_offset"]
    of_ranks = zip(gradients[::2], gradients[1::2], summed, weights, wanted, strict=True)
    pairs = [_of_rank(*of_rank, numbers, ranks) for of_rank in of_ranks]
    return [rows for rows, _ in pairs], [weight for _, weight in pairs]


def load(weight: torch.Tensor) -> None:
    """Loads the kernels for rows with this weight: loading beside a kernel that waits for other ranks could hang."""
    if weight.is_cuda and residual_norm.serves_backward(weight):
        residual_norm.load_backward(weight.device.index, weight.dtype, weight.numel())


def _of_rank(of_normed, of_summed, summed, weight, wanted: bool, numbers: tuple[float, float], ranks: int):
    if of_normed is None:
        of_rows = torch.zeros_like(summed) if of_summed is None else of_summed
        return of_rows, torch.zeros_like(weight) if wanted else None
    backward = torch.ops.graphar.residual_rmsnorm_backward
    of_rows, of_weight = backward(of_normed, of_summed, summed, weight, *numbers, wanted, ranks)
    return of_rows, of_weight if wanted else None


def _fake(of_normed, of_summed, summed, weight, eps, weight_offset, of_weight, ranks):
    of_weights = weight.new_empty(weight.shape if of_weight else 0, dtype=torch.float32 if ranks else None)
    return summed.new_empty(summed.shape), of_weights


def _residual_rmsnorm_backward(of_normed, of_summed, summed, weight, eps, weight_offset, of_weight, ranks):
    of_normed, summed, weight = (x.contiguous() for x in (of_normed, summed, weight))
    of_summed = None if of_summed is None else of_summed.contiguous()
    whole, columns = of_weight and not ranks, weight.numel()
    if residual_norm.serves_backward(summed):
        of_rows, of_w = residual_norm.backward(of_normed, of_summed, summed, weight, eps, weight_offset, whole)
    else:
        of_rows, of_w = norm_gradients.specification(of_normed, of_summed, summed, weight, eps, weight_offset)
    if of_weight and ranks:
        rows = of_normed.view(-1, columns), summed.view(-1, columns)
        return of_rows, norm_gradients.weight_partial(*rows, eps, ranks)
    return of_rows, of_w if of_weight else weight.new_empty(0)


def _keep(ctx, inputs, output) -> None:
    *tensors, ctx.eps, ctx.offset, ctx.of_weight, _ = inputs
    ctx.save_for_backward(*tensors)


def _second_derivatives(ctx, gradient_of_rows, gradient_of_weight):
    incoming, of_summed, *more = ctx.saved_tensors
    of_normed, summed, weight = (x.detach().requires_grad_() for x in (incoming, *more))
    of_summed = None if of_summed is None else of_summed.detach().requires_grad_()
    leaves = [of_normed, of_summed, summed, weight]
    with torch.enable_grad():
        more = torch.zeros_like(summed) if of_summed is None else of_summed
        results = norm_gradients.differentiable(of_normed, more, summed, weight, ctx.eps, ctx.offset)
    count = 2 if ctx.of_weight else 1
    needed = [leaf for leaf in leaves if leaf is not None]
    gradients = iter(torch.autograd.grad(results[:count], needed, (gradient_of_rows, gradient_of_weight)[:count]))
    return *(None if leaf is None else next(gradients) for leaf in leaves), None, None, None, None


define(
    "residual_rmsnorm_backward(Tensor of_normed, Tensor? of_summed, Tensor summed, Tensor weight, float eps, "
    "float weight_offset, bool of_weight, int ranks) -> (Tensor, Tensor)",
    _residual_rmsnorm_backward,
    _fake,
    _second_derivatives,
    _keep,
)

"""Residual and RMSNorm behind a collective that has gradients of its own."""

from __future__ import annotations

import torch

from graphar.numerics.norms import specification
from graphar.ops.register import by_result, library
from graphar.runtime import residual_norm

library.define(
    "residual_rmsnorm(Tensor total, Tensor residual, Tensor weight, float eps, float weight_offset) -> (Tensor, Tensor)"
)


def added_and_normed(total, residual, weight, numbers: tuple[float, float]):
    """Returns the results for a finished sum, or for a list of sums: (normed, summed). Differentiable."""
    if not isinstance(total, (list, tuple)):
        return torch.ops.graphar.residual_rmsnorm(total, residual, weight, *numbers)
    ranks = zip(total, residual, weight, strict=True)
    flat = [one for of_rank in ranks for one in torch.ops.graphar.residual_rmsnorm(*of_rank, *numbers)]
    return by_result(flat, len(total))


def _residual_rmsnorm(total, residual, weight, eps, weight_offset):
    total, residual, weight = (one.contiguous() for one in (total, residual, weight))
    if not residual_norm.serves(total):
        return specification(total, residual, weight, eps, weight_offset)
    normed, summed = torch.empty_like(total), torch.empty_like(total)
    residual_norm.norm(total, residual, weight, normed, summed, eps, weight_offset)
    return normed, summed


for _key in ("CPU", "CUDA"):
    library.impl("residual_rmsnorm", _residual_rmsnorm, _key)


@torch.library.register_fake("graphar::residual_rmsnorm", lib=library)
def _(total, residual, weight, eps, weight_offset):
    return total.new_empty(total.shape), total.new_empty(total.shape)


def _keep(ctx, inputs, output) -> None:
    _, _, weight, ctx.eps, ctx.weight_offset = inputs
    ctx.save_for_backward(weight, output[1])


def _backward(ctx, of_normed, of_summed):
    """Returns the gradients, in fp32 until each is rounded once. Rounding in the forward pass is the identity.

    A row r of ``summed`` is normed to u w, where u = s r, s = 1 / sqrt(mean(r^2) + eps), and w is the weight with its
    offset. If u w has the gradient g, w has the sum of g u over rows, and r has s (w g - u mean(w g u)).
    """
    weight, summed = ctx.saved_tensors
    scale = weight.float() + ctx.weight_offset
    norm = torch.linalg.vector_norm(summed, dim=-1, keepdim=True, dtype=torch.float32)
    inverse = (norm * norm / summed.shape[-1] + ctx.eps).rsqrt()
    unit, of_weight = summed * inverse, None
    products = of_normed * unit
    if ctx.needs_input_grad[2]:
        of_weight = products.sum_to_size(weight.shape).to(weight.dtype)
    common = (products * scale).mean(-1, keepdim=True)
    of_rows = torch.addcmul(of_summed, torch.addcmul(of_normed * scale, unit, common, value=-1), inverse)
    of_total = of_rows.to(summed.dtype)
    return of_total, of_total, of_weight, None, None


torch.library.register_autograd("graphar::residual_rmsnorm", _backward, setup_context=_keep, lib=library)

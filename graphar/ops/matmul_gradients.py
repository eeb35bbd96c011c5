"""The gradients of matmuls whose products are summed: with an all-reduce, or with a reduce-scatter.

torch multiplies; a call that is tensor-parallel invariant has invariant gradients, by the products of linear.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics import partitions
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import linear, norm_gradients
from graphar.ops.epilogue_gradients import of_sums_before_epilogue
from graphar.ops.register import for_ranks
from graphar.product import operands
from graphar.runtime.registry import engine_of_group

Tensors = Sequence[torch.Tensor]


def is_invariant(ctx) -> bool:
    """Whether the call of a backward pass was to be tensor-parallel invariant."""
    return ctx.given["partition"] == TP_INVARIANT


# ---- one product ----------------------------------------------------------------------------------------------------


def of_input(ctx, of_product: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the first operand ``x`` of a product ``x @ w.T``."""
    if is_invariant(ctx):
        return linear.of_input(of_product, w).view(x.shape)
    return (operands.flat(of_product) @ w).view(x.shape)


def of_weight(partition: str, of_product: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of the second operand of a product with ``x``."""
    if partition == TP_INVARIANT:
        return linear.of_weight(of_product, x)
    return operands.flat(of_product).t() @ operands.flat(x)


def of_bias(partition: str, of_product: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a bias that was added to rows of this rank only."""
    if partition == TP_INVARIANT:
        return linear.of_bias(of_product).to(of_product.dtype)
    return operands.flat(of_product).sum(0)


# ---- the products of each rank --------------------------------------------------------------------------------------


def of_products(ctx, gradients: Tensors, a: Tensors, w: Tensors) -> tuple[list, list]:
    """Returns the gradients of each rank's ``a`` and ``w`` from the gradient of its product; None if not needed."""
    needed = [needs if isinstance(needs, (list, tuple)) else [needs] for needs in ctx.needs_input_grad[:2]]
    of_a = [
        of_input(ctx, gradient, x, weight) if wanted else None
        for gradient, x, weight, wanted in zip(gradients, a, w, needed[0], strict=True)
    ]
    of_w = [
        of_weight(ctx.given["partition"], gradient, x) if wanted else None
        for gradient, x, wanted in zip(gradients, a, needed[1], strict=True)
    ]
    return of_a, of_w


def of_parts(ctx, gradients: Tensors, a: Tensors, w: Tensors, where: dict) -> tuple[list, list]:
    """Returns the gradients of each rank's ``a`` and ``w`` from that of its part of the sum; None if not needed.

    ``where`` are the arguments of the collectives that gather parts.
    """
    needs_a, needs_w = (ctx.in_list or need for need in ctx.needs_input_grad[:2])
    of_a, of_w, wholes = [None] * len(a), [None] * len(w), []
    if needs_a:
        how = {"gathered": needs_w, "partition": partitions.in_backward(ctx.given["partition"])}
        results = for_ranks(ctx, "fused_allgather_matmul", gradients, [weight.t() for weight in w], **how, **where)
        of_a, wholes = results[::2], results[1::2]
    elif needs_w:
        wholes = for_ranks(ctx, "allgather", gradients, **where)
    if needs_w:
        of_w = [of_weight(ctx.given["partition"], whole, x) for whole, x in zip(wholes, a, strict=True)]
    return of_a, of_w


def of_equal_sums(ctx, gradients: Tensors, call: dict) -> Tensors:
    """Returns the gradient of each rank's product from the gradients of sums that all ranks have.

    If ranks are processes, they compute the same loss, whose gradient each has. Otherwise the ranks' gradients add up.
    """
    if not ctx.in_list:
        return gradients
    if not is_invariant(ctx):
        return for_ranks(ctx, "allreduce", gradients, **call)
    how = {"order": "tree", "out_dtype": gradients[0].dtype}
    return for_ranks(ctx, "allreduce", [gradient.float() for gradient in gradients], **how, **call)


def of_sums(ctx, summing: str, call: dict, gradients, a: Tensors, w: Tensors, tensors) -> tuple[Tensors, dict]:
    """Returns the gradients of each rank's sum before an epilogue, and of biases and the epilogue's tensors by name.

    The op ``summing`` with the arguments ``call`` sums products.
    """
    of_added = _of_bias_of_parts if summing == "reducescatter" else _of_bias_of_all
    of_biases = [
        of_added(ctx, gradient) if wanted else None
        for gradient, wanted in zip(gradients, ctx.needs["bias"], strict=False)
    ]
    products, more = [], {}
    if ctx.given["epilogue"]:
        products, more = _products(ctx, a, w), {"order": "tree"} if is_invariant(ctx) else {}
    before, rest = of_sums_before_epilogue(ctx, summing, call | more, gradients, products, tensors)
    return before, {"bias": of_biases} | rest


def _products(ctx, a: Tensors, w: Tensors) -> list[torch.Tensor]:
    """Computes each rank's product again, with the bits that were summed."""
    pairs = zip(a, w, strict=True)
    if not is_invariant(ctx):
        return [torch.nn.functional.linear(*pair) for pair in pairs]
    return [torch.ops.graphar.linear(*pair, None, LEAVES // _ranks(ctx), torch.float32) for pair in pairs]


def _of_bias_of_all(ctx, gradient: torch.Tensor) -> torch.Tensor:
    return of_bias(ctx.given["partition"], gradient)


def _of_bias_of_parts(ctx, of_part: torch.Tensor) -> torch.Tensor:
    """Returns the gradient of a bias that was added to the rows of this rank's part.

    It covers these rows only, unless a call of processes is to be invariant: then it is the sum over all ranks' rows.
    """
    if not is_invariant(ctx) or ctx.in_list:
        return _of_bias_of_all(ctx, of_part)
    return _sums_of_rows(ctx, [linear.of_bias(of_part, _ranks(ctx))], of_part.dtype)[0]


def of_norms(ctx, saved: Sequence, gradients: Sequence[torch.Tensor | None], own_rows: bool) -> tuple[list, list]:
    """Returns the gradients of each rank's rows that were normed, and of its norm's weight; None if not needed.

    ``saved`` and ``gradients`` are as norm_gradients.of_rows_and_weights takes them. With ``own_rows`` each rank norms
    its part of the rows. The weights' gradients cover these rows only, unless a call of processes is to be invariant.
    """
    if not is_invariant(ctx):
        return norm_gradients.of_rows_and_weights(ctx, saved, gradients)
    ranks, dtype = _ranks(ctx) if own_rows and not ctx.in_list else 1, saved[-1][0].dtype
    of_rows, of_weights = norm_gradients.of_rows_and_weights(ctx, saved, gradients, ranks)
    if own_rows and not ctx.in_list and of_weights[0] is not None:
        of_weights = _sums_of_rows(ctx, of_weights, dtype)
    return of_rows, [None if gradient is None else gradient.to(dtype) for gradient in of_weights]


def _sums_of_rows(ctx, partials: Tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    """Returns the sums over the rows of all ranks. ``partials`` are sums over the rows of one rank."""
    how = {name: ctx.given[name] for name in ("communicator", "timeout_s")} | {"order": "tree", "out_dtype": dtype}
    return for_ranks(ctx, "allreduce", [partial.float() for partial in partials], **how)


def _ranks(ctx) -> int:
    return ctx.ranks if ctx.in_list else engine_of_group(ctx.given["communicator"]).world_size

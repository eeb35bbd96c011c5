"""The gradients of matmuls whose products are summed: with an all-reduce, or with a reduce-scatter.

torch multiplies; a call that is tensor-parallel invariant has invariant gradients, by the products of linear.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphar.numerics import partitions
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import linear
from graphar.ops.epilogue_gradients import of_sums_before_epilogue
from graphar.ops.register import for_ranks
from graphar.runtime.registry import engine_of_group

Tensors = Sequence[torch.Tensor]


def of_operands(ctx, gradients: Tensors, a: Tensors, w: Tensors) -> tuple[list, list]:
    """Returns the gradients of each rank's ``a`` and ``w`` from those of its sum, or part of it; None if not needed."""
    partition, (needs_a, needs_w) = ctx.given["partition"], ctx.needs_input_grad[:2]
    of_a: list[Any] = [None] * len(a)
    of_w: list[Any] = [None] * len(w)
    if "sizes" not in ctx.where:
        gradients = _of_equal_sums(ctx, gradients)
        needed = list(zip(needs_a, needs_w, strict=True)) if ctx.in_list else [(needs_a, needs_w)]
        for at, (gradient, needs) in enumerate(zip(gradients, needed, strict=True)):
            of_a[at] = linear.of_input(partition, gradient, w[at]) if needs[0] else None
            of_w[at] = linear.of_weight(partition, gradient, a[at]) if needs[1] else None
        return of_a, of_w
    wholes = []
    if ctx.in_list or needs_a:
        how = {"gathered": ctx.in_list or needs_w, "partition": partitions.in_backward(partition)}
        by_columns = [weight.t() for weight in w]
        results = for_ranks(ctx, "fused_allgather_matmul", gradients, by_columns, **how, **ctx.where)
        of_a, wholes = results[::2], results[1::2]
    elif needs_w:
        wholes = for_ranks(ctx, "allgather", gradients, **ctx.where)
    if ctx.in_list or needs_w:
        of_w = [linear.of_weight(partition, whole, x) for whole, x in zip(wholes, a, strict=True)]
    return of_a, of_w


def _of_equal_sums(ctx, gradients: Tensors) -> Tensors:
    """Returns the gradient of each rank's product from the gradients of sums that all ranks have.

    If ranks are processes, they compute the same loss, whose gradient each has. Otherwise the ranks' gradients add up.
    """
    if not ctx.in_list:
        return gradients
    if ctx.given["partition"] != TP_INVARIANT:
        return for_ranks(ctx, "allreduce", gradients, **ctx.where)
    return sums_as_tree(ctx, gradients, gradients[0].dtype)


def of_sums(ctx, gradients, a: Tensors, w: Tensors, tensors) -> tuple[Tensors, dict]:
    """Returns the gradients of each rank's sum before an epilogue, and of biases and the epilogue's tensors by name.

    The gradient of a bias that was added to the rows of this rank's part covers these rows only, unless a call of
    processes is to be invariant: then it is the sum over all ranks' rows.
    """
    partition, of_biases, summing = ctx.given["partition"], [], "reducescatter" if "sizes" in ctx.where else "allreduce"
    of_all_rows = summing == "reducescatter" and partition == TP_INVARIANT and not ctx.in_list
    for gradient, wanted in zip(gradients, ctx.needs["bias"], strict=False):
        if wanted and of_all_rows:
            of_biases += sums_as_tree(ctx, [linear.bias_partial(gradient, world_size(ctx))], gradient.dtype)
        else:
            of_biases.append(linear.of_bias(partition, gradient) if wanted else None)
    products, more = [], {}
    if ctx.given["epilogue"] and partition == TP_INVARIANT:
        leaves, more = LEAVES // world_size(ctx), {"order": "tree"}
        products = [torch.ops.graphar.linear(*pair, None, leaves, torch.float32) for pair in zip(a, w, strict=True)]
    elif ctx.given["epilogue"]:
        products = [torch.nn.functional.linear(*pair) for pair in zip(a, w, strict=True)]
    before, rest = of_sums_before_epilogue(ctx, summing, ctx.where | more, gradients, products, tensors)
    return before, {"bias": of_biases} | rest


def sums_as_tree(ctx, partials: Tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    how = {name: ctx.given[name] for name in ("communicator", "timeout_s")} | {"order": "tree", "out_dtype": dtype}
    return for_ranks(ctx, "allreduce", [partial.float() for partial in partials], **how)


def world_size(ctx) -> int:
    return ctx.ranks if ctx.in_list else engine_of_group(ctx.given["communicator"]).world_size

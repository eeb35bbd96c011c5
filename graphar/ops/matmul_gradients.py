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
from graphar.runtime.registry import engine_of_group

Tensors = Sequence[torch.Tensor]


def of_products(ctx, gradients: Tensors, a: Tensors, w: Tensors) -> tuple[list, list]:
    """Returns the gradients of each rank's ``a`` and ``w`` from the gradient of its product; None if not needed."""
    needs_a, needs_w = (needs if isinstance(needs, (list, tuple)) else [needs] for needs in ctx.needs_input_grad[:2])
    partition, of_a, of_w = ctx.given["partition"], [], []
    for at, (gradient, x, weight) in enumerate(zip(gradients, a, w, strict=True)):
        of_a.append(linear.of_input(partition, gradient, weight) if needs_a[at] else None)
        of_w.append(linear.of_weight(partition, gradient, x) if needs_w[at] else None)
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
        of_w = [linear.of_weight(ctx.given["partition"], whole, x) for whole, x in zip(wholes, a, strict=True)]
    return of_a, of_w


def of_equal_sums(ctx, gradients: Tensors, call: dict) -> Tensors:
    """Returns the gradient of each rank's product from the gradients of sums that all ranks have.

    If ranks are processes, they compute the same loss, whose gradient each has. Otherwise the ranks' gradients add up.
    """
    if not ctx.in_list:
        return gradients
    if ctx.given["partition"] != TP_INVARIANT:
        return for_ranks(ctx, "allreduce", gradients, **call)
    how = {"order": "tree", "out_dtype": gradients[0].dtype}
    return for_ranks(ctx, "allreduce", [gradient.float() for gradient in gradients], **how, **call)


def of_sums(ctx, summing: str, call: dict, gradients, a: Tensors, w: Tensors, tensors) -> tuple[Tensors, dict]:
    """Returns the gradients of each rank's sum before an epilogue, and of biases and the epilogue's tensors by name.

    The op ``summing`` with the arguments ``call`` sums products. The gradient of a bias that was added to the rows of
    this rank's part covers these rows only, unless a call of processes is to be invariant: then it is the sum over all
    ranks' rows.
    """
    partition, of_biases = ctx.given["partition"], []
    of_all_rows = summing == "reducescatter" and partition == TP_INVARIANT and not ctx.in_list
    for gradient, wanted in zip(gradients, ctx.needs["bias"], strict=False):
        if wanted and of_all_rows:
            of_biases += _sums_of_rows(ctx, [linear.bias_partial(gradient, _ranks(ctx))], gradient.dtype)
        else:
            of_biases.append(linear.of_bias(partition, gradient) if wanted else None)
    products, more = [], {}
    if ctx.given["epilogue"] and partition == TP_INVARIANT:
        leaves, more = LEAVES // _ranks(ctx), {"order": "tree"}
        products = [torch.ops.graphar.linear(*pair, None, leaves, torch.float32) for pair in zip(a, w, strict=True)]
    elif ctx.given["epilogue"]:
        products = [torch.nn.functional.linear(*pair) for pair in zip(a, w, strict=True)]
    before, rest = of_sums_before_epilogue(ctx, summing, call | more, gradients, products, tensors)
    return before, {"bias": of_biases} | rest


def of_norms(ctx, saved: Sequence, gradients: Sequence[torch.Tensor | None], own_rows: bool) -> tuple[list, list]:
    """Returns the gradients of each rank's rows that were normed, and of its norm's weight; None if not needed.

    ``saved`` and ``gradients`` are as norm_gradients.of_rows_and_weights takes them. With ``own_rows`` each rank norms
    its part of the rows. The weights' gradients cover these rows only, unless a call of processes is to be invariant.
    """
    if ctx.given["partition"] != TP_INVARIANT:
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

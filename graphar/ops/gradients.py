"""Gradients that families of ops share: of epilogues, and of matmuls whose products are summed.

An epilogue's gradients need the values before it, which no kernel stores: they are computed again. torch multiplies; a
call that is tensor-parallel invariant has invariant gradients, by the products of linear.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics import partitions
from graphar.numerics.epilogues.epilogue import bind
from graphar.numerics.leaf_tree import LEAVES
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import linear
from graphar.ops.options import Tensors
from graphar.ops.register import define, for_ranks
from graphar.ops.replicated import copied
from graphar.runtime.registry import engine_of_group


def _epilogue_backward(v, gradient, tensors, scalars, epilogue, wanted) -> list[torch.Tensor]:
    form, inputs = bind("epilogue", epilogue, v, tensors, scalars)
    leaves = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip([v, *tensors], wanted, strict=True)]
    with torch.enable_grad():
        result = form.apply_whole(leaves[0], inputs._replace(tensors=leaves[1:]))
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    if not result.requires_grad:
        return [torch.zeros_like(leaf).contiguous() for leaf in needed]
    of_leaves = torch.autograd.grad(result, needed, gradient.to(torch.float32), materialize_grads=True)
    return [x.contiguous() for x in of_leaves]


def _fake(v, gradient, tensors, scalars, epilogue, wanted) -> list[torch.Tensor]:
    leaves = [x for x, is_wanted in zip([v, *tensors], wanted, strict=True) if is_wanted]
    return [torch.empty_like(x.contiguous()) for x in leaves]


define(
    "epilogue_backward(Tensor v, Tensor gradient, Tensor[] tensors, float[] scalars, str epilogue, bool[] wanted)"
    " -> Tensor[]",
    _epilogue_backward,
    _fake,
)


def of_sums_before_epilogue(
    ctx, summing: str, call: dict, gradients: list[torch.Tensor], summands: Sequence[torch.Tensor], tensors: list
) -> tuple[list[torch.Tensor], dict[str, list]]:
    """Returns the gradients of each rank's sum before the epilogue, if any, and of the epilogue's tensors by name.

    The op ``summing`` with the arguments ``call`` computes the sums again from the ranks' ``summands``.
    """
    if not ctx.arguments.epilogue:
        return gradients, {}
    vs = for_ranks(ctx, summing, [x.float() for x in summands], after=in_backward(gradients), **call)
    return before_epilogue(ctx, vs, gradients, tensors, gradients[0].dtype)


def in_backward(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the ``after`` of a collective that a backward pass needs, but that depends on no gradient.

    torch.compile could otherwise move the collective into the forward pass. It decides so on each rank alone, by sizes.
    """
    return [gradient.detach() for gradient in gradients]


def before_epilogue(
    ctx, vs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], tensors: list, dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, list]]:
    """Returns the gradients of each rank's value before the epilogue, in ``dtype``, and of the epilogue's tensors.

    ``vs`` are these values, in fp32, and ``gradients`` belong to the values after the epilogue.
    """
    count, of_vs, of_tensors = len(tensors) // len(vs), [], []
    for rank, (v, gradient) in enumerate(zip(vs, gradients, strict=True)):
        places = slice(rank * count, (rank + 1) * count)
        wanted, call = ctx.needs["tensors"][places], (ctx.arguments.scalars, ctx.arguments.epilogue)
        results = torch.ops.graphar.epilogue_backward(v, gradient, tensors[places], *call, [True, *wanted])
        if torch.is_grad_enabled():  # the gradient itself may be differentiated
            results = _WithoutDerivative.apply(*results)
        of_v, *of_wanted = results
        of_vs.append(of_v.to(dtype))
        of_tensors += [of_wanted.pop(0) if is_wanted else None for is_wanted in wanted]
    return of_vs, {"tensors": of_tensors}


class _WithoutDerivative(torch.autograd.Function):
    """The identity, whose derivative raises an error. torch would only warn that second derivatives become zeros."""

    @staticmethod
    def forward(ctx, *gradients):
        return tuple([gradient.view_as(gradient) for gradient in gradients])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("graphar: an epilogue has no second derivative; apply it to the sum instead")


def of_operands(ctx, gradients: Tensors, a: Tensors, w: Tensors) -> tuple[list, list]:
    """Returns each rank's gradients of ``a`` and ``w`` from the gradient of its sum, or part; None if not needed."""
    partition, needs_a, needs_w = ctx.arguments.partition, ctx.needs["a"], ctx.needs["w"]
    if "sizes" not in ctx.where:
        # Processes compute the same loss, and each has its gradient. In a list the ranks' gradients add up.
        if ctx.in_list and partition == TP_INVARIANT:
            gradients = sums_as_tree(ctx, gradients, gradients[0].dtype)
        elif ctx.in_list:
            gradients = for_ranks(ctx, "allreduce", gradients, **ctx.where)
        else:
            gradients = [copied(gradients[0], ctx.arguments.communicator)]
        of_a = linear.where_needed(needs_a, linear.of_input, partition, gradients, w)
        return of_a, linear.where_needed(needs_w, linear.of_weight, partition, gradients, a)
    of_a, wholes = [None] * len(a), gradients
    if any(needs_a):
        how = {"gathered": any(needs_w), "partition": partitions.in_backward(partition)}
        by_columns = [weight.t() for weight in w]
        results = for_ranks(ctx, "fused_allgather_matmul", gradients, by_columns, **how, **ctx.where)
        of_a, wholes = results[::2], results[1::2]
    elif any(needs_w):
        wholes = for_ranks(ctx, "allgather", gradients, **ctx.where)
    return of_a, linear.where_needed(needs_w, linear.of_weight, partition, wholes, a)


def of_sums(ctx, gradients, a: Tensors, w: Tensors, tensors) -> tuple[Tensors, dict]:
    """Returns the gradients of each rank's sum before an epilogue, and of biases and the epilogue's tensors by name.

    The gradient of a bias that was added to the rows of this rank's part covers these rows only, unless a call of
    processes is to be invariant: then it is the sum over all ranks' rows.
    """
    partition, of_parts = ctx.arguments.partition, "sizes" in ctx.where
    if of_parts and partition == TP_INVARIANT and not ctx.in_list and any(ctx.needs["bias"]):
        of_biases = sums_as_tree(ctx, [linear.bias_partial(gradients[0], world_size(ctx))], gradients[0].dtype)
    else:
        of_biases = linear.where_needed(ctx.needs["bias"], linear.of_bias, partition, gradients)
    products, more = [], {}
    if ctx.arguments.epilogue and partition == TP_INVARIANT:
        leaves, more = LEAVES // world_size(ctx), {"order": "tree"}
        products = [torch.ops.graphar.linear(*pair, None, leaves, torch.float32) for pair in zip(a, w, strict=True)]
    elif ctx.arguments.epilogue:
        products = [torch.nn.functional.linear(*pair) for pair in zip(a, w, strict=True)]
    summing = "reducescatter" if of_parts else "allreduce"
    before, rest = of_sums_before_epilogue(ctx, summing, ctx.where | more, gradients, products, tensors)
    return before, {"bias": of_biases} | rest


def sums_as_tree(ctx, partials: Tensors, dtype: torch.dtype) -> list[torch.Tensor]:
    call = {"communicator": ctx.arguments.communicator, "timeout_s": ctx.arguments.timeout_s, "order": "tree"}
    return for_ranks(ctx, "allreduce", [partial.float() for partial in partials], out_dtype=dtype, **call)


def world_size(ctx) -> int:
    return ctx.ranks if ctx.in_list else engine_of_group(ctx.arguments.communicator).world_size

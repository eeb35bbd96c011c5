"""The gradients of an epilogue. They need the values before it, which no kernel stores: they are computed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics.epilogues.epilogue import bind
from graphar.ops.register import define, for_ranks


def _epilogue_backward(v, gradient, tensors, scalars, epilogue, wanted) -> list[torch.Tensor]:
    form, inputs = bind("epilogue", epilogue, v, tensors, scalars)
    leaves = [x.detach().requires_grad_(is_wanted) for x, is_wanted in zip([v, *tensors], wanted, strict=True)]
    with torch.enable_grad():
        result = form.apply_whole(leaves[0], inputs._replace(tensors=leaves[1:]))
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    of_leaves = [None] * len(needed)
    if result.requires_grad:
        of_leaves = torch.autograd.grad(result, needed, gradient.to(torch.float32), allow_unused=True)
    gradients = [torch.zeros_like(leaf) if x is None else x for leaf, x in zip(needed, of_leaves, strict=True)]
    return [x.contiguous() for x in gradients]


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
    if not ctx.given["epilogue"]:
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
        wanted, call = ctx.wanted[places], (ctx.given["scalars"], ctx.given["epilogue"])
        results = torch.ops.graphar.epilogue_backward(v, gradient, tensors[places], *call, [True, *wanted])
        if torch.is_grad_enabled():  # the gradient itself may be differentiated
            results = _WithoutDerivative.apply(*results)
        of_v, *rest = results
        of_vs.append(of_v.to(dtype))
        of_wanted = iter(rest)
        of_tensors += [next(of_wanted) if is_wanted else None for is_wanted in wanted]
    return of_vs, {"tensors": of_tensors}


class _WithoutDerivative(torch.autograd.Function):
    """The identity, whose derivative raises an error. torch would only warn that second derivatives become zeros."""

    @staticmethod
    def forward(ctx, *gradients):
        return tuple([gradient.view_as(gradient) for gradient in gradients])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("graphar: an epilogue has no second derivative; apply it to the sum instead")

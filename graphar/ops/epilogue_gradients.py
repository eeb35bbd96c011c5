"""The gradients of an epilogue. They need the values before it, which no kernel stores: they are computed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics.epilogues.epilogue import bind
from graphar.ops.register import for_ranks, library

library.define(
    "epilogue_backward(Tensor v, Tensor gradient, Tensor[] tensors, float[] scalars, str epilogue, bool[] wanted)"
    " -> Tensor[]"
)


def _epilogue_backward(v, gradient, tensors, scalars, epilogue, wanted) -> list[torch.Tensor]:
    form, inputs = bind("epilogue", epilogue, v, tensors, scalars)
    leaves = [one.detach().requires_grad_(one_wanted) for one, one_wanted in zip([v, *tensors], wanted, strict=True)]
    with torch.enable_grad():
        result = form.apply_whole(leaves[0], inputs._replace(tensors=leaves[1:]))
    needed = [leaf for leaf in leaves if leaf.requires_grad]
    found = [None] * len(needed)
    if result.requires_grad:
        found = torch.autograd.grad(result, needed, gradient.to(torch.float32), allow_unused=True)
    gradients = [torch.zeros_like(leaf) if one is None else one for leaf, one in zip(needed, found, strict=True)]
    return [one.contiguous() for one in gradients]


for _key in ("CPU", "CUDA"):
    library.impl("epilogue_backward", _epilogue_backward, _key)


@torch.library.register_fake("graphar::epilogue_backward", lib=library)
def _(v, gradient, tensors, scalars, epilogue, wanted):
    leaves = [one for one, one_wanted in zip([v, *tensors], wanted, strict=True) if one_wanted]
    return [torch.empty_like(one.contiguous()) for one in leaves]


def of_sums_before_epilogue(
    ctx, summing: str, call: dict, gradients: list[torch.Tensor], summands: Sequence[torch.Tensor], tensors: list
) -> tuple[list[torch.Tensor], dict[str, list]]:
    """Returns the gradients of each rank's sum before the epilogue, if any, and of the epilogue's tensors by name.

    The op ``summing`` with the arguments ``call`` computes the sums again from the ranks' ``summands``.
    """
    if not ctx.given["epilogue"]:
        return gradients, {}
    vs = for_ranks(ctx, summing, [one.float() for one in summands], after=in_backward(gradients), **call)
    return before_epilogue(ctx, vs, gradients, tensors, gradients[0].dtype)


def in_backward(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the ``after`` of a collective that a backward pass needs, but that depends on no gradient.

    torch.compile could otherwise move it into the forward pass. It decides by sizes, on each rank for itself.
    """
    return [one.detach() for one in gradients]


def before_epilogue(
    ctx, vs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], tensors: list, dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, list]]:
    """Returns the gradients of each rank's value before the epilogue, in ``dtype``, and of the epilogue's tensors.

    ``vs`` are these values, in fp32, and ``gradients`` belong to the values after the epilogue.
    """
    each, of_vs, of_tensors = len(tensors) // len(vs), [], []
    for rank, (v, gradient) in enumerate(zip(vs, gradients, strict=True)):
        own = slice(rank * each, (rank + 1) * each)
        of_v, of_own = _of_rank(ctx.given, v, gradient, tensors[own], ctx.wanted[own])
        of_vs.append(of_v.to(dtype))
        of_tensors += of_own
    return of_vs, {"tensors": of_tensors}


def _of_rank(
    given: dict, v: torch.Tensor, gradient: torch.Tensor, tensors: list[torch.Tensor], wanted: list[bool]
) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    backward = torch.ops.graphar.epilogue_backward
    found = backward(v, gradient, tensors, given["scalars"], given["epilogue"], [True, *wanted])
    if torch.is_grad_enabled():  # the gradient itself may be differentiated
        found = _WithoutDerivative.apply(*found)
    rest = iter(found[1:])
    return found[0], [next(rest) if one else None for one in wanted]


class _WithoutDerivative(torch.autograd.Function):
    """The identity, whose derivative raises an error. torch would only warn that second derivatives become zeros."""

    @staticmethod
    def forward(ctx, *gradients):
        return tuple([one.view_as(one) for one in gradients])

    @staticmethod
    def backward(ctx, *gradients):
        raise NotImplementedError("graphar: an epilogue has no second derivative; apply it to the sum instead")

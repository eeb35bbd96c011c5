"""How torch differentiates an op: what its forward pass keeps, and its backward pass in both forms."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Saved = tuple[list[Sequence[torch.Tensor]], list[torch.Tensor]]


class Differentiation:
    """The gradients of an op.

    Args:
        tensors: the names of the op's tensors.
        kinds: the types of the arguments after them in the schema, by name.
        backward: ``backward(ctx, gradients)`` returns the gradients of the tensors, as lists, and a dict with the
            gradients of other arguments by name. ``gradients`` are those of the results, rank by rank. ``ctx.given``
            has the arguments by name, and ``ctx.needs`` says by name what needs a gradient.
        saved: ``saved(arguments by name)`` returns the names of the tensors that the backward pass needs. None: all.
        saved_result: which result of each rank it needs, counted from 0. The gradient of an unused result is None then,
            and zeros otherwise. None: no result.
        has_several: whether a rank has several results.
    """

    def __init__(
        self,
        tensors: Sequence[str],
        kinds: Mapping[str, str],
        backward: Callable,
        saved: Callable[[dict[str, Any]], Sequence[str]] | None,
        saved_result: int | None,
        has_several: bool,
    ) -> None:
        self._tensors, self._kinds, self._backward, self._has_several = tensors, kinds, backward, has_several
        self._saved, self._saved_result = saved or (lambda _: tensors), saved_result

    def register(self, library: torch.library.Library, name: str, in_list: bool) -> None:
        """Registers the backward pass of one of the op's forms."""
        rule = functools.partial(self._rule, in_list=in_list)
        setup = functools.partial(self._keep, in_list=in_list)
        torch.library.register_autograd(
            f"graphar::{name}", _in_stream_order(rule) if in_list else rule, setup_context=setup, lib=library
        )

    def _keep(self, ctx, inputs, output, *, in_list: bool) -> None:
        count = len(self._tensors)
        lists = [list(value) if in_list else [value] for value in inputs[:count]]
        named = dict(zip(self._kinds, inputs[count:], strict=True))
        tensors = named.get("tensors", ())
        ctx.given = {name: value for name, value in named.items() if self._kinds[name] != "Tensor[]"}
        ctx.in_list, ctx.ranks = in_list, len(lists[0])
        ctx.none = [_no_gradient(value) for value in named.values()]
        ctx.wanted = [tensor.requires_grad for tensor in tensors]
        saved = [x for at in self._places_saved(ctx) for x in lists[at]]
        if self._saved_result is not None:
            saved += output[self._saved_result :: len(output) // ctx.ranks]
        ctx.save_for_backward(*saved, *tensors)
        ctx.set_materialize_grads(self._saved_result is None)

    def _rule(self, ctx, gradient, *, in_list: bool):
        ctx.needs = dict(zip((*self._tensors, *self._kinds), ctx.needs_input_grad, strict=True))
        *of_lists, of_named = self._backward(ctx, list(gradient) if in_list or self._has_several else [gradient])
        of_lists = of_lists if in_list else [gradients[0] for gradients in of_lists]
        return *of_lists, *[of_named.get(name, none) for name, none in zip(self._kinds, ctx.none, strict=True)]

    def saved(self, ctx) -> Saved:
        """Returns in a backward pass what it needs of the forward pass.

        First a list for each of the op's tensors, and one for ``saved_result`` if there is one. Each has a tensor for
        each rank of this process, or none if it is not saved. Then the tensors of the epilogue.
        """
        places, left, ranks = self._places_saved(ctx), list(ctx.saved_tensors), ctx.ranks
        lists: list[Sequence[torch.Tensor]] = [()] * len(self._tensors)
        if self._saved_result is not None:
            places, lists = [*places, len(lists)], [*lists, ()]
        for at in places:
            lists[at], left = left[:ranks], left[ranks:]
        return lists, left

    def _places_saved(self, ctx) -> list[int]:
        needed = self._saved(ctx.given)
        return [at for at, name in enumerate(self._tensors) if name in needed]


def _no_gradient(argument: object) -> list | None:
    # torch treats any empty list as a list of tensors, and expects a list of gradients for it.
    if isinstance(argument, (list, tuple)) and (not argument or isinstance(argument[0], torch.Tensor)):
        return [None] * len(argument)
    return None


def with_own_nodes(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns ``xs`` with a view in place of each leaf on a GPU that needs a gradient.

    torch warns if a leaf's gradient comes from an op on another stream, and therefore also if it is on another device.
    """
    if torch.compiler.is_compiling():
        return xs
    return [x.view_as(x) if x.requires_grad and x.is_cuda and x.is_leaf else x for x in xs]


def _in_stream_order(backward: Callable) -> Callable:
    """Returns ``backward(ctx, gradients)`` of a list form, ordered with the streams of all devices.

    torch tracks one stream of an op, the one on its first tensor's device. That stream has waited for the gradients,
    and users of the results wait for it. On the other devices the backward pass runs on the default streams, on
    whichever streams the op was called.
    """

    def backward_in_order(ctx, gradients):
        on_gpus = [x for x in gradients if type(x) is torch.Tensor and x.is_cuda]  # excludes fake tensors
        streams = [torch.cuda.current_stream(x.device) for x in on_gpus]
        for stream in streams[1:]:
            stream.wait_stream(streams[0])
        results = backward(ctx, gradients)
        for stream in streams[1:]:
            streams[0].wait_stream(stream)
        return results

    return backward_in_order

"""Gradients of ops on one tensor a device: torch knows one stream of an op, that of its first tensor's device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch


def in_stream_order(backward: Callable) -> Callable:
    """``backward(ctx, gradients)`` of an op with lists, in order on all devices.

    The stream that torch knows has waited for the gradients, and is the one that whoever takes the results waits for.
    On the other devices torch has its default streams current meanwhile, whatever streams the op was called on.
    """

    @functools.wraps(backward)
    def backward_in_order(ctx, gradients):
        on_gpus = [one for one in gradients if type(one) is torch.Tensor and one.is_cuda]  # no compiler's stand-ins
        known, *others = [torch.cuda.current_stream(one.device) for one in on_gpus] or [None]
        for other in others:
            other.wait_stream(known)
        found = backward(ctx, gradients)
        for other in others:
            known.wait_stream(other)
        return found

    return backward_in_order


def with_own_nodes(xs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """``xs``, with a view in place of each leaf on a GPU that wants a gradient.

    torch warns where a leaf's gradient comes from an op of another stream, so also where it is of another device.
    """
    if torch.compiler.is_compiling():
        return xs
    return [x.view_as(x) if x.requires_grad and x.is_cuda and x.is_leaf else x for x in xs]

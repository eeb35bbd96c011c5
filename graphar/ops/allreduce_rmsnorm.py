"""graphar.allreduce_residual_rmsnorm: all-reduce, residual and RMSNorm in one kernel."""

from __future__ import annotations

from functools import partial

import torch

from graphar.numerics.norms import ALLREDUCE_NORM as NAME
from graphar.ops import norms
from graphar.ops.norm_gradients import of_rows_and_weights
from graphar.ops.options import T
from graphar.ops.register import Op, for_ranks
from graphar.ops.repeats import repeated
from graphar.runtime.registry import Group


def allreduce_residual_rmsnorm(
    x: T,
    residual: T,
    weight: T,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    out_dtype: torch.dtype | None = None,
    scale: T | None = None,
    group_size: int | None = None,
    group: Group = None,
    timeout_s: float | None = None,
) -> tuple[T, ...]:
    """Returns the root-mean-square norm of the sum over all ranks plus a residual, and that total, from one kernel.

    residual_out = total + residual, rounded to the dtype, where total is the rounded sum;
    normed = (residual_out / sqrt(mean(residual_out**2) + eps)) * (weight + weight_offset), in fp32 and rounded once.
    The mean is over the last dimension (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).
    ``graphar.reference.allreduce_residual_rmsnorm`` is the specification: every rank, size and device gives its bits.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls, with equal shapes and dtypes, in the same order.

    Differentiable, except for FP8.

    Args:
        x: [..., columns], bf16, fp16 or fp32: this rank's tensor, or a list with one for each device of this process.
        residual: like ``x``, equal on every rank; it is not changed. For a list a list, one per device.
        weight: [columns], of the dtype of ``x``, equal on every rank. For a list a list, one per device.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        out_dtype: torch.float8_e4m3fn: the normed result is normed * (1 / scale), computed in fp32, rounded to nearest
            and saturated; times the scale it is the normed value. None: the dtype of ``x``.
        scale: one scale for the whole FP8 result: one positive fp32 element on the device of ``x``, equal on every
            rank; for a list a list, one per device. None: each row has its own scale, its largest magnitude / 448, as
            torch._scaled_mm takes them.
        group_size: 128: for FP8, each 128 columns of a row have their own scale. The columns are a multiple of 128.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``x``. For FP8 without ``scale``: (normed, residual_out, scales),
        with fp32 scales [..., 1], or [..., columns / 128] with ``group_size``. For lists, lists of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    tensors = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    kinds = type(eps), type(weight_offset), type(group_size), type(timeout_s)
    how = eps, weight_offset, out_dtype, group_size, timeout_s, kinds
    if (found := repeated(NAME, group, tensors, how)) is not None:
        return found
    return norms.call(OP, (tensors, how, None), group, eps, weight_offset, out_dtype, group_size, timeout_s)


def _backward(ctx, gradients):
    """Returns the gradients. Rounding is treated as the identity."""
    call = {name: ctx.given[name] for name in ("communicator", "timeout_s")}
    of_rows, of_weights = of_rows_and_weights(ctx, OP.saved(ctx)[0], gradients)
    return for_ranks(ctx, "allreduce", of_rows, **call), of_rows, of_weights, {}


OP = Op(
    NAME,
    ["x", "residual", "weight"],
    norms.Arguments,
    partial(norms.run, NAME),
    norms.fake,
    backward=_backward,
    saved=lambda given: ("weight",),
    saved_result=1,
    returns="Tensor[]",
)

"""Sums with residual and RMSNorm: graphar.allreduce_residual_rmsnorm and graphar.reducescatter_residual_rmsnorm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphar.numerics.norms import ALLREDUCE_NORM, FP8, REDUCESCATTER_NORM, output_of, scales_of
from graphar.ops import norm_gradients, options, parts
from graphar.ops.options import Arguments, T
from graphar.ops.register import Op, for_ranks
from graphar.ops.repeats import Asked, repeated
from graphar.plan.call import Call
from graphar.plan.work import Norm
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

_TENSORS = ("x", "residual", "weight", "scale")


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
    if (result := repeated(ALLREDUCE_NORM, group, tensors, how)) is not None:
        return result
    return _call(NORM, (tensors, how, None), group, eps, weight_offset, out_dtype, group_size, timeout_s)


def reducescatter_residual_rmsnorm(
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
    """Returns the root-mean-square norm of this rank's rows of the sum plus a residual, and that total; in one kernel.

    The rows are split as by :func:`reducescatter` along the first dimension: lengths differ by at most one, and earlier
    ranks have the longer parts. The results have the bits of these rows in :func:`allreduce_residual_rmsnorm`.
    ``graphar.reference.reducescatter_residual_rmsnorm`` is the specification.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls, with equal shapes and dtypes, in the same order.

    Differentiable, except for FP8.

    Args:
        x: [M, ..., columns], bf16, fp16 or fp32: this rank's tensor, or a list with one per device of this process.
        residual: [M_r, ..., columns], this rank's rows, of the dtype of ``x``; it is not changed. M_r is the length of
            this rank's part. For a list a list, one per device.
        weight: [columns], of the dtype of ``x``. For a list a list, one per device.
        eps: added to the mean square.
        weight_offset: added to every weight: 1.0 for models that store weights minus one, such as Gemma.
        out_dtype: torch.float8_e4m3fn, as in :func:`allreduce_residual_rmsnorm`. None: the dtype of ``x``.
        scale: one scale for the whole FP8 result: one positive fp32 element on the device of ``x``; for a list a list,
            one per device. None: each row has its own scale, its largest magnitude / 448.
        group_size: 128: for FP8, each 128 columns of a row have their own scale. The columns are a multiple of 128.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        (normed, residual_out), contiguous and like ``residual``. For FP8 without ``scale``: (normed, residual_out,
        scales), with fp32 scales [..., 1], or [..., columns / 128] with ``group_size``. For lists, lists of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    tensors = (x, residual, weight) if scale is None else (x, residual, weight, scale)
    kinds = type(eps), type(weight_offset), type(group_size), type(timeout_s)
    how = eps, weight_offset, out_dtype, group_size, timeout_s, kinds
    if (result := repeated(REDUCESCATTER_NORM, group, tensors, how)) is not None:
        return result
    return _call(SCATTERED_NORM, (tensors, how, None), group, eps, weight_offset, out_dtype, group_size, timeout_s)


def prepare_gradients(op: str, ranks: Sequence[Sequence[torch.Tensor]], output: str = "like_input") -> None:
    """Loads what the backward pass of a call needs, if it needs one; ValueError if the call's ``output`` has none."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for of_rank in ranks for tensor in of_rank):
        return
    if output != "like_input":
        raise ValueError(f"{op}: FP8 cannot be differentiated; omit out_dtype, or call under torch.no_grad()")
    if not torch.compiler.is_compiling():
        for of_rank in ranks:
            norm_gradients.load(of_rank[-1])


def _call(op: Op, asked: Asked, group: Group, eps, weight_offset, out_dtype, group_size, timeout_s) -> Any:
    """Makes a call as the user asked for it, and returns its results as users get them."""
    tensors, name = asked[0], op.name
    call_checks.check_call(name, "auto", timeout_s)
    numbers = options.check_numbers(name, eps=eps, weight_offset=weight_offset)
    options.check_input(name, tensors[0])
    ranks = options.by_rank(name, **dict(zip(_TENSORS, tensors, strict=False)))
    for x, *_ in ranks:
        options.check_rows(name, "x", x)
    where, lengths = parts.of_rows(name, "x", tensors[0], group) if op.takes("sizes") else ({}, None)
    output = ""
    for at, (x, residual, weight, *scales) in enumerate(ranks):
        shape = x.shape if lengths is None else (lengths[at], *x.shape[1:])
        options.check_beside(name, "residual", residual, shape, x)
        options.check_beside(name, "weight", weight, x.shape[-1:], x)
        for scale in scales:
            tensor_checks.check_tensor(name, "scale", scale)
            if (scale.numel(), scale.dtype, scale.device) != (1, torch.float32, x.device):
                raise ValueError(
                    f"{name}: scale must be one element, torch.float32, on {x.device}, got {list(scale.shape)} "
                    f"{scale.dtype} on {scale.device}"
                )
        output = output_of(name, x.dtype, x.shape[-1], out_dtype, scales[0] if scales else None, group_size)
    prepare_gradients(name, ranks, output)
    scales = [scale for _, _, _, *of_rank in ranks for scale in of_rank]
    how = where | numbers | {"output": output, "scales": scales, "timeout_s": timeout_s}
    return op(*tensors[:3], asked=asked, communicator=engine_name(group, name), **how)


def empty(output: str, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Returns uninitialised, contiguous tensors for a rank's results: normed rows, the new residual, perhaps scales."""
    shape, new = residual.shape, residual.new_empty
    made = [new(shape, dtype=residual.dtype if output == "like_input" else FP8), new(shape)]
    if each := scales_of(output, shape[-1]):
        made.append(new((*shape[:-1], each), dtype=torch.float32))
    return tuple(made)


class _Norms(Op):
    tensors = _TENSORS[:3]
    has_several = True
    needed = ("weight",)
    saved_result = 1

    def fake(self, xs, residuals, weights, arguments: Arguments) -> list[tuple[torch.Tensor, ...]]:
        """Returns uninitialised tensors for each rank's results."""
        return [empty(arguments.output, residual) for residual in residuals]

    def run(self, engine: Engine, xs, residuals, weights, outs, arguments: Arguments):
        """Writes each rank's results: normed rows, the new residual, and scales if the output has some."""
        lists = [xs, residuals, weights, *([arguments.scales] if arguments.scales else [])]
        ranks = options.operands([[tensor.contiguous() for tensor in tensors] for tensors in lists], outs)
        x = ranks[0].inputs[0]
        counts = parts.counts_of(x, arguments.sizes) if arguments.sizes else (x.numel(),)
        numbers = arguments.eps, arguments.weight_offset
        work = Norm(self.name, counts, x.shape[-1], arguments.output, *numbers, row=tuple(x.shape[1:]))
        return engine.run(Call.of(work, x, timeout_s=arguments.timeout_s), ranks), ranks

    def check(self, engine: Engine, xs, residuals, weights, arguments: Arguments) -> None:
        if self is SCATTERED_NORM:
            parts.check(self.name, engine, arguments, [len(x) for x in xs], whole=True)
            parts.check(self.name, engine, arguments, [len(rows) for rows in residuals])

    def backward(self, ctx, gradients, saved, _):
        """Returns the gradients. Rounding is treated as the identity."""
        of_rows, of_weights = norm_gradients.of_rows_and_weights(ctx, saved, gradients)
        op = "allgather" if self is SCATTERED_NORM else "allreduce"
        return for_ranks(ctx, op, of_rows, **ctx.where), of_rows, of_weights, {}


_OPTIONS = ("eps", "weight_offset", "output", "scales")
NORM, SCATTERED_NORM = _Norms(ALLREDUCE_NORM, *_OPTIONS), _Norms(REDUCESCATTER_NORM, *options.IN_PARTS, *_OPTIONS)

"""Reduce-scatter with a codec on the wire, as torch sees it; users call graphar.reducescatter.

An op takes the codec as text, as in quantized.py, and sizes and rank as in scatter.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.numerics.codecs import Codec
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import check_outs, is_plain, library
from graphar.ops.quantized import text_of, with_feedback
from graphar.ops.scatter import place, rows_of, run_list, run_process, split, unrows, with_length
from graphar.plan import checks
from graphar.runtime.registry import communicator_name

_CALL = "int axis, SymInt[] sizes, str codec, float? timeout_s"
CALL = f"str communicator, int rank, {_CALL}"  # of one rank's op
library.define(f"quantized_reducescatter(Tensor x, {CALL}) -> Tensor")
library.define(f"quantized_reducescatter_list(Tensor[] xs, str communicator, {_CALL}) -> Tensor[]")
library.define(f"quantized_reducescatter_feedback(Tensor x, Tensor(a!) residual, {CALL}) -> Tensor")
library.define(
    f"quantized_reducescatter_list_feedback(Tensor[] xs, Tensor(a!)[] residuals, str communicator, {_CALL}) -> Tensor[]"
)
ops = torch.ops.graphar


def reducescatter(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None,
    axis: int,
    codec: Codec | str,
    residual: torch.Tensor | Sequence[torch.Tensor] | None,
    timeout_s: float | None,
) -> torch.Tensor | list[torch.Tensor]:
    """What :func:`graphar.reducescatter` does with a codec."""
    if timeout_s is not None:
        checks.check_timeout("reducescatter", timeout_s)
    text, name = text_of("reducescatter", codec, residual), communicator_name(group)
    if isinstance(x, (list, tuple)):
        checks.check_list("reducescatter", x)
        axis = checks.check_axis("reducescatter", x[0], axis)
        call = (name, axis, split(x[0].shape[axis], len(x)), text, timeout_s)
        if residual is None:
            return ops.quantized_reducescatter_list(with_own_nodes(x), *call)
        check_outs("reducescatter", x, residual, "residual")
        return ops.quantized_reducescatter_list_feedback(x, residual, *call)
    checks.check_tensor("reducescatter", "x", x)
    axis = checks.check_axis("reducescatter", x, axis)
    rank, world_size = place(group, name)
    call = (name, rank, axis, split(x.shape[axis], world_size), text, timeout_s)
    if residual is None:
        return (_reducescatter if is_plain(x) else ops.quantized_reducescatter)(x, *call)
    checks.check_out("reducescatter", x, residual, "residual")
    return ops.quantized_reducescatter_feedback(x, residual, *call)


# ---- implementations ------------------------------------------------------------------------------------------------


def _reducescatter(x, communicator, rank, axis, sizes, codec, timeout_s) -> torch.Tensor:
    checks.check_quantized_call("reducescatter", codec, "auto", x)
    return run_process(x, communicator, rank, axis, sizes, timeout_s, codec)


def _reducescatter_list(xs, communicator, axis, sizes, codec, timeout_s) -> list[torch.Tensor]:
    checks.check_quantized_call("reducescatter", codec, "auto", xs[0])
    return run_list(xs, communicator, axis, sizes, timeout_s, codec)


def _reducescatter_feedback(x, residual, communicator, rank, axis, sizes, codec, timeout_s) -> torch.Tensor:
    codec = with_feedback(checks.check_quantized_call("reducescatter", codec, "auto", x))
    checks.check_residual("reducescatter", residual, x=x)
    rows = rows_of(residual.add_(x), axis)
    part = run_process(rows, communicator, rank, 0, sizes, timeout_s, codec)
    _keep_rows(rows, residual, axis)
    return unrows(part, axis)


def _reducescatter_list_feedback(xs, residuals, communicator, axis, sizes, codec, timeout_s) -> list[torch.Tensor]:
    codec = with_feedback(checks.check_quantized_call("reducescatter", codec, "auto", xs[0]))
    for x, residual in zip(xs, residuals, strict=True):
        checks.check_residual("reducescatter", residual, x=x)
    checks.check_distinct("reducescatter", "residual", residuals)
    rows = [rows_of(residual.add_(x), axis) for x, residual in zip(xs, residuals, strict=True)]
    parts = run_list(rows, communicator, 0, sizes, timeout_s, codec)
    for mine, residual in zip(rows, residuals, strict=True):
        _keep_rows(mine, residual, axis)
    return [unrows(part, axis) for part in parts]


# A residual becomes the input, in the place of whose rows the kernels leave what they take from it.
def _keep_rows(rows, residual, axis) -> None:
    if axis:  # else they are the residual itself
        residual.copy_(rows.movedim(0, axis))


_IMPLEMENTATIONS = {
    "quantized_reducescatter": _reducescatter,
    "quantized_reducescatter_list": _reducescatter_list,
    "quantized_reducescatter_feedback": _reducescatter_feedback,
    "quantized_reducescatter_list_feedback": _reducescatter_list_feedback,
}
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake("graphar::quantized_reducescatter", lib=library)
def _(x, communicator, rank, axis, sizes, codec, timeout_s):
    return with_length(x, axis, sizes[rank])


@torch.library.register_fake("graphar::quantized_reducescatter_list", lib=library)
def _(xs, communicator, axis, sizes, codec, timeout_s):
    return [with_length(x, axis, size) for x, size in zip(xs, sizes, strict=True)]


@torch.library.register_fake("graphar::quantized_reducescatter_feedback", lib=library)
def _(x, residual, communicator, rank, axis, sizes, codec, timeout_s):
    return with_length(x, axis, sizes[rank])


@torch.library.register_fake("graphar::quantized_reducescatter_list_feedback", lib=library)
def _(xs, residuals, communicator, axis, sizes, codec, timeout_s):
    return [with_length(x, axis, size) for x, size in zip(xs, sizes, strict=True)]


# ---- autograd: rounding counts as the identity ----------------------------------------------------------------------


def _keep_call(ctx, inputs, output) -> None:
    _, *call, _, timeout_s = inputs
    ctx.call = *call, timeout_s


def _keep_list_call(ctx, inputs, output) -> None:
    _, communicator, axis, _, _, timeout_s = inputs
    ctx.call = communicator, axis, timeout_s


def _gather_gradient(ctx, gradient):
    return ops.allgather(gradient, *ctx.call), None, None, None, None, None, None


@in_stream_order
def _gather_gradients(ctx, gradients):
    return ops.allgather_list(gradients, *ctx.call), None, None, None, None, None


torch.library.register_autograd(
    "graphar::quantized_reducescatter", _gather_gradient, setup_context=_keep_call, lib=library
)
torch.library.register_autograd(
    "graphar::quantized_reducescatter_list", _gather_gradients, setup_context=_keep_list_call, lib=library
)

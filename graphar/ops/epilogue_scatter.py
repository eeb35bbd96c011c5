"""Reduce-scatter with an epilogue, as torch sees it; users call graphar.reducescatter.

An op takes the epilogue and its arguments as in epilogue_ops.py, and sizes and rank as in scatter.py. Places and shapes
are those of a rank's part, so that nobody needs more than what belongs to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.numerics.epilogues.epilogue import Form, Operands, as_epilogue, bind
from graphar.numerics.epilogues.syntax import parse
from graphar.ops.epilogue_ops import (
    arguments_of_list,
    arguments_of_tensor,
    gradients_of,
    gradients_of_ranks,
    keep_call,
    no_gradients,
)
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import is_plain, library
from graphar.ops.scatter import check_place, check_sizes, counts_of, place, room, rows_of, split, unrows, with_length
from graphar.plan import checks
from graphar.runtime.registry import communicator_name, communicator_of_devices, communicator_of_group

_EPILOGUE = "Tensor[] tensors, float[] scalars, str epilogue, str communicator"
_PARTS = "int axis, SymInt[] sizes, float? timeout_s"
CALL = f"{_EPILOGUE}, int rank, {_PARTS}"
library.define(f"epilogue_reducescatter(Tensor x, {CALL}) -> Tensor")
library.define(f"epilogue_reducescatter_list(Tensor[] xs, {_EPILOGUE}, {_PARTS}) -> Tensor[]")
ops = torch.ops.graphar


def reducescatter(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None,
    axis: int,
    epilogue: object,
    timeout_s: float | None,
) -> torch.Tensor | list[torch.Tensor]:
    """What :func:`graphar.reducescatter` does with an epilogue."""
    if timeout_s is not None:
        checks.check_timeout("reducescatter", timeout_s)
    epilogue, name = as_epilogue(epilogue), communicator_name(group)
    if isinstance(x, (list, tuple)):
        checks.check_list("reducescatter", x)
        axis = checks.check_axis("reducescatter", x[0], axis)
        sizes = split(x[0].shape[axis], len(x))
        tensors, scalars = arguments_of_list("reducescatter", epilogue, len(x))
        call = (with_own_nodes(tensors), scalars, epilogue.text(x[0].narrow(axis, 0, sizes[0]), axis), name)
        return ops.epilogue_reducescatter_list(with_own_nodes(x), *call, axis, sizes, timeout_s)
    checks.check_tensor("reducescatter", "x", x)
    axis = checks.check_axis("reducescatter", x, axis)
    rank, world_size = place(group, name)
    sizes = split(x.shape[axis], world_size)
    tensors, scalars = arguments_of_tensor("reducescatter", epilogue)
    text = epilogue.text(x.narrow(axis, 0, sizes[rank]), axis)
    plain = is_plain(x) and not any(one.requires_grad for one in tensors)
    run = run_process if plain else ops.epilogue_reducescatter
    return run(x, tensors, scalars, text, name, rank, axis, sizes, timeout_s)


# ---- implementations ------------------------------------------------------------------------------------------------


def run_process(x, tensors, scalars, epilogue, communicator, rank, axis, sizes, timeout_s) -> torch.Tensor:
    """What the op does with one tensor, beneath autograd."""
    ranks = communicator_of_group(communicator)
    check_sizes("reducescatter", sizes, [x.shape[axis]], [sum(sizes)])
    check_place("reducescatter", ranks, rank, sizes)
    rows = rows_of(x, axis)
    out = room(rows, sizes[rank])
    form, operands = _bind(epilogue, out, axis, sizes, tensors, scalars)
    ranks.run_with_epilogue(
        "reducescatter", rows, out, counts_of(rows, sizes), form, [operands], "auto", timeout_s, axis
    )
    return unrows(out, axis)


def _reducescatter_list(xs, tensors, scalars, epilogue, communicator, axis, sizes, timeout_s) -> list[torch.Tensor]:
    check_sizes("reducescatter", sizes, [x.shape[axis] for x in xs], [sum(sizes)] * len(sizes))
    ranks = communicator_of_devices(communicator, tuple([x.device for x in xs]))
    rows = [rows_of(x, axis) for x in xs]
    outs = [room(one, size) for one, size in zip(rows, sizes, strict=True)]
    each = len(tensors) // len(xs)
    bound = [
        _bind(epilogue, out, axis, sizes, tensors[rank * each : (rank + 1) * each], scalars)
        for rank, out in enumerate(outs)
    ]
    if len({form for form, _ in bound}) > 1:
        raise ValueError("reducescatter: the tensors of an epilogue must have equal dtypes on all ranks")
    form, operands = bound[0][0], [own for _, own in bound]
    ranks.run_with_epilogue("reducescatter", rows, outs, counts_of(rows[0], sizes), form, operands, "auto", timeout_s)
    return [unrows(out, axis) for out in outs]


def _bind(epilogue: str, out: torch.Tensor, axis: int, sizes: Sequence[int], tensors, scalars) -> tuple[Form, Operands]:
    """The form, alike on all ranks, and this one's operands, for a part ``out`` that has ``axis`` first."""
    known = {"row", "col", "index"} if axis == 0 else {"col"} if axis < out.ndim - 1 else set()
    if unknown := parse(epilogue).places - known:
        raise ValueError(
            f"reducescatter: along axis {axis} an epilogue cannot use {min(unknown)}; move axis to the front"
        )
    form, operands = bind("reducescatter", epilogue, out, tensors, scalars)
    return replace(form, columns=max(1, *sizes)) if out.ndim == 1 else form, operands  # of one row any number will do


_IMPLEMENTATIONS = {
    "epilogue_reducescatter": run_process,
    "epilogue_reducescatter_list": _reducescatter_list,
}
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


@torch.library.register_fake("graphar::epilogue_reducescatter", lib=library)
def _(x, tensors, scalars, epilogue, communicator, rank, axis, sizes, timeout_s):
    return with_length(x, axis, sizes[rank])


@torch.library.register_fake("graphar::epilogue_reducescatter_list", lib=library)
def _(xs, tensors, scalars, epilogue, communicator, axis, sizes, timeout_s):
    return [with_length(x, axis, size) for x, size in zip(xs, sizes, strict=True)]


# ---- autograd: the sum is made again, as in epilogue_ops.py ---------------------------------------------------------


def _backward(ctx, gradient):
    x, *tensors = ctx.saved_tensors
    v = ops.reducescatter(x.float(), *ctx.call)
    of_v, of_tensors = gradients_of(ctx, v, gradient, tensors, ctx.wanted)
    return ops.allgather(of_v.to(x.dtype), *ctx.call), of_tensors, *no_gradients(ctx)


@in_stream_order
def _backward_list(ctx, gradients):
    xs, tensors = ctx.saved_tensors[: ctx.ranks], ctx.saved_tensors[ctx.ranks :]
    communicator, axis, _, timeout_s = ctx.call
    vs = ops.reducescatter_list([x.float() for x in xs], *ctx.call)
    of_vs, of_tensors = gradients_of_ranks(ctx, vs, gradients, tensors)
    whole = ops.allgather_list([of_v.to(xs[0].dtype) for of_v in of_vs], communicator, axis, timeout_s)
    return whole, of_tensors, *no_gradients(ctx)


for _op, _rule in (("epilogue_reducescatter", _backward), ("epilogue_reducescatter_list", _backward_list)):
    torch.library.register_autograd(f"graphar::{_op}", _rule, setup_context=keep_call, lib=library)

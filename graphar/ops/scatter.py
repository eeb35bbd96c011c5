"""reducescatter and allgather, the halves of an all-reduce, as torch sees them; and the functions users call.

An op takes the length of every rank's part along the axis, and this process's rank: what follows from the group is then
written in a compiled graph, and a graph cached by one rank does not serve another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.numerics.codecs import Codec
from graphar.numerics.epilogues.epilogue import Epilogue
from graphar.ops.list_gradients import in_stream_order, with_own_nodes
from graphar.ops.ops import is_plain, library
from graphar.plan import checks
from graphar.runtime.registry import (
    check_takes_tensors,
    communicator_name,
    communicator_of_devices,
    communicator_of_group,
)

_CALL = "str communicator, int rank, int axis, SymInt[] sizes, float? timeout_s"
library.define(f"reducescatter(Tensor x, {_CALL}) -> Tensor")
library.define(f"allgather(Tensor x, {_CALL}) -> Tensor")
library.define(
    "reducescatter_list(Tensor[] xs, str communicator, int axis, SymInt[] sizes, float? timeout_s) -> Tensor[]"
)
library.define("allgather_list(Tensor[] xs, str communicator, int axis, float? timeout_s) -> Tensor[]")


def reducescatter(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    axis: int = 0,
    codec: Codec | str | None = None,
    residual: torch.Tensor | Sequence[torch.Tensor] | None = None,
    epilogue: Epilogue | str | Callable[[torch.Tensor], torch.Tensor] | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """This rank's part of the sum over all ranks: the bits :func:`allreduce` gives, split along ``axis``.

    The parts are those of torch.tensor_split: their lengths differ by at most one, earlier ranks have the longer ones,
    and a rank may have none. Collective and in two forms as :func:`allreduce`. Differentiable: the gradient is the
    all-gather of the gradients.

    Args:
        x: this rank's tensor, or one tensor a device of this process: at least one dimension, any strides and
            alignment; bf16, fp16 and fp32 run in graphar's kernels, fp64 and integers over torch.distributed.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        axis: along which the sum is split; any but the first costs a copy of input and output.
        codec: what goes over the links in place of the elements, as for :func:`allreduce`; each rank's tensor is then
            rounded once, part by part, as ``graphar.reference.quantized_reducescatter`` does, and the sum to the dtype
            alone. The gradient is that of the exact sum. For bf16, fp16 and fp32.
        residual: with a codec, what earlier calls took from this rank's tensor by rounding, as for :func:`allreduce`.
        epilogue: elementwise work on this rank's part of the fp32 sum, before it is rounded, as for :func:`allreduce`;
            row, col and index are places in that part, and of its shape are tensors. Along another axis than the first
            an expression may depend on col alone, along the last on no place.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        A contiguous tensor, or for a list one a device.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    if codec is not None or residual is not None or epilogue is not None:
        return _reducescatter_with(x, group, axis, codec, residual, epilogue, timeout_s)
    _check_timeout("reducescatter", timeout_s)
    name = communicator_name(group)
    if isinstance(x, (list, tuple)):
        checks.check_list("reducescatter", x)
        axis = checks.check_axis("reducescatter", x[0], axis)
        sizes = split(x[0].shape[axis], len(x))
        return torch.ops.graphar.reducescatter_list(with_own_nodes(x), name, axis, sizes, timeout_s)
    checks.check_tensor("reducescatter", "x", x)
    axis = checks.check_axis("reducescatter", x, axis)
    rank, world_size = place(group, name)
    run = run_process if is_plain(x) else torch.ops.graphar.reducescatter
    return run(x, name, rank, axis, split(x.shape[axis], world_size), timeout_s)


def _reducescatter_with(x, group, axis: int, codec, residual, epilogue, timeout_s: float | None):
    from graphar.ops import epilogue_scatter, quantized_scatter

    if epilogue is None and codec is None:
        raise ValueError("reducescatter: residual holds what a codec took, and there is no codec")
    if epilogue is None:
        return quantized_scatter.reducescatter(x, group, axis, codec, residual, timeout_s)
    if codec is not None or residual is not None:
        raise ValueError("reducescatter: takes a codec or an epilogue, not both")
    return epilogue_scatter.reducescatter(x, group, axis, epilogue, timeout_s)


def allgather(
    x: torch.Tensor | Sequence[torch.Tensor],
    group: dist.ProcessGroup | Communicator | None = None,
    *,
    axis: int = 0,
    sizes: Sequence[int] | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor | list[torch.Tensor]:
    """The tensors of all ranks, one after another along ``axis``, on every rank.

    Moves bits: any dtype, every bit pattern as it was. Collective and in two forms as :func:`allreduce`, but the ranks'
    tensors may differ in their length along ``axis``, which may be 0. Differentiable: the gradient is this rank's part
    of the sum of the gradients.

    Args:
        x: this rank's tensor, or one tensor a device of this process: at least one dimension, any strides and
            alignment; shapes equal but for ``axis``, dtypes equal.
        group: a process group or Communicator; None is the default group, or a communicator of the list's devices.
        axis: along which the tensors are joined; any but the first costs a copy of input and output.
        sizes: the length of every rank's tensor along ``axis``, in rank order; None: all have this one's. Not for a
            list, whose tensors have their lengths.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the communicator's.

    Returns:
        A contiguous tensor, or for a list one a device.

    Raises:
        TypeError, ValueError: an argument breaks a rule; nothing was sent.
        CollectiveTimeout: an earlier call of this communicator waited past its deadline.
    """
    _check_timeout("allgather", timeout_s)
    name = communicator_name(group)
    if isinstance(x, (list, tuple)):
        if sizes is not None:
            raise ValueError("allgather: a list of tensors has its sizes itself; leave sizes away")
        axis = checks.check_list_to_join("allgather", x, axis)
        return torch.ops.graphar.allgather_list(with_own_nodes(x), name, axis, timeout_s)
    checks.check_strided("allgather", "x", x)
    axis = checks.check_axis("allgather", x, axis)
    rank, world_size = place(group, name)
    length = x.shape[axis]
    sizes = [length] * world_size if sizes is None else checks.check_sizes("allgather", sizes, world_size, rank, length)
    run = _allgather if is_plain(x) and not x.is_conj() else torch.ops.graphar.allgather
    return run(x, name, rank, axis, sizes, timeout_s)


def _check_timeout(op: str, timeout_s: float | None) -> None:
    if timeout_s is not None:
        checks.check_timeout(op, timeout_s)


def place(group: dist.ProcessGroup | Communicator | None, name: str) -> tuple[int, int]:
    """This process's rank, and how many there are; constants to a compiler, which makes no communicator."""
    if torch.compiler.is_compiling() and not isinstance(group, Communicator):
        return dist.get_rank(group), dist.get_world_size(group)
    communicator = group if isinstance(group, Communicator) else communicator_of_group(name)
    check_takes_tensors(communicator)
    return communicator.rank, communicator.world_size


def split(length: int, world_size: int) -> list[int]:
    """The lengths of torch.tensor_split's parts."""
    return [(length - rank + world_size - 1) // world_size for rank in range(world_size)]


# ---- implementations ------------------------------------------------------------------------------------------------


def rows_of(x: torch.Tensor, axis: int) -> torch.Tensor:
    """``x`` with ``axis`` first, where the parts of ranks lie one after another."""
    return (x if axis == 0 else x.movedim(axis, 0)).contiguous()


def unrows(rows: torch.Tensor, axis: int) -> torch.Tensor:
    if axis == 0:
        return rows
    moved = rows.movedim(0, axis)
    return moved.reshape(-1).view(moved.shape)  # contiguous, with the strides of a new tensor


def counts_of(rows: torch.Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    """The elements of every rank's part."""
    in_a_row = math.prod(rows.shape[1:])
    return tuple([size * in_a_row for size in sizes])


def room(rows: torch.Tensor, length: int) -> torch.Tensor:
    return rows.new_empty((length, *rows.shape[1:]))


def run_process(x, communicator, rank, axis, sizes, timeout_s, codec: str = "") -> torch.Tensor:
    """A process's reduce-scatter, with the text of a codec or exactly."""
    ranks = communicator_of_group(communicator)
    check_sizes("reducescatter", sizes, [x.shape[axis]], [sum(sizes)])
    check_place("reducescatter", ranks, rank, sizes)
    rows = rows_of(x, axis)
    out = room(rows, sizes[rank])
    ranks.run_parts("reducescatter", rows, out, counts_of(rows, sizes), timeout_s, axis, codec)
    return unrows(out, axis)


def _allgather(x, communicator, rank, axis, sizes, timeout_s) -> torch.Tensor:
    ranks = communicator_of_group(communicator)
    check_place("allgather", ranks, rank, sizes)
    check_sizes("allgather", sizes, [x.shape[axis]], [sizes[rank]])
    rows = rows_of(x, axis)
    out = room(rows, sum(sizes))
    ranks.run_parts("allgather", rows, out, counts_of(rows, sizes), timeout_s, axis)
    return unrows(out, axis)


def run_list(xs, communicator, axis, sizes, timeout_s, codec: str = "") -> list[torch.Tensor]:
    """As :func:`run_process`, for one tensor a device of this process."""
    check_sizes("reducescatter", sizes, [x.shape[axis] for x in xs], [sum(sizes)] * len(sizes))
    ranks = communicator_of_devices(communicator, tuple([x.device for x in xs]))
    rows = [rows_of(x, axis) for x in xs]
    outs = [room(one, size) for one, size in zip(rows, sizes, strict=True)]
    ranks.run_parts("reducescatter", rows, outs, counts_of(rows[0], sizes), timeout_s, codec=codec)
    return [unrows(out, axis) for out in outs]


def _allgather_list(xs, communicator, axis, timeout_s) -> list[torch.Tensor]:
    ranks = communicator_of_devices(communicator, tuple([x.device for x in xs]))
    rows = [rows_of(x, axis) for x in xs]
    sizes = [len(one) for one in rows]
    outs = [room(one, sum(sizes)) for one in rows]
    ranks.run_parts("allgather", rows, outs, counts_of(rows[0], sizes), timeout_s)
    return [unrows(out, axis) for out in outs]


# What the functions above ensure, of calls that come from a compiled graph or straight from torch.ops: kernels take
# every address from it.
def check_sizes(op: str, sizes: Sequence[int], lengths: list[int], expected: list[int]) -> None:
    if min(sizes) < 0 or lengths != expected:
        raise ValueError(f"{op}: sizes {list(sizes)} do not fit a length of {', '.join(map(str, lengths))}")


def check_place(op: str, ranks: Communicator, rank: int, sizes: Sequence[int]) -> None:
    if (rank, len(sizes)) != (ranks.rank, ranks.world_size):
        raise ValueError(
            f"{op}: made for rank {rank} of {len(sizes)}, called by rank {ranks.rank} of {ranks.world_size}"
        )


_IMPLEMENTATIONS = {
    "reducescatter": run_process,
    "reducescatter_list": run_list,
    "allgather": _allgather,
    "allgather_list": _allgather_list,
}
for _op, _implementation in _IMPLEMENTATIONS.items():
    for _key in ("CPU", "CUDA"):
        library.impl(_op, _implementation, _key)


def with_length(x: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:axis], length, *x.shape[axis + 1 :]))


@torch.library.register_fake("graphar::reducescatter", lib=library)
def _(x, communicator, rank, axis, sizes, timeout_s):
    return with_length(x, axis, sizes[rank])


@torch.library.register_fake("graphar::allgather", lib=library)
def _(x, communicator, rank, axis, sizes, timeout_s):
    return with_length(x, axis, sum(sizes))


@torch.library.register_fake("graphar::reducescatter_list", lib=library)
def _(xs, communicator, axis, sizes, timeout_s):
    return [with_length(x, axis, size) for x, size in zip(xs, sizes, strict=True)]


@torch.library.register_fake("graphar::allgather_list", lib=library)
def _(xs, communicator, axis, timeout_s):
    return [with_length(x, axis, sum([one.shape[axis] for one in xs])) for x in xs]


# ---- autograd: each op is the other's derivative --------------------------------------------------------------------


def _keep_call(ctx, inputs, output) -> None:
    _, *ctx.call = inputs


def _keep_list_call(ctx, inputs, output) -> None:
    xs, ctx.communicator, ctx.axis, *_, ctx.timeout_s = inputs
    ctx.sizes = [x.shape[ctx.axis] for x in xs]


def _gather_gradient(ctx, gradient):
    return torch.ops.graphar.allgather(gradient, *ctx.call), None, None, None, None, None


@in_stream_order
def _gather_gradients(ctx, gradients):
    return (
        torch.ops.graphar.allgather_list(gradients, ctx.communicator, ctx.axis, ctx.timeout_s),
        None,
        None,
        None,
        None,
    )


def _scatter_gradient(ctx, gradient):
    part = torch.ops.graphar.reducescatter(_as_real(gradient), *ctx.call)
    return _as(gradient, part), None, None, None, None, None


@in_stream_order
def _scatter_gradients(ctx, gradients):
    call = ctx.communicator, ctx.axis, ctx.sizes, ctx.timeout_s
    parts = torch.ops.graphar.reducescatter_list([_as_real(one) for one in gradients], *call)
    return [_as(gradients[0], part) for part in parts], None, None, None


def _as_real(x: torch.Tensor) -> torch.Tensor:
    """A complex tensor, which has no sum in the ops, with its two numbers along one more dimension at the end."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


def _as(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(part) if like.is_complex() else part


_BACKWARDS = {
    "reducescatter": (_gather_gradient, _keep_call),
    "reducescatter_list": (_gather_gradients, _keep_list_call),
    "allgather": (_scatter_gradient, _keep_call),
    "allgather_list": (_scatter_gradients, _keep_list_call),
}
for _op, (_backward, _keep) in _BACKWARDS.items():
    torch.library.register_autograd(f"graphar::{_op}", _backward, setup_context=_keep, lib=library)

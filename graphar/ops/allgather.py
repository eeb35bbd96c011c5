"""graphar.allgather: the tensors of all ranks, on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch

from graphar.ops import options, parts
from graphar.ops.allgather_tuple import TUPLE, allgather_tuple, check_tuple
from graphar.ops.options import T
from graphar.ops.register import Op, for_ranks, is_plain
from graphar.ops.repeats import repeated, typed
from graphar.plan.algorithms import AllGatherAlgorithm
from graphar.plan.call import Call
from graphar.plan.work import Parts
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

NAME = "allgather"


@overload
def allgather(
    x: T,
    group: Group = None,
    *,
    axis: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: AllGatherAlgorithm = "auto",
    timeout_s: float | None = None,
) -> T: ...
@overload
def allgather(
    x: tuple[T, ...],
    group: Group = None,
    *,
    axis: Literal[0] = 0,
    sizes: Sequence[int] | None = None,
    algorithm: Literal["auto"] = "auto",
    timeout_s: float | None = None,
) -> tuple[T, ...]: ...
def allgather(x, group=None, *, axis=0, sizes=None, algorithm="auto", timeout_s=None):
    """Returns the tensors of all ranks, joined along ``axis`` in rank order, on every rank.

    It moves bits: any dtype, every bit pattern unchanged. ``graphar.reference.allgather`` is the specification.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls in the same order. The ranks' tensors may differ in their length along ``axis``, which may be
    0.

    A tuple has several tensors of each rank, such as FP8 rows and their scales: ``allgather((rows, scales))`` returns
    ``(all_rows, all_scales)``. Kernels gather up to four tensors in one launch, and never compress them.

    Differentiable: the gradient of ``x`` is this rank's part of the sum of the ranks' gradients. A call with a tuple
    that needs gradients takes a kernel for each tensor.

    Args:
        x: this rank's tensor, or a list with one tensor for each device of this process, of at least one dimension, any
            strides and alignment. Dtypes are equal, and shapes are equal but for ``axis``. Or a tuple of such tensors,
            or of such lists: a rank's tensors have equal lengths in the first dimension and one device, and any dtypes.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        axis: the dimension along which the tensors are joined. Any but the first costs a copy of input and output.
            For a tuple, 0.
        sizes: the length of every rank's tensor along ``axis``, in rank order. None: all have this rank's length. Not
            for a list.
        algorithm: "auto", an all-gather of :class:`graphar.Algorithm`, or one from :func:`graphar.load_algorithm`. For
            a tuple, "auto".
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor, for a list one a device. For a tuple, a tuple of these.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    tensors = x if isinstance(x, tuple) else (x,)
    of_ranks = None if sizes is None else typed(sizes)
    how = axis, type(axis), of_ranks, algorithm, timeout_s, type(timeout_s)
    if tensors and (result := repeated(NAME if tensors is not x else TUPLE, group, tensors, how)) is not None:
        return result
    asked = tensors, how, None
    call_checks.check_call(NAME, algorithm, timeout_s, NAME)
    if isinstance(x, tuple):
        if algorithm != "auto":
            raise ValueError(f"{NAME}: algorithm must be 'auto' for a tuple, got {str(algorithm)!r}")
        check_tuple(x, axis, sizes)
        tensors = [tensor for of_rank in x for tensor in of_rank] if isinstance(x[0], (list, tuple)) else x
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return tuple([allgather(tensor, group, sizes=sizes, timeout_s=timeout_s) for tensor in x])
        return allgather_tuple(x, group, sizes, timeout_s, asked)
    name = engine_name(group, NAME)
    if isinstance(x, list):
        if sizes is not None:
            raise ValueError("allgather: sizes is for calls with one tensor; omit it for a list")
        axis = tensor_checks.check_list_to_join(NAME, x, axis)
        sizes = [tensor.shape[axis] for tensor in x]
        return OP(x, given=parts.AlongAxis(name, timeout_s, (), -1, sizes, axis, str(algorithm)))
    tensor_checks.check_strided(NAME, "x", x)
    axis = call_checks.check_axis(NAME, x, axis)
    rank, world_size = parts.place(group)
    length = x.shape[axis]
    sizes = [length] * world_size if sizes is None else call_checks.check_sizes(NAME, sizes, world_size, rank, length)
    arguments = parts.AlongAxis(name, timeout_s, (), rank, sizes, axis, str(algorithm))
    return OP(x, given=arguments, plain=is_plain(x) and not x.is_conj(), asked=asked)


def _fake(xs, arguments: parts.AlongAxis) -> list[torch.Tensor]:
    return [parts.with_length(x, arguments.axis, sum(arguments.sizes)) for x in xs]


def _run(engine: Engine, xs, outs, arguments: parts.AlongAxis):
    """Writes the tensors of all ranks into every tensor of ``outs``, which are contiguous."""
    axis = arguments.axis
    rows, rooms = [parts.rows_of(x, axis) for x in xs], [parts.room_for(out, axis) for out in outs]
    work = Parts(NAME, parts.counts_of(rows[0], arguments.sizes), axis=axis, row=tuple(rows[0].shape[1:]))
    ranks = options.operands_of_sum(rows, rooms, None)
    plan = engine.run(Call.of(work, rows[0], algorithm=arguments.algorithm, timeout_s=arguments.timeout_s), ranks)
    for room, out in zip(rooms, outs, strict=True):
        parts.put_back(room, out, axis)
    return None if axis else (plan, ranks)


def _check(engine: Engine, xs, arguments: parts.AlongAxis) -> None:
    parts.check_place(NAME, engine, arguments)
    parts.check_lengths(NAME, arguments.sizes, [x.shape[arguments.axis] for x in xs], parts.own_sizes(arguments))


def _backward(ctx, gradients):
    where = {name: ctx.given[name] for name in ("communicator", "rank", "axis", "sizes", "timeout_s")}
    if not gradients[0].is_complex():
        return for_ranks(ctx, "reducescatter", gradients, **where), {}
    reals = [torch.view_as_real(x.resolve_conj()) for x in gradients]  # the ops do not add complex numbers
    return [torch.view_as_complex(x) for x in for_ranks(ctx, "reducescatter", reals, **where)], {}


OP = Op(NAME, ["x"], parts.AlongAxis, _run, _fake, check=_check, backward=_backward, saved=lambda arguments: ())

"""graphar.allgather: the tensors of all ranks, on every rank. A tuple of several tensors is an op of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from graphar.numerics.dtypes import BYTE
from graphar.ops import options, parts
from graphar.ops.options import Arguments
from graphar.ops.register import Op, for_ranks
from graphar.ops.repeats import repeated, typed
from graphar.plan.algorithms import AllGatherAlgorithm
from graphar.plan.call import Call
from graphar.plan.work import Parts, TensorTuple
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

NAME, TUPLE = "allgather", "allgather_tuple"
S = TypeVar("S", torch.Tensor, list[torch.Tensor], tuple[torch.Tensor, ...], tuple[list[torch.Tensor], ...])


def allgather(
    x: S,
    group: Group = None,
    *,
    axis: int = 0,
    sizes: Sequence[int] | None = None,
    algorithm: AllGatherAlgorithm = "auto",
    timeout_s: float | None = None,
) -> S:
    """Returns the tensors of all ranks, joined along ``axis`` in rank order, on every rank.

    It moves bits: any dtype, every bit pattern unchanged. ``graphar.reference.allgather`` is the specification.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls in the same order. The ranks' lengths along ``axis`` may differ, and may be 0.

    A tuple has several tensors of each rank, such as FP8 rows and their scales: ``allgather((rows, scales))`` returns
    ``(all_rows, all_scales)``. Kernels gather up to four tensors in one launch, and never compress them.

    Differentiable: the gradient of ``x`` is this rank's part of the sum of the ranks' gradients. A call with a tuple
    that needs gradients takes a kernel for each tensor.

    Args:
        x: this rank's tensor, or a list with one tensor for each device of this process, of at least one dimension, any
            strides and alignment. Dtypes are equal, and shapes are equal but for ``axis``. Or a tuple of such tensors,
            or of such lists: a rank's tensors have equal lengths in the first dimension and one device, and any dtypes.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        axis: the dimension along which tensors are joined; for a tuple 0. Any but 0 costs a copy of input and output.
        sizes: each rank's length along ``axis``, in rank order. None: all have this rank's length. Not for a list.
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
    tensors: tuple[Any, ...] = x if isinstance(x, tuple) else (x,)
    of_ranks = None if sizes is None else typed(sizes)
    how = axis, type(axis), of_ranks, algorithm, timeout_s, type(timeout_s)
    if tensors and (result := repeated(NAME if tensors is not x else TUPLE, group, tensors, how)) is not None:
        return result
    call_checks.check_call(NAME, algorithm, timeout_s, NAME)
    if tensors is x:
        if algorithm != "auto":
            raise ValueError(f"{NAME}: algorithm must be 'auto' for a tuple, got {str(algorithm)!r}")
        _check_tuple(tensors, axis, sizes)
        flat = [x for of_rank in tensors for x in of_rank] if isinstance(tensors[0], (list, tuple)) else tensors
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in flat):
            results: Any = tuple([allgather(tensor, group, sizes=sizes, timeout_s=timeout_s) for tensor in tensors])
            return results
    name, first, more = engine_name(group, NAME), tensors[0], tensors[1:]
    if isinstance(first, (list, tuple)):
        axis = tensor_checks.check_list_to_join(NAME, first, axis)
        more = [tensor for of_rank in zip(*more, strict=True) for tensor in of_rank]
    else:
        tensor_checks.check_strided(NAME, "x", first)
        axis = call_checks.check_axis(NAME, first, axis)
    where = {"communicator": name, "timeout_s": timeout_s} | parts.to_join(NAME, "x", first, axis, sizes, group)
    if tensors is x:
        return TUPLE_OP(first, asked=(tensors, how, None), more=more, **where)
    return OP(x, asked=(tensors, how, None), axis=axis, algorithm=str(algorithm), **where)


def _check_tuple(xs: tuple, axis: object, sizes: object) -> None:
    """Raises unless all-gathers take ``xs``: tensors, or lists of tensors, of equal length on equal devices."""
    if type(axis) is not int or axis:
        raise ValueError(f"{NAME}: the tensors of a tuple are joined along their first dimension, got axis {axis!r}")
    if not xs:
        raise ValueError(f"{NAME}: needs at least one tensor, got an empty tuple")
    in_lists = isinstance(xs[0], (list, tuple))
    if in_lists:
        if sizes is not None:
            raise ValueError(f"{NAME}: sizes is for calls with tensors; omit it for lists")
        for of_ranks in xs:
            tensor_checks.check_one_each(NAME, "each list of a tuple", of_ranks, xs[0], "the first list")
            tensor_checks.check_list_to_join(NAME, of_ranks, 0)
    for first, *others in zip(*xs, strict=True) if in_lists else [xs]:
        for at, x in enumerate((first, *others)):
            tensor_checks.check_strided(NAME, f"tensor {at}", x)
            call_checks.check_axis(NAME, x, 0)
            if (x.shape[0], x.device) != (first.shape[0], first.device):
                raise ValueError(
                    f"{NAME}: the tensors of a tuple must have one length and one device, got {list(first.shape)} on "
                    f"{first.device} and, at {at}, {list(x.shape)} on {x.device}"
                )


class _Gather(Op):
    needed = ()

    def fake(self, xs, arguments: Arguments) -> list[torch.Tensor]:
        return [parts.with_length(x, arguments.axis, sum(arguments.sizes)) for x in xs]

    def run(self, engine: Engine, xs, outs, arguments: Arguments):
        axis = arguments.axis
        rows, rooms = [parts.rows_of(x, axis) for x in xs], [parts.room_for(out, axis) for out in outs]
        work = Parts(NAME, parts.counts_of(rows[0], arguments.sizes), axis=axis, row=tuple(rows[0].shape[1:]))
        ranks = options.operands([rows], [(room,) for room in rooms])
        plan = engine.run(Call.of(work, rows[0], algorithm=arguments.algorithm, timeout_s=arguments.timeout_s), ranks)
        if not axis:
            return plan, ranks
        for room, out in zip(rooms, outs, strict=True):
            out.copy_(room.movedim(0, axis))
        return None

    def check(self, engine: Engine, xs, arguments: Arguments) -> None:
        parts.check(NAME, engine, arguments, [x.shape[arguments.axis] for x in xs])

    def backward(self, ctx, gradients, *_):
        if not gradients[0].is_complex():
            return for_ranks(ctx, "reducescatter", gradients, **ctx.where), {}
        reals = [torch.view_as_real(x.resolve_conj()) for x in gradients]  # the ops do not add complex numbers
        return [torch.view_as_complex(x) for x in for_ranks(ctx, "reducescatter", reals, **ctx.where)], {}


OP = _Gather(NAME, *options.IN_PARTS, "axis", "algorithm")


def work_of(xs: Sequence[torch.Tensor], sizes: Sequence[int]) -> TensorTuple:
    """Returns the work of a call with one rank's tensors; ``sizes`` are the rows of each rank."""
    return TensorTuple(tuple([x.dtype for x in xs]), tuple([tuple(x.shape[1:]) for x in xs]), tuple(sizes))


class _GatherOfTuple(Op):
    has_several = True

    def run(self, engine: Engine, xs, outs, arguments: Arguments):
        ranks = options.operands([[x.contiguous() for x in of_ranks] for of_ranks in _lists(xs, arguments)], outs)
        first = ranks[0].inputs
        call = Call(work_of(first, arguments.sizes), BYTE, first[0].get_device(), timeout_s=arguments.timeout_s)
        return engine.run(call, ranks), ranks

    def fake(self, xs, arguments: Arguments) -> list[tuple[torch.Tensor, ...]]:
        length = sum(arguments.sizes)
        lists = [[x.new_empty((length, *x.shape[1:])) for x in of_ranks] for of_ranks in _lists(xs, arguments)]
        return list(zip(*lists, strict=True))

    def check(self, engine: Engine, xs, arguments: Arguments) -> None:
        for of_ranks in _lists(xs, arguments):
            parts.check(NAME, engine, arguments, [len(x) for x in of_ranks])


def _lists(xs, arguments: Arguments) -> list[Sequence[torch.Tensor]]:
    """Returns a list for each tensor of the tuple: the tensors of this process's ranks."""
    each = len(arguments.more) // len(xs)
    return [xs, *[arguments.more[at::each] for at in range(each)]]


TUPLE_OP = _GatherOfTuple(TUPLE, *options.IN_PARTS, "more")

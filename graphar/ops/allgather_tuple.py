"""The all-gather of several tensors: what graphar.allgather does with a tuple."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphar.numerics.dtypes import BYTE
from graphar.ops import options, parts
from graphar.ops.register import Op, by_result, is_plain
from graphar.ops.repeats import Asked
from graphar.plan.call import Call, Operands
from graphar.plan.work import TensorTuple
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

NAME, TUPLE = "allgather", "allgather_tuple"


@dataclass(eq=False)
class Arguments(options.InParts):
    more: options.Tensors = ()  # rank by rank, those after the first


def allgather_tuple(
    xs: tuple, group: Group, sizes: Sequence[int] | None, timeout_s: float | None, asked: Asked
) -> tuple:
    """Returns the tensors of all ranks, for each tensor or list of ``xs``, which :func:`check_tuple` has checked.

    It takes the other arguments of :func:`graphar.allgather`, and of :class:`Op`. Not differentiable.
    """
    name = engine_name(group, NAME)
    if isinstance(xs[0], (list, tuple)):
        more = [x for of_rank in zip(*xs[1:], strict=True) for x in of_rank]
        lengths = [x.shape[0] for x in xs[0]]
        return by_result(OP(list(xs[0]), given=Arguments(name, timeout_s, (), -1, lengths, more)), len(xs[0]))
    rank, world_size = parts.place(group)
    length, (first, *more) = xs[0].shape[0], xs
    sizes = [length] * world_size if sizes is None else call_checks.check_sizes(NAME, sizes, world_size, rank, length)
    plain = all(is_plain(x) and not x.is_conj() for x in xs)
    return tuple(OP(first, given=Arguments(name, timeout_s, (), rank, sizes, more), plain=plain, asked=asked))


def check_tuple(xs: tuple, axis: object, sizes: object) -> None:
    """Raises unless all-gathers take ``xs``: tensors, or lists of tensors, of equal length on equal devices."""
    if type(axis) is not int or axis:
        raise ValueError(f"{NAME}: the tensors of a tuple are joined along their first dimension, got axis {axis!r}")
    if not xs:
        raise ValueError(f"{NAME}: needs at least one tensor, got an empty tuple")
    if isinstance(xs[0], (list, tuple)):
        if sizes is not None:
            raise ValueError(f"{NAME}: sizes is for calls with tensors; omit it for lists")
        for ones in xs:
            tensor_checks.check_one_each(NAME, "each list of a tuple", ones, xs[0], "the first list")
            tensor_checks.check_list_to_join(NAME, ones, 0)
    ranks = list(zip(*xs, strict=True)) if isinstance(xs[0], (list, tuple)) else [xs]
    for first, *rest in ranks:
        tensor_checks.check_strided(NAME, "tensor 0", first)
        call_checks.check_axis(NAME, first, 0)
        for at, x in enumerate(rest, 1):
            tensor_checks.check_strided(NAME, f"tensor {at}", x)
            call_checks.check_axis(NAME, x, 0)
            if (x.shape[0], x.device) != (first.shape[0], first.device):
                raise ValueError(
                    f"{NAME}: the tensors of a tuple must have one length and one device, got {list(first.shape)} on "
                    f"{first.device} and, at {at}, {list(x.shape)} on {x.device}"
                )


def work_of(xs: Sequence[torch.Tensor], sizes: Sequence[int]) -> TensorTuple:
    """Returns the work of a call with one rank's tensors; ``sizes`` are the rows of each rank."""
    return TensorTuple(tuple([x.dtype for x in xs]), tuple([tuple(x.shape[1:]) for x in xs]), tuple(sizes))


def _empty(xs: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    length = sum(sizes)
    return tuple([x.new_empty((length, *x.shape[1:])) for x in xs])


def _of_ranks(xs, arguments: Arguments) -> list[list[torch.Tensor]]:
    """Returns the tensors of each rank of this process."""
    each = len(arguments.more) // len(xs)
    return [[x, *arguments.more[rank * each : (rank + 1) * each]] for rank, x in enumerate(xs)]


def _run(engine: Engine, xs, outs, arguments: Arguments):
    """Writes the tensors of all ranks into the results of each rank of this process."""
    ranks = [
        Operands(tuple([x.contiguous() for x in of_rank]), results)
        for of_rank, results in zip(_of_ranks(xs, arguments), outs, strict=True)
    ]
    first = ranks[0].inputs
    call = Call(work_of(first, arguments.sizes), BYTE, first[0].get_device(), timeout_s=arguments.timeout_s)
    return engine.run(call, ranks), ranks


def _fake(xs, arguments: Arguments) -> list[tuple[torch.Tensor, ...]]:
    return [_empty(of_rank, arguments.sizes) for of_rank in _of_ranks(xs, arguments)]


def _check(engine: Engine, xs, arguments: Arguments) -> None:
    parts.check_place(NAME, engine, arguments)
    lengths = [len(x) for of_rank in _of_ranks(xs, arguments) for x in of_rank]
    each = len(lengths) // len(xs)
    expected = [size for size in parts.own_sizes(arguments) for _ in range(each)]
    parts.check_lengths(NAME, arguments.sizes, lengths, expected)


OP = Op(TUPLE, ["x"], Arguments, _run, _fake, check=_check, returns="Tensor[]")

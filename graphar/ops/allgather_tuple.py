"""The all-gather of several tensors: what graphar.allgather does with a tuple."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.numerics.dtypes import BYTE
from graphar.ops import options, parts
from graphar.ops.norms import by_result
from graphar.ops.register import Op
from graphar.plan import call_checks, tensor_checks
from graphar.plan.call import NO_OPTIONS, Call
from graphar.plan.tensor_tuple import MAX_TENSORS, TensorTuple, tensor_tuple
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.registry import Group, check_takes_tensors, engine_name, engine_of

NAME = "allgather"


def allgather_tuple(xs: tuple, group: Group, sizes: Sequence[int] | None, timeout_s: float | None) -> tuple:
    """Returns the tensors of all ranks, for each tensor or list of ``xs``, which :func:`check_tuple` has checked.

    It takes the other arguments of :func:`graphar.allgather`. Not differentiable.
    """
    name = engine_name(group, NAME)
    if isinstance(xs[0], (list, tuple)):
        more = [x for of_rank in zip(*xs[1:], strict=True) for x in of_rank]
        lengths = [x.shape[0] for x in xs[0]]
        return by_result(OP(list(xs[0]), more, name, -1, lengths, timeout_s, []), len(xs[0]))
    rank, world_size = parts.place(group)
    length, (first, *more) = xs[0].shape[0], xs
    sizes = [length] * world_size if sizes is None else call_checks.check_sizes(NAME, sizes, world_size, rank, length)
    return tuple(OP(first, more, name, rank, sizes, timeout_s, []))


def warm_tuple(xs: tuple, group: Group, sizes: Sequence[int] | None, timeout_s: float | None) -> tuple | None:
    """Makes a plain call (:func:`is_plain`), and returns its results.

    It returns None, and does nothing, if the call breaks a rule of :func:`check_tuple`, or if its plan is not cached.
    """
    if not xs or not all(parts.is_plain_rows(x, 0) and not x.is_conj() for x in xs):
        return None
    length, device = xs[0].shape[0], xs[0].get_device()
    if any(x.shape[0] != length or x.get_device() != device for x in xs):
        return None
    engine = engine_of(group, NAME)
    check_takes_tensors(engine)
    if sizes is None:
        sizes = [length] * engine.world_size
    else:
        call_checks.check_sizes(NAME, sizes, engine.world_size, engine.rank, length)
    form = form_of(xs, sizes)
    # The fields of Call, as a bare tuple.
    key = (NAME, form.part_nbytes, BYTE, device, "auto", timeout_s, "", form, *NO_OPTIONS[2:])
    plan = engine.warm.get(key)
    if plan is None:
        return None
    xs = tuple([x.contiguous() for x in xs])
    outs = _empty(xs, sizes)
    plan(xs[0], outs[0], (xs, outs))
    return outs


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


def form_of(xs: Sequence[torch.Tensor], sizes: Sequence[int]) -> TensorTuple:
    """Returns the form of a call with one rank's tensors; ``sizes`` are the rows of each rank."""
    return tensor_tuple(tuple([(x.dtype, tuple(x.shape[1:])) for x in xs]), tuple(sizes))


def _empty(xs: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    length = sum(sizes)
    return tuple([x.new_empty((length, *x.shape[1:])) for x in xs])


def _of_ranks(xs, given) -> list[list[torch.Tensor]]:
    """Returns the tensors of each rank of this process."""
    each = len(given.more) // len(xs)
    return [[x, *given.more[rank * each : (rank + 1) * each]] for rank, x in enumerate(xs)]


def _run(engine: Engine, xs, given) -> list[tuple[torch.Tensor, ...]]:
    ranks, results = _of_ranks(xs, given), _fake(xs, given)
    for begin in range(0, len(ranks[0]), MAX_TENSORS):
        window = slice(begin, begin + MAX_TENSORS)
        pairs = [
            ([x.contiguous() for x in of_rank[window]], outs[window])
            for of_rank, outs in zip(ranks, results, strict=True)
        ]
        (_gather_each if engine.why_no_kernel(NAME, xs[0]) else _gather)(engine, pairs, given)
    return results


def _gather(engine: Engine, pairs, given) -> None:
    """Gathers in one launch; ``pairs`` has the inputs and outputs of each rank of this process."""
    first = pairs[0][0]
    form = form_of(first, given.sizes)
    device, timeout_s = first[0].get_device(), given.timeout_s
    call = Call(NAME, form.part_nbytes, BYTE, device, timeout_s=timeout_s, epilogue=form)
    ins, outs = [xs[0] for xs, _ in pairs], [ys[0] for _, ys in pairs]
    engine.run(call, *[as_taken(engine, ones) for ones in (ins, outs, pairs)])


def _gather_each(engine: Engine, pairs, given) -> None:
    """Gathers one tensor after another. A call says which ones follow, so that unlike tuples are found at the first."""
    first = pairs[0][0]
    for at, x in enumerate(first):
        rest = first[at + 1 :]
        follow = f"allgather of {form_of(rest, given.sizes).text}" if rest else ""
        counts = parts.counts_of(x, given.sizes)
        call = Call.of(NAME, x, counts, timeout_s=given.timeout_s, followed_by=follow)
        engine.run(call, *[as_taken(engine, [pair[side][at] for pair in pairs]) for side in (0, 1)])


def _fake(xs, given) -> list[tuple[torch.Tensor, ...]]:
    return [_empty(of_rank, given.sizes) for of_rank in _of_ranks(xs, given)]


def _check(engine: Engine, xs, given) -> None:
    parts.check_place(NAME, engine, given)
    lengths = [len(x) for of_rank in _of_ranks(xs, given) for x in of_rank]
    each = len(lengths) // len(xs)
    parts.check_lengths(NAME, given.sizes, lengths, [own for own in parts.own_sizes(given) for _ in range(each)])


OP = Op(
    "allgather_tuple",
    ["x"],
    f"Tensor[] more, str communicator, int rank, SymInt[] sizes, float? timeout_s, {options.AFTER}",
    _run,
    _fake,
    check=_check,
    returns="Tensor[]",
)

"""graphar.alltoall: a part of every rank's tensor, on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphar.ops import options, parts
from graphar.ops.options import Arguments, T
from graphar.ops.register import Op, for_ranks
from graphar.ops.repeats import repeated
from graphar.plan.algorithms import AllToAllAlgorithm
from graphar.plan.call import Call
from graphar.plan.work import Exchange
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group, engine_name

NAME = "alltoall"


def alltoall(
    x: T,
    group: Group = None,
    *,
    out: T | None = None,
    sizes: Sequence[Sequence[int]] | None = None,
    scatter_dim: int = 0,
    gather_dim: int = 0,
    algorithm: AllToAllAlgorithm = "auto",
    timeout_s: float | None = None,
) -> T:
    """Returns this rank's part of every rank's tensor, joined along ``gather_dim`` in rank order.

    Every rank divides its tensor along ``scatter_dim`` into a part for each rank. It moves bits: any dtype, every bit
    pattern unchanged. ``graphar.reference.alltoall`` is the specification.

    Without other options it is ``torch.distributed.all_to_all_single``. For sequence parallelism (Ulysses), a tensor
    [batch, sequence / N, heads, head_dim] with ``scatter_dim=2, gather_dim=1`` becomes [batch, sequence, heads / N,
    head_dim], and ``scatter_dim=1, gather_dim=2`` is the way back. Kernels read and write the tensors in place.

    Ranks are processes if ``x`` is a tensor, and the devices of this process if ``x`` is a list. Collective: every rank
    makes the same calls in the same order. Differentiable: the gradient is the all-to-all in the other direction.

    Args:
        x: this rank's tensor, or a list with one tensor for each device of this process, of at least one dimension, any
            strides and alignment. Dtypes are equal, and so are shapes but for the two dimensions.
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group; for a list, of its devices.
        out: a tensor of the result's shape and dtype, or a list of these, that shares no memory with ``x``.
        sizes: a pair: the lengths along ``scatter_dim`` of the parts that this rank sends to each rank, and along
            ``gather_dim`` of those that it receives from each: ``input_split_sizes`` and ``output_split_sizes`` of
            ``all_to_all_single``. They may be 0. All ranks give them, and the same pair if the dimensions differ, or
            none do. None: the parts that a rank sends are equal, and so are the tensors of all ranks. For a list that
            divides and joins along one dimension: the lengths that each device sends to each device, device by device.
        scatter_dim: the dimension along which ``x`` is divided.
        gather_dim: the dimension along which the parts are joined.
        algorithm: "auto", or an all-to-all of :class:`graphar.Algorithm`.
        timeout_s: the deadline of each wait on another rank, in seconds. None: the communicator's.

    Returns:
        A contiguous tensor, for a list one a device; or ``out``.

    Raises:
        TypeError, ValueError: an argument breaks a rule. Nothing was sent.
        CommunicatorError: the communicator is closed, or ranks made different calls or disagree on a length.
        CollectiveTimeout: a rank did not arrive in time. On GPUs the next call or ``synchronize`` raises it.
    """
    typed: object = sizes
    if isinstance(sizes, (list, tuple)):  # a call of `repeats.typed` for each takes longer
        typed = tuple([(*pair, *map(type, pair)) if isinstance(pair, (list, tuple)) else (pair,) for pair in sizes])
    dims = scatter_dim, type(scatter_dim), gather_dim, type(gather_dim)
    how = *dims, typed, algorithm, timeout_s, type(timeout_s)
    if (result := repeated(NAME, group, (x,), how, None, out)) is not None:
        return result
    call_checks.check_call(NAME, algorithm, timeout_s, NAME)
    in_list, name = isinstance(x, list), engine_name(group, NAME)
    named = (_arguments_of_list if in_list else _arguments_of_rank)(x, group, sizes, scatter_dim, gather_dim)
    named |= {"communicator": name, "timeout_s": timeout_s, "algorithm": str(algorithm)}
    asked = (x,), how, None
    if out is None:
        return OP(x, asked=asked, **named)
    of_ranks = options.by_rank(NAME, x=x, out=out)
    shapes = _result_shapes([like for like, _ in of_ranks], Arguments(OP.complete(named)))
    for (like, to), shape in zip(of_ranks, shapes, strict=True):
        options.check_result(NAME, to, shape, like.dtype, (like,))
    OP.into(x, out, asked=asked, **named)
    return out


def _arguments_of_rank(x, group: Group, sizes, scatter_dim, gather_dim) -> dict[str, Any]:
    tensor_checks.check_strided(NAME, "x", x)
    scatter = call_checks.check_axis(NAME, x, scatter_dim, "scatter_dim")
    gather = call_checks.check_axis(NAME, x, gather_dim, "gather_dim")
    rank, ranks = parts.place(group)
    if sizes is None:
        sends, receives = _equal(x, scatter, ranks), [x.shape[gather]] * ranks
        receives = sends if scatter == gather else receives
    else:
        sends, receives = _check_pair(sizes, ranks)
        _check_sum(x, scatter, sends)
        sent = sends[rank] if scatter == gather else x.shape[gather]
        if receives[rank] != sent:
            raise ValueError(
                f"{NAME}: sizes must have {sent} from rank {rank}, which is this one, got {list(receives)} as received"
            )
    lengths = {"sizes": [*sends, *receives], "known": sizes is None or scatter != gather}
    return {"rank": rank, "scatter_dim": scatter, "gather_dim": gather, **lengths}


def _arguments_of_list(xs, group: Group, sizes, scatter_dim, gather_dim) -> dict[str, Any]:
    gather, ranks = tensor_checks.check_list_to_join(NAME, xs, gather_dim), len(xs)
    scatter = call_checks.check_axis(NAME, xs[0], scatter_dim, "scatter_dim")
    if scatter != gather:
        lengths = [x.shape[gather] for x in xs]
        sends, receives = (_equal(xs[0], scatter, ranks), lengths) if sizes is None else _check_pair(sizes, ranks)
        if list(receives) != lengths:
            raise ValueError(
                f"{NAME}: sizes must have the tensors' lengths {lengths} as received, got {list(receives)}"
            )
        of_ranks = [(sends, receives)] * ranks
    else:
        rows = [_equal(x, scatter, ranks) for x in xs] if sizes is None else sizes
        tensor_checks.check_one_each(NAME, "sizes", rows, xs)
        rows = [_check_lengths(lengths, ranks) for lengths in rows]
        of_ranks = list(zip(rows, zip(*rows, strict=True), strict=True))
    for x, (sends, _) in zip(xs, of_ranks, strict=True):
        _check_sum(x, scatter, sends)
    sizes = [length for pair in of_ranks for lengths in pair for length in lengths]
    return {"sizes": sizes, "scatter_dim": scatter, "gather_dim": gather}


def _equal(x: torch.Tensor, dim: int, ranks: int) -> list[int]:
    if x.shape[dim] % ranks:
        raise ValueError(
            f"{NAME}: dimension {dim} is divided into equal parts for {ranks} ranks unless sizes are given, got shape "
            f"{list(x.shape)}"
        )
    return [x.shape[dim] // ranks] * ranks


def _check_pair(sizes: object, ranks: int) -> Sequence[Sequence[int]]:
    if not isinstance(sizes, Sequence) or len(sizes) != 2:
        raise TypeError(f"{NAME}: sizes must be a pair, of the lengths that are sent and received, got {sizes!r}")
    return [_check_lengths(lengths, ranks) for lengths in sizes]


def _check_lengths(lengths: object, ranks: int) -> Sequence[int]:
    if not isinstance(lengths, Sequence) or not all(isinstance(n, (int, torch.SymInt)) for n in lengths):
        raise TypeError(f"{NAME}: sizes must have sequences of ints, got {lengths!r}")
    if len(lengths) != ranks or any(n < 0 for n in lengths):
        raise ValueError(f"{NAME}: sizes must have a length of at least 0 for each of {ranks} ranks, got {lengths!r}")
    return lengths


def _check_sum(x: torch.Tensor, dim: int, sends: Sequence[int]) -> None:
    if sum(sends) != x.shape[dim]:
        raise ValueError(
            f"{NAME}: sizes must have lengths to send that add up to dimension {dim} of shape {list(x.shape)}, got "
            f"{list(sends)}"
        )


def _lengths(arguments: Arguments, tensors: int) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Returns, for each rank of this process, its number, what it sends to each rank, and what it gets from each."""
    first, sizes = max(arguments.rank, 0), arguments.sizes
    ranks = len(sizes) // (2 * tensors)
    of_ranks = []
    for at in range(tensors):  # a comprehension is a further frame
        begin = 2 * ranks * at
        of_ranks.append((first + at, tuple(sizes[begin:][:ranks]), tuple(sizes[begin + ranks :][:ranks])))
    return of_ranks


def _result_shapes(xs: Sequence[torch.Tensor], arguments: Arguments) -> list[list[int]]:
    shapes = [list(x.shape) for x in xs]
    for shape, (rank, sends, receives) in zip(shapes, _lengths(arguments, len(xs)), strict=True):
        shape[arguments.scatter_dim] = sends[rank]
        shape[arguments.gather_dim] = sum(receives)
    return shapes


class _AllToAll(Op):
    needed = ()

    def check(self, engine: Engine, xs, arguments: Arguments) -> None:
        """Raises ValueError if a compiled graph made a call for another rank, other ranks or other tensors."""
        scatter, gather = arguments.scatter_dim, arguments.gather_dim
        parts.check_place(NAME, engine, arguments.rank, len(arguments.sizes) // (2 * len(xs)))
        for x, (rank, sends, receives) in zip(xs, _lengths(arguments, len(xs)), strict=True):
            stays = sends[rank] if scatter == gather else x.shape[gather]
            if min(arguments.sizes) < 0 or sum(sends) != x.shape[scatter] or receives[rank] != stays:
                raise ValueError(f"{NAME}: sizes {list(arguments.sizes)} do not fit a tensor of shape {list(x.shape)}")

    def fake(self, xs, arguments: Arguments) -> list[torch.Tensor]:
        return [x.new_empty(shape) for x, shape in zip(xs, _result_shapes(xs, arguments), strict=True)]

    def run(self, engine: Engine, xs, outs, arguments: Arguments):
        xs, (scatter, gather) = [x.contiguous() for x in xs], (arguments.scatter_dim, arguments.gather_dim)
        row = tuple([1 if at in (scatter, gather) else length for at, length in enumerate(xs[0].shape)])
        (first, *_), sends, receives = zip(*_lengths(arguments, len(xs)), strict=True)
        work = Exchange(first, row, sends, receives, scatter, gather, arguments.known)
        ranks, symmetric = options.operands([xs], [(out,) for out in outs]), engine.is_symmetric(outs)
        call = Call.of(work, xs[0], algorithm=arguments.algorithm, timeout_s=arguments.timeout_s, symmetric=symmetric)
        return engine.run(call, ranks), ranks

    def check_out(self, xs, outs, arguments: Arguments) -> None:
        tensor_checks.check_apart(NAME, outs, x=xs)

    def backward(self, ctx, gradients, *_):
        back = {"scatter_dim": ctx.arguments.gather_dim, "gather_dim": ctx.arguments.scatter_dim, "sizes": []}
        for _, sends, receives in _lengths(ctx.arguments, ctx.ranks):
            back["sizes"] += [*receives, *sends]
        return for_ranks(ctx, NAME, gradients, **vars(ctx.arguments) | back), {}


OP = _AllToAll(NAME, *options.IN_PARTS, "scatter_dim", "gather_dim", "known", "algorithm")

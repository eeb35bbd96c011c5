"""Functions for reduce-scatter and all-gather: tensors with a part along an axis for each rank.

An op takes the length of every rank's part along the axis, and this process's rank. A compiled graph therefore holds
these facts about the group, and a graph that one rank cached does not serve another. For a list the rank is -1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphar.numerics.partitions import split
from graphar.ops.options import Arguments
from graphar.ranks.groups import group_of_mesh
from graphar.runtime.checks.call_checks import check_sizes
from graphar.runtime.engine import Engine
from graphar.runtime.registry import ALONE, Group, check_takes_tensors, engine_name, engine_of_either


def place(group: Group, alone: bool = False) -> tuple[int, int]:
    """Returns this process's rank and the number of ranks. A compiler gets constants, and no engine is made.

    With ``alone``, a process without a group is the only rank.
    """
    if alone and engine_name(group, alone=True) == ALONE:
        return -1, 1
    if isinstance(group, DeviceMesh):
        group = group_of_mesh(group)
    if torch.compiler.is_compiling() and (group is None or isinstance(group, dist.ProcessGroup)):
        return dist.get_rank(group), dist.get_world_size(group)
    engine = engine_of_either(group)
    check_takes_tensors(engine)
    return engine.rank or 0, engine.world_size


def check_has_rows(op: str, name: str, x: torch.Tensor) -> None:
    if x.ndim < 2:
        raise ValueError(f"{op}: {name} must have 2 dimensions or more, since its rows are split, got {list(x.shape)}")


def of_rows(op: str, name: str, x, group: Group, alone: bool = False) -> tuple[dict[str, Any], list[int]]:
    """Returns the arguments ``rank`` and ``sizes`` of an op that splits rows, and the lengths of this process's."""
    in_list = isinstance(x, (list, tuple))
    first = x[0] if in_list else x
    check_has_rows(op, name, first)
    rank, world_size = (-1, len(x)) if in_list else place(group, alone)
    sizes = split(first.shape[0], world_size)
    return {"rank": rank, "sizes": sizes}, sizes if in_list else [sizes[rank]]


def to_join(op: str, name: str, x, axis: int, sizes: Any, group: Group, alone: bool = False) -> dict[str, Any]:
    """Returns the arguments ``rank`` and ``sizes`` of an op that joins tensors; ``sizes`` are the user's, or None."""
    if isinstance(x, (list, tuple)):
        if sizes is not None:
            raise ValueError(f"{op}: sizes is for calls with one tensor; omit it for a list")
        return {"rank": -1, "sizes": [of_rank.shape[axis] for of_rank in x]}
    (rank, ranks), length = place(group, alone), x.shape[axis]
    sizes = [length] * ranks if sizes is None else check_sizes(op, sizes, ranks, rank, length, name)
    return {"rank": rank, "sizes": sizes}


def rows_of(x: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns a contiguous ``x`` with ``axis`` first, so that the ranks' parts follow one another."""
    return (x if axis == 0 else x.movedim(axis, 0)).contiguous()


def room_for(out: torch.Tensor, axis: int) -> torch.Tensor:
    """Returns a tensor for the result that becomes ``out``: contiguous, with ``axis`` first."""
    return out if axis == 0 else out.new_empty(out.movedim(axis, 0).shape)


def counts_of(rows: torch.Tensor, sizes: Sequence[int]) -> tuple[int, ...]:
    in_a_row = math.prod(rows.shape[1:])
    return tuple([size * in_a_row for size in sizes])


def own_sizes(arguments: Arguments) -> list[int]:
    return list(arguments.sizes) if arguments.rank < 0 else [arguments.sizes[arguments.rank]]


def with_length(x: torch.Tensor, axis: int, length: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a new tensor like ``x`` with another length along ``axis``, and with ``dtype`` unless that is None."""
    return x.new_empty((*x.shape[:axis], length, *x.shape[axis + 1 :]), dtype=dtype)


def check(op: str, engine: Engine, arguments: Arguments, lengths: list[int], whole: bool = False) -> None:
    """Raises ValueError if a call was made for another rank or other ranks, or its sizes do not fit the tensors.

    ``lengths`` are of this process's tensors, which have its ranks' parts, or all parts if they are ``whole``.
    """
    # The public functions ensure this, but compiled graphs and torch.ops do not. Kernels compute addresses from it.
    check_place(op, engine, arguments.rank, len(arguments.sizes))
    expected = [sum(arguments.sizes)] * len(lengths) if whole else own_sizes(arguments)
    if min(arguments.sizes) < 0 or lengths != expected:
        got = ", ".join(map(str, lengths))
        raise ValueError(f"{op}: sizes {list(arguments.sizes)} do not fit a length of {got}")


def check_place(op: str, engine: Engine, rank: int, ranks: int) -> None:
    mine = -1 if engine.devices else engine.rank
    if (rank, ranks) != (mine, engine.world_size):
        raise ValueError(f"{op}: made for rank {rank} of {ranks}, called by rank {mine} of {engine.world_size}")

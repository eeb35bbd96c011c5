"""graphar.empty: symmetric tensors, which spare an all-reduce a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
import torch.distributed as dist

from graphar.plan import checks
from graphar.runtime.registry import Communicator, Group, engine_of_either


@overload
def empty(*size: int, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None) -> torch.Tensor: ...
@overload
def empty(
    size: Sequence[int], /, *, dtype: torch.dtype | None = None, group: dist.ProcessGroup | None = None
) -> torch.Tensor: ...
@overload
def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: Communicator
) -> torch.Tensor | list[torch.Tensor]: ...
def empty(*size, dtype: torch.dtype | None = None, group: Group = None):
    """An uninitialised symmetric tensor, which all ranks reach, so that an all-reduce needs no copy.

    ``two_shot_pipelined``, which "auto" takes for large tensors, writes the sums of all ranks straight into it where it
    is ``out``. ``one_shot_unstaged`` reads it where it lies if it is ``x``, and not also ``out``. The same holds for
    views without gaps that begin at a multiple of 16 bytes. Where one rank passes a symmetric tensor, or a view of it,
    all ranks pass the same one, at the same offset: otherwise, and after a CollectiveTimeout, its content is undefined.
    In every other respect it is an ordinary tensor. On the CPU, and where kernels do not reach all ranks, it is one.

    Collective, and never while a graph is captured; captured calls may use it. Its memory, a multiple of 2 MB outside
    torch's allocator, is freed when the communicator is closed, after which the tensor must not be used.

    Args:
        size: as torch.empty takes it: integers, or one sequence of them.
        dtype: None is torch's default.
        group: a process group or Communicator; None is the default group. A Communicator with devices makes one tensor
            for each of them.

    Returns:
        A contiguous tensor on this rank's device, or for a communicator with devices a list, one a device.

    Raises:
        TypeError, ValueError: torch has no such tensor, or the ranks ask for different ones.
        CommunicatorError: the communicator is closed, a stream is being captured, or a rank did not come in time.
        DriverError: a GPU has too little memory left; torch.cuda.empty_cache() frees what torch keeps.
    """
    engine = engine_of_either(group, "empty", "pass a Communicator with devices as the group")
    engine.check_open("empty")
    tensors = engine.empty(checks.blueprint("empty", size, dtype))
    return tensors if engine.devices else tensors[0]

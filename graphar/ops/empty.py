"""graphar.empty: symmetric tensors, which spare an all-reduce a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphar.ranks.capture import check_not_capturing
from graphar.runtime.checks import tensor_checks
from graphar.runtime.engine import runner_of
from graphar.runtime.registry import Group, HasEngine, engine_of_either


@overload
def empty(
    *size: int | Sequence[int],
    dtype: torch.dtype | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
) -> torch.Tensor: ...
@overload
def empty(
    *size: int | Sequence[int], dtype: torch.dtype | None = None, group: HasEngine
) -> torch.Tensor | list[torch.Tensor]: ...
def empty(*size, dtype: torch.dtype | None = None, group: Group = None):
    """Returns an uninitialised symmetric tensor, which all ranks can access, so that an all-reduce saves a copy.

    "two_shot_pipelined", which "auto" takes for large tensors, writes the sums of all ranks directly into a symmetric
    ``out``, or into a view of one without gaps that begins at a multiple of 16 bytes. In such a call all ranks must
    pass the same one, at the same offset: the one that the same call of ``empty`` returned. Otherwise every rank gets
    CommunicatorError. After an error its content is undefined. In every other respect it is like any tensor. On the
    CPU, and if kernels do not reach all ranks, it is an ordinary one.

    Collective, and refused while a graph is captured; captured calls may use the tensor. Its memory, a multiple of 2 MB
    outside torch's allocator, is freed when the communicator is closed. The tensor must not be used afterwards.

    Args:
        size: the shape, as torch.empty takes it: integers, or one sequence of them. Equal on all ranks.
        dtype: the dtype, equal on all ranks. None: torch's default.
        group: a process group, a DeviceMesh of one dimension, or a Communicator. None: the default group. A
            Communicator with devices makes one tensor for each of them.

    Returns:
        A contiguous tensor on this rank's device; for a communicator with devices a list, one per device.

    Raises:
        TypeError, ValueError: torch has no such tensor, the ranks ask for different ones, or there is no group.
        CommunicatorError: the communicator is closed, a stream is being captured, or a rank did not arrive in time.
        DriverError: a GPU has too little memory left; torch.cuda.empty_cache() frees what torch keeps.
    """
    engine = engine_of_either(group, "empty", "pass a Communicator with devices as the group")
    like = tensor_checks.blueprint("empty", size, dtype)
    with engine.keeping_failure("empty"):
        devices = engine.devices or (engine.first_device(),)
        check_not_capturing("empty", devices)
        if not engine.devices:
            mine = f"{list(like.shape)} of {like.dtype}"
            words = engine.rendezvous().exchange("making a symmetric tensor", mine.encode())
            if len(set(asked := [word.decode() for word in words])) > 1:
                raise ValueError(f"empty: ranks must ask for the same shape and dtype, got, in rank order, {asked}")
        if engine.find_runner(devices[0]):
            tensors = runner_of(engine).symmetric.empty(like)
            engine.symmetric = runner_of(engine).symmetric
        else:
            tensors = [torch.empty_like(like, device=device) for device in devices]
    return tensors if engine.devices else tensors[0]

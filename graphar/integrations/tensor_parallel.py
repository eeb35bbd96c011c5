"""The communicator of a tensor-parallel group of another program, with kernels loaded before CUDA graphs are captured.

The program's own communicator serves what graphar does not: other dtypes, and groups that no kernel of graphar reaches.
"""

from __future__ import annotations

import warnings
from typing import TypeGuard

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.numerics.dtypes import TYPE_NAMES

OPS = ("allreduce", "reducescatter", "allgather")
TIMEOUT_S = 600.0  # as torch has for NCCL: while models are loaded, one rank may compile for minutes


def is_tensor_parallel(name: str, groups: tuple[str, ...]) -> bool:
    """Whether the name of a group, such as "tp:0", is one of ``groups`` and a number."""
    return name.split(":")[0] in groups


def communicator_of(group: dist.ProcessGroup, device: torch.device) -> Communicator | None:
    """Returns a communicator that is prepared for all served calls, or None if no kernel reaches all ranks. Collective.

    On the CPU, where graphar has no kernels, it works over ``group``.
    """
    made = Communicator(group, timeout_s=TIMEOUT_S)
    made.prepare(ops=OPS)
    if device.type != "cuda" or made.engine.find_runner(device):
        return made
    message = f"graphar does not serve a tensor-parallel group: {made.engine.why_no_runner}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    made.close()
    return None


def serves(communicator: Communicator | None, x: torch.Tensor) -> TypeGuard[Communicator]:
    """Whether graphar makes a call with ``x``: all ranks answer alike."""
    return communicator is not None and x.dtype in TYPE_NAMES

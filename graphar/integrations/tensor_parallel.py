"""The communicator of a tensor-parallel group in vLLM or SGLang, and the calls that it serves."""

from __future__ import annotations

import warnings
from typing import TypeGuard

import torch
import torch.distributed as dist

from graphar.communicator import Communicator
from graphar.numerics.dtypes import TYPE_NAMES

OPS = ("allreduce", "reducescatter", "allgather")
TIMEOUT_S = 600.0  # as torch has for NCCL: while models are loaded, one rank may compile for minutes


def communicator_of(
    name: str, served: tuple[str, ...], group: dist.ProcessGroup, device: torch.device
) -> Communicator | None:
    """Returns a communicator with the kernels of all served calls loaded, or None if they cannot run. Collective.

    On the CPU, it works over ``group`` without kernels. None also for a group of one rank, or whose ``name``, such as
    "tp:0", is not one of ``served`` and a number.
    """
    if name.split(":")[0] not in served or group.size() == 1:
        return None
    made = Communicator(group, timeout_s=TIMEOUT_S)
    made.prepare(ops=OPS)
    if device.type != "cuda" or made.engine.find_runner(device):
        return made
    message = f"graphar does not serve a tensor-parallel group: {made.engine.why_no_runner}"
    warnings.warn(message, RuntimeWarning, stacklevel=2)
    made.close()
    return None


def serves(communicator: Communicator | None, x: torch.Tensor) -> TypeGuard[Communicator]:
    """Whether graphar makes a call with ``x``. The answer is equal on all ranks."""
    return communicator is not None and x.dtype in TYPE_NAMES

"""Resolves the participants of a collective: a process group, or the devices of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphar.plan import checks


def process_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns ``group``, or the default group for None. TypeError if it is no process group, ValueError without one."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "graphar: torch.distributed is not initialised; call torch.distributed.init_process_group(), or pass a "
                "list with one tensor a device"
            )
        return dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"graphar: group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    return group


def local_devices(devices: Sequence[torch.device | str | int]) -> tuple[torch.device, ...]:
    """Returns ``devices`` as torch.device; CUDA devices have an index. ValueError unless one process can hold them."""
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"Communicator: devices must be a list of at least one device, got {devices!r}")
    found = []
    for one in devices:
        device = torch.device("cuda", one) if isinstance(one, int) else torch.device(one)
        if device.type == "cuda" and device.index is None:
            raise ValueError(f"Communicator: devices must name their index, got {device}")
        found.append(torch.device("cpu") if device.type == "cpu" else device)  # CPU tensors have no index
    if len({device.type for device in found}) > 1:
        raise ValueError(f"Communicator: devices must be all the CPU or all CUDA, got {[str(d) for d in found]}")
    checks.check_devices("Communicator", found)
    return tuple(found)


def device_of_process(group: dist.ProcessGroup) -> torch.device:
    """Returns the device of this process: its current GPU, or the CPU."""
    # Without CUDA initialised and without NCCL, the process computes on the CPU.
    uses_gpu = torch.cuda.is_initialized() or "nccl" in str(dist.get_backend_config(group))
    if uses_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

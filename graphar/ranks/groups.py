"""Resolves the participants of a collective: a process group, or the devices of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh


def process_group(group: dist.ProcessGroup | DeviceMesh | None, instead: str = "") -> dist.ProcessGroup:
    """Returns ``group``, the group of a mesh of one dimension, or the default group for None, else says ``instead``."""
    if isinstance(group, DeviceMesh):
        return group_of_mesh(group)
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            advice = "call torch.distributed.init_process_group()" + (f", or {instead}" if instead else "")
            raise ValueError(f"graphar: torch.distributed is not initialised; {advice}")
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise no_group(group, "a torch.distributed.ProcessGroup or a DeviceMesh")
    return group


def known_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the process group of a communicator without devices."""
    assert group is not None
    return group


def group_of_mesh(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Returns the process group of a mesh of one dimension. ValueError if it has more, or this rank is not in it."""
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        named, last = f" {tuple(names)}" if names else "", repr(names[-1]) if names else mesh.ndim - 1
        example = (f"mesh[{last}] or " if names else "") + f"mesh.get_group({last})"
        raise ValueError(
            f"graphar: group is a DeviceMesh of {mesh.ndim} dimensions{named}; pass one, such as {example}"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("graphar: this rank is not in the DeviceMesh; only its ranks call its collectives")
    return mesh.get_group()


def no_group(group: object, wanted: str) -> Exception:
    """Returns the error for what is no group: a ValueError for the value that torch gives ranks outside a new group."""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return ValueError(
            "graphar: this rank is not in the group, which torch.distributed.new_group says by NON_GROUP_MEMBER; only"
            " the ranks of a group call its collectives"
        )
    return TypeError(f"graphar: group must be {wanted}, got {type(group).__name__}")


def local_devices(devices: Sequence[torch.device | str | int]) -> tuple[torch.device, ...]:
    """Returns ``devices`` as torch.device; CUDA devices have an index. ValueError unless one process can hold them."""
    if isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise ValueError(f"Communicator: devices must be a list of at least one device, got {devices!r}")
    resolved = []
    for name in devices:
        device = torch.device("cuda", name) if isinstance(name, int) else torch.device(name)
        if device.type == "cuda" and device.index is None:
            raise ValueError(f"Communicator: devices must have an index, such as cuda:0, got {device}")
        resolved.append(torch.device("cpu") if device.type == "cpu" else device)  # CPU tensors have no index
    if len({device.type for device in resolved}) > 1:
        raise ValueError(f"Communicator: devices must be all the CPU or all CUDA, got {[str(d) for d in resolved]}")
    check_devices("Communicator", resolved)
    return tuple(resolved)


def check_devices(op: str, devices: Sequence[torch.device]) -> None:
    """Raises ValueError for devices that are neither CPU nor CUDA, a CUDA device that occurs twice, and no devices."""
    if not devices:
        raise ValueError(f"{op}: needs at least one tensor, got an empty list")
    for i, device in enumerate(devices):
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{op}: tensors must be on the CPU or on CUDA devices, got {device}")
        if device.type == "cuda" and device in devices[:i]:
            raise ValueError(f"{op}: tensors must be on distinct devices, got {device} twice")


def device_of_process(group: dist.ProcessGroup) -> torch.device:
    """Returns the device of this process: its current GPU, or the CPU."""
    # Without CUDA initialised and without NCCL, the process computes on the CPU.
    uses_gpu = torch.cuda.is_initialized() or "nccl" in str(dist.get_backend_config(group))
    if uses_gpu and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")

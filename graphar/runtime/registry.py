"""Finds the communicator of a call: the named one, or the one that calls without a name share."""

from __future__ import annotations

import weakref

import torch
import torch.distributed as dist

from graphar.communicator import NAME_PREFIX, Communicator, open_communicators
from graphar.errors import CommunicatorError
from graphar.ranks.groups import process_group

_by_group: dict[str, Communicator] = {}
_by_devices: dict[tuple[torch.device, ...], Communicator] = {}


def communicator_name(group: dist.ProcessGroup | Communicator | None) -> str:
    """What an op calls ``group``: its name, or "" for the default group.

    Raises:
        CommunicatorError: it is a communicator, and closed.
    """
    if group is None:
        return ""
    if isinstance(group, Communicator):
        group.check_open()
        return group.name
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    raise TypeError(f"graphar: group must be a ProcessGroup or a Communicator, got {type(group).__name__}")


def communicator_of_group(name: str) -> Communicator:
    """The communicator of a call with one tensor: ``name``, or the one of that process group, "" being the default."""
    if not name:
        found = _by_group.get("")
        if found is not None and not found.closed and found.group is dist.group.WORLD:
            return found
    elif name in open_communicators:
        check_takes_tensors(open_communicators[name])
        return open_communicators[name]
    _check_not_closed(name)
    group = dist.distributed_c10d._resolve_process_group(name) if name else process_group(None)
    name = "" if group is dist.group.WORLD else name  # one communicator for the default group, named or not
    found = _by_group.get(name)
    if found is None or found.closed or found.group is not group:
        found = _by_group[name] = Communicator(group)
        # Torch has no hook for the end of a group, but then drops the store object that it keeps for it.
        store = dist.distributed_c10d._get_process_group_store(group)
        weakref.finalize(store, _outlive_group, name, found).atexit = False
    return found


def _outlive_group(name: str, communicator: Communicator) -> None:
    """Keeps a communicator whose group was destroyed, but not the group's store.

    The server of a TCPStore runs as long as a store of its process needs it, and a new one on its port is the same
    server: a group that is initialised again would find the addresses of the one before.
    """
    if _by_group.get(name) is communicator:
        del _by_group[name]
    communicator.let_go_of_group()


def check_takes_tensors(communicator: Communicator) -> None:
    """Refuses one of devices."""
    if communicator.devices is not None:
        raise ValueError("graphar: this communicator has devices, so it takes a list of tensors, got a tensor")


def _check_not_closed(name: str) -> None:
    """Refuses the name of a communicator that is not open: a compiled graph, or a backward pass, may outlive one."""
    if name.startswith(NAME_PREFIX) and name not in open_communicators:
        raise CommunicatorError("this communicator is closed")


def communicator_of_devices(name: str, devices: tuple[torch.device, ...]) -> Communicator:
    """The communicator of a call with a list: ``name``, or for "" the one of the list's devices."""
    if name:
        _check_not_closed(name)
        found = open_communicators.get(name)
        if found is None or found.devices != devices:
            theirs = "a process group" if found is None or found.devices is None else [str(d) for d in found.devices]
            mine = [str(device) for device in devices]
            raise ValueError(f"graphar: a list of tensors on {mine} does not fit a communicator of {theirs}")
        return found
    found = _by_devices.get(devices)
    if found is None or found.closed:
        found = _by_devices[devices] = Communicator(devices=devices)
    return found

"""Finds the engine of a call: a communicator's, or the engine that all calls with a process group share."""

from __future__ import annotations

import threading
import weakref
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphar.errors import CommunicatorError
from graphar.ranks.groups import group_of_mesh, local_devices, no_group, process_group
from graphar.runtime.engine import NAME_PREFIX, Engine, closed, open_engines
from graphar.runtime.watch.stats import Stats, with_beside

DEFAULT_TIMEOUT_S = 60.0
ALONE = "alone"  # in a schema, the name of the only rank of a call without a group
_LIST_INSTEAD = "pass a list with one tensor a device"


class HasEngine(Protocol):
    """The part of graphar.Communicator that ops use."""

    @property
    def engine(self) -> Engine: ...


# A mesh has one dimension. None: the default group, or the devices of a list.
Group: TypeAlias = dist.ProcessGroup | DeviceMesh | HasEngine | None

_by_group: dict[str, Engine] = {}
_by_devices: dict[tuple[torch.device, ...], Engine] = {}
_making = threading.RLock()  # two threads' first calls share an engine


def engine_name(group: Group, op: str = "graphar", alone: bool = False) -> str:
    """Returns the name of a process group, mesh or communicator in an op's schema; "" for the default group.

    With ``alone``, a call without any group has a single rank: its name is ALONE.
    """
    if group is None:
        return ALONE if alone and not (dist.is_available() and dist.is_initialized()) else ""
    if isinstance(group, dist.ProcessGroup):
        return group.group_name
    if isinstance(group, DeviceMesh):  # before getattr(), which torch.compile does not trace for a mesh
        return group_of_mesh(group).group_name
    engine = getattr(group, "engine", None)
    if isinstance(engine, Engine):
        engine.check_open(op)
        return engine.name
    raise no_group(group, "a ProcessGroup, a DeviceMesh or a Communicator")


def engine_of(group: Group, op: str = "graphar") -> Engine:
    """Returns the engine of a call with one tensor over a group, mesh or communicator; None: the default group."""
    return known_engine(group) or engine_of_group(engine_name(group, op), op)


def known_engine(group: Group) -> Engine | None:
    """Returns the engine of :func:`engine_of` if that is quickly found; None for a mesh, a new group, or an error."""
    if group is None:
        engine = _by_group.get("")
        world = dist.distributed_c10d._world._default_pg  # as `dist.group.WORLD` finds it, in two functions
        return engine if engine is not None and not engine.closed and engine.group is world else None
    if type(group) is dist.ProcessGroup:  # before getattr(), which takes 0.2 us to find no `engine`
        if group not in dist.distributed_c10d._world.pg_map:  # it was destroyed
            return None
        engine = _by_group.get(group.group_name) or _by_group.get("")
        return engine if engine is not None and not engine.closed and engine.group is group else None
    engine = getattr(group, "engine", None)
    return engine if isinstance(engine, Engine) and not engine.closed and engine.devices is None else None


def engine_of_group(name: str, op: str = "graphar", instead: str = _LIST_INSTEAD) -> Engine:
    """Returns the engine of a call with one tensor, by the name of an engine or a process group; "": the default."""
    if name in open_engines:
        check_takes_tensors(open_engines[name])
        return open_engines[name]
    if name == ALONE:
        return engine_of_devices("", (torch.device("cpu"),), op)
    name, group = _named_group(name, op, instead)
    with _making:
        engine = _made_for(name, group)
        if engine is None:
            engine = _by_group[name] = Engine(group, None, DEFAULT_TIMEOUT_S)
            # torch has no hook for the end of a group, but drops the group's store then.
            store = dist.distributed_c10d._get_process_group_store(group)
            weakref.finalize(store, _outlive_group, name, engine).atexit = False
        return engine


def _named_group(name: str, op: str, instead: str) -> tuple[str, dist.ProcessGroup]:
    """Returns the process group of a name, and the name of its engine."""
    _check_not_closed(name, op)
    try:
        group = dist.distributed_c10d._resolve_process_group(name) if name else None  # type: ignore
    except RuntimeError:
        raise CommunicatorError(
            f"{op}: the process group {name!r} was destroyed; make another by torch.distributed.new_group()"
        ) from None
    group = process_group(group, instead)
    # The default group has one engine, whether it is named or not.
    return "" if group is dist.group.WORLD else name, group


def _made_for(name: str, group: dist.ProcessGroup) -> Engine | None:
    engine = _by_group.get(name)
    return None if engine is None or engine.closed or engine.group is not group else engine


def _outlive_group(name: str, engine: Engine) -> None:
    """Makes an engine whose group was destroyed drop the group's store. It stays only if it has kernels' memory.

    The server of a TCPStore runs as long as its process holds a store, and a new store on the same port joins that
    server. A group that is initialised again would find the old group's addresses there.
    """
    if _by_group.get(name) is engine:
        del _by_group[name]
    engine.let_go_of_group()
    if engine.runner is None:
        open_engines.pop(engine.name, None)


def engine_of_devices(name: str, devices: tuple[torch.device, ...], op: str = "graphar") -> Engine:
    """Returns the engine of a call with a list of tensors, by the engine's name; "": the engine of the devices."""
    if name:
        _check_not_closed(name, op)
        engine = open_engines.get(name)
        if engine is None or engine.devices is None:
            raise ValueError(
                "graphar: a process group takes one tensor of each process, got a list; pass a tensor, or omit "
                "group: a list has one tensor for each device of this process"
            )
        if engine.devices != devices:
            mine, theirs = ([str(device) for device in listed] for listed in (devices, engine.devices))
            raise ValueError(f"graphar: a list of tensors on {mine} does not fit a communicator of {theirs}")
        return engine
    with _making:
        engine = _by_devices.get(devices)
        if engine is None or engine.closed:
            engine = _by_devices[devices] = Engine(None, local_devices(devices), DEFAULT_TIMEOUT_S)
        return engine


def check_takes_tensors(engine: Engine) -> None:
    if engine.devices is not None:
        raise ValueError("graphar: this communicator has devices, so it takes a list of tensors, got a tensor")


def _check_not_closed(name: str, op: str) -> None:
    """Raises CommunicatorError for the name of a closed engine: a compiled graph or a backward pass may hold one."""
    if name.startswith(NAME_PREFIX) and name not in open_engines:
        raise closed(op)


def engine_of_either(group: Group, op: str = "graphar", instead: str = _LIST_INSTEAD) -> Engine:
    """Returns the engine of a process group or mesh, or of a communicator of a group or of devices."""
    engine = getattr(group, "engine", None)
    return engine if isinstance(engine, Engine) else engine_of_group(engine_name(group, op), op, instead)


def check_keep(keep: object) -> None:
    """Raises ValueError unless ``keep`` names what a suspended communicator can keep."""
    if keep not in (None, "symmetric"):
        raise ValueError(f'suspend: keep must be "symmetric" or None, got {keep!r}')


def suspend(keep: str | None = None) -> None:
    """Gives the GPU memory of all communicators of this process back until :func:`graphar.resume`. Collective.

    It does what :meth:`Communicator.suspend` does for each open communicator, in an order that all ranks share. Calls
    that name a process group, or no group, have communicators, too. Every process of their groups must call it. A
    communicator that some rank has not called yet only refuses calls. A communicator whose group was destroyed, or of
    which a call has failed, is left as it is. No thread may replay a graph with a communicator meanwhile.

    Args:
        keep: "symmetric": keep the content of symmetric tensors, in pinned host memory. None: it is undefined after
            the resumption. The same on every rank.

    Raises:
        ValueError: ``keep`` is neither "symmetric" nor None.
        UnsupportedError: the memory of a communicator cannot be given back. The message has the reason. Others may be
            suspended already; :func:`graphar.resume` resumes them.
        CommunicatorError: a graph is being captured, or a rank did not arrive in time.
    """
    check_keep(keep)
    for engine, is_shared in _usable_engines():
        if is_shared:
            engine.suspend(keep)
        else:
            engine.set_suspended(True)


def resume() -> None:
    """Brings the GPU memory of all suspended communicators of this process back, at the same addresses. Collective.

    It does what :meth:`Communicator.resume` does for each, in the order of :func:`graphar.suspend`. If a communicator
    fails, the later ones stay suspended, and a second call goes on there. No thread may replay a graph meanwhile.

    Raises:
        DriverError: a GPU has too little memory; torch.cuda.empty_cache() frees what torch keeps.
        CommunicatorError: another rank failed, which the message names, or a rank did not arrive in time.
    """
    for engine, is_shared in _usable_engines():
        if is_shared:
            engine.resume()
        else:
            engine.set_suspended(False)


def _usable_engines() -> list[tuple[Engine, bool]]:
    """Returns this process's usable engines, in an order that ranks share, and whether all ranks know them."""
    engines = [engine for engine in [*open_engines.values()] if engine.is_usable() and not engine.is_part]
    orders = {engine: engine.common_order() for engine in engines}
    return [(engine, orders[engine] is not None) for engine in sorted(engines, key=lambda engine: orders[engine] or "")]


def stats(group: Group = None) -> Stats:
    """Returns counts of the calls with a process group, or with a communicator, in this process. Not collective.

    Args:
        group: a process group, 1-D DeviceMesh or Communicator. None: the default group.

    Returns:
        The calls and bytes by op and algorithm, fallbacks with their reasons, plans, launches and waits. Calls that
        name a group are counted apart from calls of a Communicator that was made from the group. They include calls of
        torch.distributed with a group of the backend "graphar", also where NCCL or gloo served them.

    Raises:
        TypeError, ValueError: ``group`` is none of these, or there is no default group.
        CommunicatorError: the communicator is closed, or the group was destroyed.
    """
    engine = getattr(group, "engine", None)
    if isinstance(engine, Engine):
        return engine.stats()
    name, ranks = _named_group(engine_name(group, "stats"), "stats", "give a Communicator")
    made = _made_for(name, ranks)  # this rank alone makes no engine
    return with_beside(made.stats() if made else Stats((), 0, {}, 0.0, ""), ranks.group_name)

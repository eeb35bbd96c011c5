"""The backend "graphar" before torch 2.14, which has a place for a ProcessGroup in Python, and for no Backend."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d_of_torch
from torch._C._distributed_c10d import AllgatherOptions, DebugLevel, Store, get_debug_level
from torch.distributed import distributed_c10d as c10d

from graphar.integrations.routing import NAME, Routing, tensors_in
from graphar.integrations.untraced import untraced

_OF_EQUAL_SIZE = ("allreduce", "broadcast", "reduce", "gather", "scatter")  # calls in which all ranks' tensors are


@untraced
class GrapharProcessGroup(Routing, dist.ProcessGroup):
    """A process group. It is the whole group, also in "cpu:gloo,cuda:graphar"."""

    def __init__(self, store: Store, rank: int, ranks: list[int], name: str, timeout: timedelta) -> None:
        super().__init__(store, rank, ranks, name, timeout)
        dist.batch_isend_irecv = c10d.batch_isend_irecv = _batch_isend_irecv
        _serve_functional_ops()
        self._devices: set[str] | None = None  # for which graphar is the backend
        # torch drops what it has made for other devices. Let no rank do so while another still connects to it.
        store.set(f"graphar/made/{rank}", "1")
        store.wait([f"graphar/made/{one}" for one in range(len(ranks))], timeout)

    def _is_backend_of(self, device: torch.device) -> bool:
        if self._devices is None:
            given = c10d._world.pg_backend_config[self]  # such as "cpu:gloo,cuda:graphar"
            self._devices = {one.partition(":")[0] for one in given.split(",") if one.endswith(f":{NAME}")}
        return device.type in self._devices

    def _begin(self, op: str, given: Sequence[object]) -> None:
        super()._begin(op, given)
        if get_debug_level() == DebugLevel.DETAIL:  # in which torch has no check for a group in Python
            self._torch.serving(torch.device("cpu"))  # torch keeps a group's name, which ranks meet by, in a backend
            said = f"{_words(op, given)}, call {self._collectives} of the group"
            self.communicator.engine.rendezvous().exchange(said, b"", self._timeout.total_seconds())

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        backend = str(dist.get_backend_config(self._torch.group))
        return [torch.device(one.partition(":")[0]) for one in backend.split(",")]

    def _get_backend(self, device: torch.device):
        device = torch.device(device)
        return self._torch.serving(device)._get_backend(device)

    def _start_coalescing(self, device: torch.device) -> None:
        self.start_coalescing()

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self.end_coalescing()


def _words(op: str, given: Sequence[Any]) -> str:
    """Returns what all ranks must have alike in a call of torch.distributed, in words."""
    said, x = op.removesuffix("_lists"), next(tensors_in(given), None)
    if x is not None:
        size = f"{x.numel()} elements of " if said in _OF_EQUAL_SIZE else ""
        said = f"{said} of {size}{x.dtype} on {x.device.type}"
    for one in given:
        said += f", {one.reduceOp.op.name}" if hasattr(one, "reduceOp") else ""
        said += f", root {one.rootRank}" if hasattr(one, "rootRank") else ""
    return said


_batch_by_torch = dist.batch_isend_irecv


@functools.wraps(_batch_by_torch)
@untraced
def _batch_isend_irecv(p2p_op_list):
    # For a group in Python torch makes the calls one by one. NCCL needs them at once: in a ring, each rank would
    # otherwise wait in its send for the next one's recv.
    if isinstance(p2p_op_list, list):
        p2p_op_list = [_of_torch_group(op) for op in p2p_op_list]
    return _batch_by_torch(p2p_op_list)


def _of_torch_group(op: dist.P2POp) -> dist.P2POp:
    own = getattr(op, "group", None)
    if not isinstance(own, GrapharProcessGroup):
        return op
    group = own._torch.serving(op.tensor.device)
    return dist.P2POp(op.op, op.tensor, group=group, tag=op.tag, group_peer=op.group_peer)


@functools.cache
def _serve_functional_ops() -> torch.library.Library:
    """Serves Inductor's bucketed all-gathers, for which torch calls no method of a group in Python."""
    found = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        found.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device)
    return found


def _all_gather_into_tensor_out(x, group_size, group_name, *, out):
    # What torch's own kernel does, also for groups of other backends.
    group = c10d._resolve_process_group(group_name) if isinstance(group_name, str) else group_name
    work = group._allgather_base(out, x, AllgatherOptions())
    c10d_of_torch._register_work(out, work)
    return out

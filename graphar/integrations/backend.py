"""The process group backend "graphar": torch.distributed's calls, with sums and all-gathers in graphar's kernels.

``dist.init_process_group("cpu:gloo,cuda:graphar")``, after ``import graphar``, needs no other change to a program. From
torch 2.14 on, a group has a place for a Backend in Python. Before, it has one for a ProcessGroup alone.
"""

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

from graphar.errors import UnsupportedError
from graphar.integrations.routing import NAME, Routing, tensors_in
from graphar.integrations.works import untraced

_OF_EQUAL_SIZE = ("allreduce", "broadcast", "reduce", "gather", "scatter")  # calls in which all ranks' tensors are


def register() -> None:
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(group: Any, backend_options: object) -> object:
    ranks = group.global_ranks_in_group or range(group.group_size)  # the default group has none
    form = GrapharBackend if torch.__version__ >= "2.14" else GrapharProcessGroup
    return form(group.store, group.group_rank, list(ranks), group.group_id, group.timeout)


@untraced
class GrapharBackend(Routing, dist._Backend):
    """The backend of a process group of torch's, from torch 2.14 on."""

    def _get_sequence_number_for_group(self) -> int:
        return self._collectives  # torch's debug mode compares it between ranks

    @property
    def supports_coalescing(self) -> bool:
        return True

    @property
    def supports_splitting(self) -> bool:
        return True

    @property
    def options(self):
        options = dist._Backend.Options(NAME, timeout=self._timeout)
        options.global_ranks_in_group, options.group_name = self._ranks, self._name
        return options

    def split(self, store: Store, ranks: Sequence[int], opts: dist._Backend.Options) -> GrapharBackend:
        """Returns the backend of a group of these of the group's ranks."""
        if self._rank not in ranks:  # for None, which says so, torch 2.15 reads a null pointer
            raise UnsupportedError(f"split_group: rank {self._rank} of {self._name} must be in one of the groups")
        processes = [self._ranks[rank] for rank in ranks]
        return GrapharBackend(store, list(ranks).index(self._rank), processes, opts.group_name, opts._timeout)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: ranks outside a new group need not take part."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Does nothing: connections are made when first needed."""


@untraced
class GrapharProcessGroup(Routing, dist.ProcessGroup):
    """A process group. It is the whole group, also in "cpu:gloo,cuda:graphar"."""

    def __init__(self, store: Store, rank: int, ranks: list[int], name: str, timeout: timedelta) -> None:
        super().__init__(store, rank, ranks, name, timeout)
        dist.batch_isend_irecv = c10d.batch_isend_irecv = _batch_isend_irecv
        _serve_functional_ops()
        # torch drops what it has made for other devices. Let no rank do so while another still connects to it.
        store.set(f"graphar/made/{rank}", "1")
        store.wait([f"graphar/made/{other}" for other in range(len(ranks))], timeout)

    def _is_backend_of(self, device: torch.device) -> bool:
        config = c10d._world.pg_backend_config[self]  # such as "cpu:gloo,cuda:graphar"
        return f"{device.type}:{NAME}" in config.split(",")

    def _begin(self, op: str, arguments: Sequence[object]) -> None:
        super()._begin(op, arguments)
        if get_debug_level() == DebugLevel.DETAIL:  # in which torch has no check for a group in Python
            self._torch.serving(torch.device("cpu"))  # torch keeps a group's name, which ranks meet by, in a backend
            said = f"{_words(op, arguments)}, call {self._collectives} of the group"
            self.communicator.engine.rendezvous().exchange(said, b"", self._timeout.total_seconds())

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._torch.device_types]

    def _get_backend(self, device: torch.device):
        device = torch.device(device)
        return self._torch.serving(device)._get_backend(device)

    _start_coalescing, _end_coalescing = Routing.start_coalescing, Routing.end_coalescing


def _words(op: str, arguments: Sequence[Any]) -> str:
    """Returns what all ranks must have alike in a call of torch.distributed, in words."""
    said, x = op.removesuffix("_lists"), next(tensors_in(arguments), None)
    if x is not None:
        size = f"{x.numel()} elements of " if said in _OF_EQUAL_SIZE else ""
        said = f"{said} of {size}{x.dtype} on {x.device.type}"
    for options in arguments:
        said += f", {options.reduceOp.op.name}" if hasattr(options, "reduceOp") else ""
        said += f", root {options.rootRank}" if hasattr(options, "rootRank") else ""
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
    group = getattr(op, "group", None)
    if not isinstance(group, GrapharProcessGroup):
        return op
    of_torch = group._torch.serving(op.tensor.device)
    return dist.P2POp(op.op, op.tensor, group=of_torch, tag=op.tag, group_peer=op.group_peer)


@functools.cache
def _serve_functional_ops() -> torch.library.Library:
    """Serves Inductor's bucketed all-gathers, for which torch calls no method of a group in Python."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for device in ("CPU", "CUDA"):
        library.impl("all_gather_into_tensor_out", _all_gather_into_tensor_out, device)
    return library


def _all_gather_into_tensor_out(x, group_size, group_name, *, out):
    # What torch's own kernel does, also for groups of other backends.
    group = c10d._resolve_process_group(group_name) if isinstance(group_name, str) else group_name
    work = group._allgather_base(out, x, AllgatherOptions())
    c10d_of_torch._register_work(out, work)
    return out

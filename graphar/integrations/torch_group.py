"""The process group of torch's own, with NCCL and gloo, that serves what graphar does not."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from graphar.errors import UnsupportedError


class TorchGroup:
    """The same ranks, by their numbers in the default group, in a process group of torch's own: NCCL and gloo.

    A backend is made at the first call that needs it, without meeting other ranks: calls between two ranks work while
    the others make none.
    """

    def __init__(self, store: Store, rank: int, ranks: list[int], name: str, timeout: timedelta) -> None:
        self._store, self._rank, self._ranks, self._name, self._timeout = store, rank, ranks, name, timeout
        self._made: set[str] = set()
        self.group = dist.ProcessGroup(store, rank, len(ranks))
        has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
        self.device_types = ("cpu", "cuda") if has_nccl else ("cpu",)
        backend = dist.Backend("cpu:gloo,cuda:nccl" if has_nccl else "cpu:gloo")
        # What torch.distributed is asked about the group of a communicator.
        world = c10d._world
        world.pg_map[self.group] = backend, store
        world.pg_group_ranks[self.group] = {process: place for place, process in enumerate(ranks)}
        world.pg_backend_config[self.group] = str(c10d.BackendConfig(backend))

    def serving(self, device: torch.device) -> dist.ProcessGroup:
        """Returns the group, with a backend for ``device``; UnsupportedError if torch has none.

        It is a RuntimeError, by which torch finds out whether a group has a backend for CUDA.
        """
        if device.type not in self.device_types:
            raise UnsupportedError(f"the process group {self._name} has no backend for {device.type} tensors")
        if device.type not in self._made:
            kind = dist.ProcessGroup.BackendType
            made = (kind.NCCL, self._nccl()) if device.type == "cuda" else (kind.GLOO, self._gloo())
            self.group._register_backend(torch.device(device.type), *made)
            self.group._set_group_name(self._name)  # torch keeps it in the backends
            self._made.add(device.type)
        return self.group

    def _gloo(self) -> dist.ProcessGroupGloo:
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=True)]  # connects two ranks at a time
        options._timeout = self._timeout
        return dist.ProcessGroupGloo(PrefixStore("graphar/gloo", self._store), self._rank, len(self._ranks), options)

    def _nccl(self) -> dist.ProcessGroupNCCL:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout, options.global_ranks_in_group = self._timeout, self._ranks
        options.group_name = f"{self._name}/graphar"
        store = PrefixStore("graphar/nccl", self._store)
        backend = dist.ProcessGroupNCCL(store, self._rank, len(self._ranks), options)
        backend._set_sequence_number_for_group()
        return backend

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._made:
            self.group.set_timeout(timeout)

    def end(self, how: str) -> None:
        """Ends the backends: ``how`` is "shutdown" or "abort"."""
        if self._made:
            getattr(self.group, how)()
        world = c10d._world
        for known in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
            known.pop(self.group, None)

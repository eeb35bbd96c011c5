"""The process group backend "graphar": torch.distributed's calls, with sums and all-gathers in graphar's kernels.

``dist.init_process_group("cpu:gloo,cuda:graphar")``, after ``import graphar``, needs no other change to a program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store

from graphar.errors import UnsupportedError
from graphar.integrations.process_group import GrapharProcessGroup
from graphar.integrations.routing import NAME, Routing
from graphar.integrations.untraced import untraced


def register() -> None:
    """Makes the backend known to torch.distributed."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(given: Any, backend_options: object) -> object:
    ranks = given.global_ranks_in_group or range(given.group_size)  # the default group has none
    form = GrapharBackend if torch.__version__ >= "2.14" else GrapharProcessGroup
    return form(given.store, given.group_rank, list(ranks), given.group_id, given.timeout)


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
        found = dist._Backend.Options(NAME, timeout=self._timeout)
        found.global_ranks_in_group, found.group_name = self._ranks, self._name
        return found

    def split(self, store: Store, ranks: Sequence[int], opts: dist._Backend.Options) -> GrapharBackend:
        """Returns the backend of a group of these of the group's ranks."""
        if self._rank not in ranks:  # for None, which says so, torch 2.15 reads a null pointer
            raise UnsupportedError(f"split_group: rank {self._rank} of {self._name} must be in one of the groups")
        processes = [self._ranks[one] for one in ranks]
        return GrapharBackend(store, list(ranks).index(self._rank), processes, opts.group_name, opts._timeout)

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Does nothing: ranks outside a new group need not take part."""

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Does nothing: connections are made when first needed."""

"""Where the ranks are, and so which process groups graphar's kernels can serve.

A rank compiles alone: others may take the same graph from a cache. What decides on a rewrite is therefore exchanged
once, when the pass is made, so that every rank decides alike.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from graphar.communicator import DEFAULT_TIMEOUT_S
from graphar.ranks.groups import device_of_process, process_group
from graphar.ranks.processes import host
from graphar.ranks.rendezvous import meet
from graphar.runtime.availability import missing_software
from graphar.runtime.catalogue import MAX_RANKS


@dataclass(frozen=True)
class Place:
    """Where one rank is.

    Attributes:
        host: its host.
        gpu: its GPU, or nothing.
        reaches: GPUs of its host to which that one has peer access.
        problem: why it cannot use kernels at all, or nothing.
    """

    host: str
    gpu: str
    reaches: list[str]
    problem: str


class Places:
    """Where every rank of the default group is. Making it is collective.

    Raises:
        ValueError: there is no default group.
        CommunicatorError: a rank did not come in time.
    """

    def __init__(self) -> None:
        self._world = process_group(None)
        mine = json.dumps(asdict(_find_place(self._world))).encode()
        words = meet(self._world, DEFAULT_TIMEOUT_S).exchange("graphar.compile_pass", mine)
        self._places = dict(zip(dist.get_process_group_ranks(self._world), map(_read, words), strict=True))

    def why_not(self, group: object, device: str) -> str:
        """Why graphar's ops are not to take the place of torch's collectives in ``group``, or nothing.

        The same on every rank of the group.

        Args:
            group: its name, as a graph has it.
            device: "cpu" or "cuda"; on the CPU the ops run over the group itself, wherever its ranks are.
        """
        try:
            ranks = dist.get_process_group_ranks(self.resolve(group))
        except (RuntimeError, TypeError, ValueError):
            return f"this process knows no group {group!r}"
        if not self._places.keys() >= set(ranks):
            return "the group was made after another default group"
        if len(ranks) == 1:
            return "one rank has nothing to exchange"
        if device == "cpu":
            return ""
        if device != "cuda":
            return f"graphar has no kernels for {device}"
        if len(ranks) > MAX_RANKS:
            return f"kernels serve at most {MAX_RANKS} ranks, not {len(ranks)}"
        return self._why_no_kernel(ranks)

    def resolve(self, group: object) -> dist.ProcessGroup:
        """The process group that a graph names."""
        return dist.distributed_c10d._resolve_process_group(group)

    def communicator_name(self, group: str) -> str:
        """What graphar's ops call it: "" is the default group, so that eager calls share its communicator."""
        return "" if self.resolve(group) is dist.group.WORLD else group

    def describe(self) -> str:
        """All that decisions rest on and that is not in a graph: this process's groups, and where their ranks are."""
        groups = {name: dist.get_process_group_ranks(group) for group, name in _group_names().items()}
        known = {name: (ranks, self.why_not(name, "cuda")) for name, ranks in sorted(groups.items())}
        return f"rank {dist.get_rank()} {known}"

    def _why_no_kernel(self, ranks: list[int]) -> str:
        places = {rank: self._places[rank] for rank in ranks}
        if problems := [f"rank {rank}: {place.problem}" for rank, place in places.items() if place.problem]:
            return problems[0]
        hosts = {place.host for place in places.values()}
        if len(hosts) > 1:
            return f"the ranks are on {len(hosts)} hosts"
        for rank, place in places.items():
            for peer, other in places.items():
                if rank != peer and other.gpu not in place.reaches:
                    return f"rank {rank} sees no peer access to the GPU of rank {peer}"
        return ""


def _read(word: bytes) -> Place:
    return Place(**json.loads(word))


def _find_place(group: dist.ProcessGroup) -> Place:
    device = device_of_process(group)
    if device.type != "cuda":
        return Place(host(), "", [], "this process uses no GPU")
    count = range(torch.cuda.device_count())
    reaches = [_gpu(i) for i in count if i != device.index and torch.cuda.can_device_access_peer(device.index, i)]
    return Place(host(), _gpu(device.index), reaches, missing_software())


def _gpu(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _group_names() -> dict[dist.ProcessGroup, str]:
    return dist.distributed_c10d._world.pg_names

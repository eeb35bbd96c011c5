"""Where the ranks are, which decides which process groups graphar's kernels can serve.

A rank compiles alone, since others may take the same graph from a cache. The facts that decide on rewrites are
therefore exchanged once, when the pass is made. With the same facts, every rank decides the same.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group as resolve

from graphar.errors import Reason
from graphar.graph.report import Refused, expect, why_refused
from graphar.plan.algorithms import MATMUL_ARCH
from graphar.plan.policy import Chip
from graphar.plan.scratch import MAX_RANKS
from graphar.plan.tables import DEFAULT, Table, shipped_table
from graphar.ranks.groups import device_of_process, process_group
from graphar.ranks.hosts import host, several_hosts
from graphar.ranks.rendezvous import meet
from graphar.runtime import launcher
from graphar.runtime.availability import concurrent_communicators, may_share_gpu, missing_software
from graphar.runtime.registry import DEFAULT_TIMEOUT_S
from graphar.runtime.user_tables import find_table


@dataclass(frozen=True)
class Place:
    """Where one rank is."""

    host: str  # an identifier of its host
    gpu: str  # the UUID of its GPU; an empty string without one
    reaches: list[str]  # the UUIDs of the GPUs that its GPU has peer access to, and its own if ranks may share it
    problem: Reason | None  # why the rank cannot use kernels
    sms: int = 0  # the streaming multiprocessors of its GPU; 0 without one
    arch: str = ""  # the architecture of its GPU, as in plan.policy.Chip; an empty string without one
    communicators: int = 2  # the communicators that may have kernels on its GPU at the same time


class Places:
    """Where every rank of the default group is. Making one is collective.

    Attributes:
        world: the name of the default group.
        count: the number of its ranks.
        table: the tuning table of rank 0.
        chip: the table's chip, with the fewest streaming multiprocessors of any rank's GPU, and the most communicators.
    """

    def __init__(self) -> None:
        world = process_group(None)
        self.world = world.group_name
        rank, place = dist.get_rank(), _find_place(world)
        # Rank 0's table, as in a communicator; without a GPU the default table.
        table = find_table(torch.cuda.get_device_name()).to_json() if rank == 0 and place.gpu else ""
        mine = json.dumps({"place": asdict(place), "table": table}).encode()
        words = meet(world, DEFAULT_TIMEOUT_S).exchange("graphar.compile_pass", mine)
        everyone = [json.loads(word) for word in words]
        ranks = dist.get_process_group_ranks(world)
        self.count = len(ranks)
        self._places = {rank: Place(**facts["place"]) for rank, facts in zip(ranks, everyone, strict=True)}
        table = everyone[0]["table"]
        self.table = Table.from_json(table) if table else shipped_table(DEFAULT)
        with_gpu = [place for place in self._places.values() if place.sms]
        chips = [replace(self.table.chip, sms=place.sms, communicators=place.communicators) for place in with_gpu]
        self.chip = Chip.in_common(chips or [self.table.chip])

    def check(self, group: Any, device: str) -> None:
        """Raises Refused unless graphar's ops can replace torch's collectives in ``group``.

        It does so on every rank of the group, or on none. ``group`` is its name, as a graph has it; ``device`` is "cpu"
        or "cuda". On the CPU the ops run over the group itself, so its ranks may be anywhere.
        """
        try:
            ranks = dist.get_process_group_ranks(resolve(group))
        except (RuntimeError, TypeError, ValueError):
            raise Refused(f"this process knows no group {group!r}") from None
        expect(self._places.keys() >= set(ranks), "the group was made after another default group")
        expect(len(ranks) > 1, "one rank has nothing to exchange")
        if device == "cpu":
            return
        expect(device == "cuda", f"graphar has no kernels for {device}")
        expect(len(ranks) <= MAX_RANKS, f"kernels serve at most {MAX_RANKS} ranks, not {len(ranks)}")
        places = {rank: self._places[rank] for rank in ranks}
        for rank, place in places.items():
            expect(not place.problem, f"rank {rank}: {place.problem}")
        if problem := several_hosts(place.host for place in places.values()):
            raise Refused(problem)
        for (rank, place), (peer, other) in itertools.permutations(places.items(), 2):
            expect(other.gpu in place.reaches, f"rank {rank} sees no peer access to the GPU of rank {peer}")

    def check_matmul(self, group: Any) -> None:
        """Raises Refused unless all GPUs of ``group`` have graphar's matmul."""
        for rank in dist.get_process_group_ranks(resolve(group)):
            expect(self._places[rank].arch == MATMUL_ARCH, f"rank {rank} has no GPU of {MATMUL_ARCH}")

    def describe(self) -> str:
        """Returns, as text, every fact outside a graph that decides on rewrites: groups, ranks, GPUs and the table."""
        names = dist.distributed_c10d._world.pg_names
        groups = {name: dist.get_process_group_ranks(group) for group, name in names.items()}
        known = {name: (ranks, why_refused(self.check, name, "cuda")) for name, ranks in sorted(groups.items())}
        archs = [place.arch for place in self._places.values()]
        return f"rank {dist.get_rank()} {known} {self.chip} {archs} {self.table}"


def _find_place(group: dist.ProcessGroup) -> Place:
    device = device_of_process(group)
    if device.type != "cuda":
        return Place(host(), "", [], "this process uses no GPU")
    index, gpus = device.index, [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    peers = [index] if may_share_gpu() else []  # torch denies a GPU peer access to itself
    peers += [i for i in range(len(gpus)) if i != index and torch.cuda.can_device_access_peer(index, i)]
    reaches = [str(gpus[i].uuid) for i in peers]
    problem = missing_software()
    arch = "" if problem else launcher.architecture(index)
    sms, communicators = gpus[index].multi_processor_count, concurrent_communicators()
    return Place(host(), str(gpus[index].uuid), reaches, problem, sms, arch, communicators)

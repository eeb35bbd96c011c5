"""Makes the runner of a communicator, where graphar's kernels reach all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from graphar.plan.tables import Table, find_table
from graphar.ranks.rendezvous import Alone, StoreRendezvous
from graphar.runtime.peer_memory import LocalMemory, ProcessMemory
from graphar.runtime.runner import Member, Runner
from graphar.runtime.torch_memory import TorchMemory


def set_up(
    group: dist.ProcessGroup | None,
    devices: Sequence[torch.device] | None,
    device: torch.device,
    rendezvous: StoreRendezvous | Alone,
    stand_in: bool,
) -> tuple[Runner, Table]:
    """Collective: the kernels of a communicator, and the table that calls go by.

    Args:
        group: the processes that are its ranks, or None.
        devices: the ranks of this process, where there is no group.
        device: this process's; the first where it has several.
        rendezvous: where the processes meet.
        stand_in: whether the multimem algorithms have ordinary accesses in place of multimem instructions, for tests.

    Raises:
        UnsupportedError: on every rank, where the kernels cannot reach all ranks.
        CommunicatorError: a rank did not come in time.
    """
    if devices:
        ranks = {rank: one.index for rank, one in enumerate(devices)}
        memory = LocalMemory(list(ranks.values()))
    else:
        ranks = {group.rank(): device.index}
        memory = ProcessMemory(device.index, rendezvous)
    memory.check()

    def prepare() -> tuple[list[Member], str]:
        # Rank 0's table everywhere: ranks that read different ones would wait for each other in different kernels.
        own = find_table(torch.cuda.get_device_name(device)).to_json() if rendezvous.rank == 0 else ""
        return [Member(rank, index) for rank, index in ranks.items()], own

    members, own = rendezvous.agree("preparing the GPUs", prepare)
    table = Table.from_json(rendezvous.exchange("reading the tuning table", own.encode())[0])
    multicast = None if stand_in else TorchMemory(group, device.index, rendezvous)
    world_size = len(devices) if devices else group.size()
    return Runner(members, world_size, memory, rendezvous, multicast), table

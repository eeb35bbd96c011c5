"""Makes the runner of an engine, if graphar's kernels reach all of its ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from graphar.errors import CommunicatorError
from graphar.plan.policy import Chip
from graphar.plan.tables import Table
from graphar.ranks.rendezvous import Alone, StoreRendezvous
from graphar.runtime import launcher
from graphar.runtime.multicast_memory import TorchMemory
from graphar.runtime.peer_memory import LocalMemory, ProcessMemory
from graphar.runtime.runner import Member, Runner
from graphar.runtime.user_tables import find_table


def set_up(
    group: dist.ProcessGroup | None,
    devices: Sequence[torch.device] | None,
    device: torch.device,
    rendezvous: StoreRendezvous | Alone,
    lossless: bool,
    stand_in: bool,
) -> tuple[Runner, Table]:
    """Returns the runner of an engine, and the tuning table of its calls. Collective.

    Args:
        group: the process group whose processes are the ranks; None with ``devices``.
        devices: the devices of this process's ranks; None with ``group``.
        device: this process's device, or the first of ``devices``.
        lossless: whether "auto" may compress bf16 without loss.
        stand_in: for tests: whether multimem kernels use ordinary accesses in place of multimem instructions.

    Raises:
        UnsupportedError: on every rank, if the kernels cannot reach all ranks.
        CommunicatorError: a rank did not arrive in time, or on every rank, if they differ in ``lossless``.
    """
    _agree_on_lossless(rendezvous, lossless)
    if devices:
        ranks = {rank: one.index for rank, one in enumerate(devices)}
        memory = LocalMemory(list(ranks.values()))
    else:
        ranks = {group.rank(): device.index}
        memory = ProcessMemory(device.index, rendezvous)
    memory.check()

    def prepare() -> tuple[list[Member], dict]:
        # All ranks use rank 0's table: with different tables they would wait for each other in different kernels.
        table = find_table(torch.cuda.get_device_name(device)).to_json() if rendezvous.rank == 0 else ""
        chip = Chip.in_common(launcher.chip(index) for index in ranks.values())
        return [Member(rank, index) for rank, index in ranks.items()], {"table": table, "chip": asdict(chip)}

    members, own = rendezvous.agree("preparing the GPUs", prepare)
    words = rendezvous.exchange("reading the tuning table", json.dumps(own).encode())
    everyone = [json.loads(word) for word in words]
    chip = Chip.in_common(Chip(**one["chip"]) for one in everyone)
    multicast = None if stand_in else TorchMemory(group, device.index, rendezvous)
    world_size = len(devices) if devices else group.size()
    runner = Runner(members, world_size, chip, memory, rendezvous, multicast)
    return runner, Table.from_json(everyone[0]["table"])


def _agree_on_lossless(rendezvous: StoreRendezvous | Alone, lossless: bool) -> None:
    """Raises CommunicatorError on every rank if they differ: they would wait for each other in different kernels."""
    words = rendezvous.exchange("agreeing on lossless compression", b"on" if lossless else b"off")
    if len(set(words)) > 1:
        raise CommunicatorError(
            "lossless compression must be on or off on all ranks (Communicator(lossless=...), GRAPHAR_LOSSLESS), got\n"
            + "\n".join(f"rank {rank}: {word.decode()}" for rank, word in enumerate(words))
        )

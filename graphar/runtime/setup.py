"""Makes the runner of an engine, if graphar's kernels reach all of its ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from graphar.errors import CommunicatorError
from graphar.plan.policy import Chip
from graphar.plan.tables import Table
from graphar.ranks.groups import known_group
from graphar.ranks.rendezvous import Alone, StoreRendezvous
from graphar.runtime import launcher
from graphar.runtime.availability import COMMUNICATORS
from graphar.runtime.memory.multicast import TorchMemory
from graphar.runtime.memory.peer_memory import LocalMemory, ProcessMemory
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

    ``device`` is this process's, or the first of ``devices``. With ``stand_in``, for tests, multimem kernels use
    ordinary accesses in place of multimem instructions.

    Raises:
        UnsupportedError: on every rank, if the kernels cannot reach all ranks.
        CommunicatorError: a rank did not arrive in time, or on every rank, if they differ in ``lossless`` or in how
            many communicators they declare.
        ValueError: they declare no number of communicators for which their GPUs have room.
    """
    # With different settings they would wait for each other in different kernels.
    _agree_on(
        rendezvous,
        "lossless compression",
        "on" if lossless else "off",
        "lossless compression must be on or off on all ranks (Communicator(lossless=...), GRAPHAR_LOSSLESS)",
    )
    declared, rule = os.environ.get(COMMUNICATORS) or "2", f"{COMMUNICATORS} must be the same on all ranks"
    _agree_on(rendezvous, "concurrent communicators", declared, rule)
    if devices:
        ranks = {rank: gpu.index for rank, gpu in enumerate(devices)}
        memory = LocalMemory(list(ranks.values()))
    else:
        ranks = {known_group(group).rank(): device.index}
        memory = ProcessMemory(device.index, rendezvous)
    memory.check()

    def prepare() -> tuple[list[Member], dict]:
        # All ranks use rank 0's table: with different tables they would wait for each other in different kernels.
        table = find_table(torch.cuda.get_device_name(device)).to_json() if rendezvous.rank == 0 else ""
        chip = Chip.in_common(launcher.chip(index) for index in ranks.values())
        if chip.communicators > chip.most_communicators:
            most = f"{chip.sms} SMs have room for the kernels of at most {chip.most_communicators} communicators"
            raise ValueError(f"{COMMUNICATORS} is {chip.communicators}, but {most}")
        return [Member(rank, index) for rank, index in ranks.items()], {"table": table, "chip": asdict(chip)}

    members, facts = rendezvous.agree("preparing the GPUs", prepare)
    words = rendezvous.exchange("reading the tuning table", json.dumps(facts).encode())
    everyone = [json.loads(word) for word in words]
    chip = Chip.in_common(Chip(**facts["chip"]) for facts in everyone)
    multicast = None if stand_in else TorchMemory(group, device.index, rendezvous)
    world_size = len(devices) if devices else known_group(group).size()
    runner = Runner(members, world_size, chip, memory, rendezvous, multicast)
    return runner, Table.from_json(everyone[0]["table"])


def _agree_on(rendezvous: StoreRendezvous | Alone, what: str, setting: str, rule: str) -> None:
    """Raises CommunicatorError on every rank if ranks differ in a setting; ``setting`` is this rank's."""
    words = rendezvous.exchange(f"agreeing on {what}", setting.encode())
    if len(set(words)) > 1:
        of_ranks = [f"rank {rank}: {word.decode()}" for rank, word in enumerate(words)]
        raise CommunicatorError("\n".join([f"{rule}, got", *of_ranks]))

"""The algorithms, what each can serve, and which one a call takes."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

from graphar.kernels import MAX_BLOCKS, MAX_RANKS

PACK_NBYTES = 16
MIB = 1 << 20


class Algorithm(StrEnum):
    """How an all-reduce is done. Every one of them gives the same bits."""

    ONE_SHOT_PUSH = "one_shot_push"
    ONE_SHOT = "one_shot"
    TWO_SHOT_PUSH = "two_shot_push"
    TWO_SHOT_PIPELINED = "two_shot_pipelined"
    FALLBACK = "fallback"

    @property
    def index(self) -> int:
        """The number a kernel writes into its record."""
        return list(Algorithm).index(self)


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched.

    Attributes:
        algorithm: which kernel.
        blocks: thread blocks in the grid.
        threads: threads in a block.
        chunk: packs a block sends one owner in one step; 0 where the algorithm has no chunks.
    """

    algorithm: Algorithm
    blocks: int
    threads: int
    chunk: int = 0


@dataclass(frozen=True)
class Scratch:
    """What an algorithm needs on every rank.

    Attributes:
        capacity: packs in one slot.
        nbytes: the size of all slots, and of the signal pad before them.
        fill: the byte the slots hold before the first call.
    """

    capacity: int
    nbytes: int
    fill: int


SIGNAL_PAD_NBYTES = MAX_BLOCKS * MAX_RANKS * 4
PIPELINE_DEPTH = 3  # `depth` in two_shot_pipelined.cu
PIPELINE_CHUNK = 1024
PIPELINE_BLOCKS = 132


def largest_nbytes(algorithm: Algorithm, world_size: int) -> int | None:
    """The largest tensor an algorithm's scratch can take, in bytes; None: any."""
    match algorithm:
        case Algorithm.ONE_SHOT_PUSH:
            return 4 * MIB if world_size == 2 else 1 * MIB
        case Algorithm.ONE_SHOT:
            return 8 * MIB
        case Algorithm.TWO_SHOT_PUSH:
            return 16 * MIB
        case _:
            return None


def scratch(algorithm: Algorithm, world_size: int) -> Scratch:
    """What ``algorithm`` needs on every rank; the layouts are drawn in the kernels' files."""
    largest = largest_nbytes(algorithm, world_size)
    packs = -(-largest // PACK_NBYTES) if largest else 0
    match algorithm:
        case Algorithm.ONE_SHOT_PUSH:
            return Scratch(packs, 2 * world_size * packs * PACK_NBYTES, fill=0xFF)
        case Algorithm.ONE_SHOT:
            return Scratch(packs, SIGNAL_PAD_NBYTES + 2 * packs * PACK_NBYTES, fill=0)
        case Algorithm.TWO_SHOT_PUSH:
            shard = -(-packs // world_size)
            return Scratch(shard, 4 * world_size * shard * PACK_NBYTES, fill=0xFF)
        case Algorithm.TWO_SHOT_PIPELINED:
            slots = 2 * PIPELINE_DEPTH * PIPELINE_BLOCKS * world_size
            return Scratch(PIPELINE_CHUNK, SIGNAL_PAD_NBYTES + slots * PIPELINE_CHUNK * PACK_NBYTES, fill=0)
    raise AssertionError(algorithm)


@functools.cache
def tuning_table(name: str) -> dict:
    """A table of graphar/tuning, as data."""
    return json.loads(resources.files("graphar").joinpath("tuning", f"{name}.json").read_text())


@functools.cache
def table_name(device_name: str) -> str:
    """The table for a device: its own where it was measured, else ``default``."""
    name = device_name.lower().replace(" ", "_")
    return name if resources.files("graphar").joinpath("tuning", f"{name}.json").is_file() else "default"


def choose(device_name: str, world_size: int, nbytes: int, algorithm: Algorithm | None = None) -> tuple[Shape, str]:
    """The measured shape for a call, or the nearest measured one of a given ``algorithm``, and the table's name.

    Args:
        device_name: as torch.cuda.get_device_name gives it.
        world_size: ranks, 2 to 8.
        nbytes: the size of one rank's tensor, in bytes.
        algorithm: only this one; the caller has checked that it serves ``nbytes``.
    """
    table = table_name(device_name)
    if str(world_size) not in tuning_table(table)["rows"]:
        table = "default"
    rows = tuning_table(table)["rows"][str(world_size)]
    if algorithm is not None:
        rows = [row for row in rows if row["algorithm"] == algorithm.value] or [GENERIC_ROW | {"algorithm": algorithm}]
    fitting = [row for row in rows if row["max_nbytes"] is None or nbytes <= row["max_nbytes"]]
    return _shape(fitting[0] if fitting else rows[-1], world_size, nbytes), table


GENERIC_ROW = {"max_nbytes": None, "blocks": 128, "threads": 256, "chunk": 512}


def _shape(row: dict, world_size: int, nbytes: int) -> Shape:
    algorithm = Algorithm(row["algorithm"])
    packs = -(-nbytes // PACK_NBYTES)
    if algorithm is Algorithm.TWO_SHOT_PUSH:
        packs = -(-packs // world_size)  # a thread handles its pack of every shard
    blocks = max(1, min(row["blocks"], -(-packs // row["threads"])))
    return Shape(algorithm, blocks, row["threads"], row.get("chunk", 0))

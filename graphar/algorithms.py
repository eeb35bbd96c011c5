"""The algorithms, and what each needs and can serve."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

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
        direct: whether it is the kernel's direct variant, for symmetric tensors.
    """

    algorithm: Algorithm
    blocks: int
    threads: int
    chunk: int = 0
    direct: bool = False


@dataclass(frozen=True)
class Scratch:
    """What an algorithm needs on every rank.

    Attributes:
        capacity: packs in one slot.
        nbytes: the size of all slots, and of the signal pad before them.
        fill: the byte the slots hold before the first call.
        shared_nbytes: dynamic shared memory of each thread block.
    """

    capacity: int
    nbytes: int
    fill: int
    shared_nbytes: int = 0


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

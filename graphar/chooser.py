"""Which algorithm a call takes: measured tables, as data."""

from __future__ import annotations

import functools
import json
from importlib import resources

from graphar.algorithms import (
    ALLGATHER_BLOCKS,
    ALLGATHER_CHUNK,
    PACK_NBYTES,
    TMA_CHANNELS,
    TMA_THREADS,
    Algorithm,
    Shape,
    packs_a_part,
    scratch,
)

WARP = 32


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
        rows = [row for row in rows if row["algorithm"] == algorithm.value] or [_generic_row(algorithm, world_size)]
    fitting = [row for row in rows if row["max_nbytes"] is None or nbytes <= row["max_nbytes"]]
    return _shape(fitting[0] if fitting else rows[-1], world_size, nbytes), table


def _generic_row(algorithm: Algorithm, world_size: int) -> dict:
    """For what the tables never choose by themselves."""
    row = {"algorithm": algorithm, "max_nbytes": None}
    if algorithm is Algorithm.TWO_SHOT_TMA:
        return row | {"blocks": 16, "threads": TMA_THREADS, "chunk": scratch(algorithm, world_size).capacity}
    return row | {"blocks": 128, "threads": 256, "chunk": 512}


# For ops with one algorithm, by the size of the largest part; like the shapes measured for two_shot_push on H200s.
PART_ROWS = {
    Algorithm.REDUCESCATTER_PUSH: (
        {"max_nbytes": 131072, "blocks": 128, "threads": 128},
        {"max_nbytes": 524288, "blocks": 128, "threads": 256},
        {"max_nbytes": None, "blocks": 132, "threads": 512},
    ),
    Algorithm.ALLGATHER_PUSH: (
        {"max_nbytes": 262144, "blocks": ALLGATHER_BLOCKS, "threads": 128, "chunk": 128},
        {"max_nbytes": 524288, "blocks": ALLGATHER_BLOCKS, "threads": 256, "chunk": 256},
        {"max_nbytes": None, "blocks": ALLGATHER_BLOCKS, "threads": 512, "chunk": ALLGATHER_CHUNK},
    ),
}


def choose_for_parts(algorithm: Algorithm, nbytes: int) -> Shape:
    """The shape for a call of one of ``PART_ROWS`` whose largest part has ``nbytes`` bytes."""
    rows = PART_ROWS[algorithm]
    row = next(row for row in rows if row["max_nbytes"] is None or nbytes <= row["max_nbytes"])
    return _shape(row | {"algorithm": algorithm}, 1, nbytes)


def _shape(row: dict, world_size: int, nbytes: int) -> Shape:
    algorithm = Algorithm(row["algorithm"])
    packs, threads, chunk = -(-nbytes // PACK_NBYTES), row["threads"], row.get("chunk", 0)
    match algorithm:
        case Algorithm.TWO_SHOT_PUSH:  # a block has a group of whole warps for every owner
            width = max(1, threads // (WARP * world_size)) * WARP
            packs, in_block, threads = packs_a_part(packs, world_size), width, width * world_size
        case Algorithm.MULTIMEM_TWO_SHOT:
            in_block = threads * world_size  # a thread handles its pack of every shard
        case Algorithm.TWO_SHOT_TMA:
            in_block = TMA_CHANNELS * chunk * world_size
        case _:
            in_block = threads
    blocks = max(1, min(row["blocks"], -(-packs // in_block)))
    return Shape(algorithm, blocks, threads, chunk)

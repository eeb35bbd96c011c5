"""Which algorithm a call takes: measured tables, as data."""

from __future__ import annotations

import functools
import json
from importlib import resources

from graphar.algorithms import PACK_NBYTES, Algorithm, Shape


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
    if algorithm in (Algorithm.TWO_SHOT_PUSH, Algorithm.MULTIMEM_TWO_SHOT):
        packs = -(-packs // world_size)  # a thread handles its pack of every shard
    blocks = max(1, min(row["blocks"], -(-packs // row["threads"])))
    return Shape(algorithm, blocks, row["threads"], row.get("chunk", 0))

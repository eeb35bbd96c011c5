"""Entries of a tuning table and its measured points: the configuration that a call takes, and its expected time."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.plan.algorithms import Algorithm, is_loaded
from graphar.plan.config import Config
from graphar.plan.scratch import PACK_NBYTES, WARP
from graphar.plan.tables import DEFAULT, Table, shipped_table


def config_of(entry: dict) -> Config:
    """Returns the configuration that an entry names, with the most blocks that a call may have."""
    return Config(Algorithm(entry["algorithm"]), entry["blocks"], entry["threads"], entry.get("chunk", 0))


def entry_of(config: Config, max_nbytes: int | None) -> dict:
    """Returns the entry by which calls of up to ``max_nbytes`` take ``config``; None: of any size."""
    grid = {"blocks": config.blocks, "threads": config.threads} | ({"chunk": config.chunk} if config.chunk else {})
    return {"max_nbytes": max_nbytes, "algorithm": config.algorithm.value} | grid


def fitted(most: Config, world_size: int, nbytes: int) -> Config:
    """Returns a configuration for ``nbytes``, with as many of its blocks as have work, or one more."""
    row, threads = most.algorithm.row, most.threads
    if row.in_groups:
        threads = max(1, threads // (WARP * world_size)) * WARP * world_size
    packs, in_block = -(-nbytes // PACK_NBYTES), row.packs_a_block(world_size, threads, most.chunk)
    blocks = max(1, -(-packs // in_block)) + row.tells
    return replace(most, blocks=min(most.blocks, blocks), threads=threads)


def by_entries(entries: Sequence[dict], world_size: int, nbytes: int, algorithm: Algorithm | None = None) -> Config:
    """Returns the configuration of a call of ``nbytes``, by its first entry that fits.

    With ``algorithm`` the configuration has this algorithm: by its first entry that fits, else by its last entry, or
    with its default grid if it has no entry. Entries of algorithms that are not loaded are passed over. Entries of
    parts serve every world size: theirs is 1.
    """
    known = [entry for entry in entries if entry["algorithm"] == algorithm.value] if algorithm else loaded(entries)
    if algorithm is not None and not known:
        return fitted(Config(algorithm, *algorithm.row.default_grid(world_size, nbytes)[:3]), world_size, nbytes)
    return fitted(config_of(next(_fitting(known, nbytes), known[-1])), world_size, nbytes)


def loaded(entries: Sequence[dict]) -> list[dict]:
    """Returns the entries without those of algorithms from outside the package that this process has not loaded."""
    return [entry for entry in entries if is_loaded(entry["algorithm"])]


def named_by(entries: Sequence[dict], nbytes: int) -> str:
    """Returns the algorithm by which a call of ``nbytes`` goes, or would go if it were loaded."""
    return next(_fitting(entries, nbytes))["algorithm"]


def _fitting(entries: Sequence[dict], nbytes: int) -> Iterator[dict]:
    return (entry for entry in entries if entry["max_nbytes"] is None or nbytes <= entry["max_nbytes"])


def serving(table: Table, world_size: int) -> Table:
    """Returns ``table``, or the default table if it has no entries for ``world_size``."""
    return table if world_size in table.rows else shipped_table(DEFAULT)


def measured_config(
    table: Table, world_size: int, nbytes: int, algorithm: Algorithm | None = None
) -> tuple[Config, str]:
    """Returns the configuration of an exact all-reduce of ``nbytes`` a rank, and the name of the table that has it.

    With ``algorithm`` it is the measured configuration of this algorithm nearest to ``nbytes``, which it can
    serve. Without entries for ``world_size`` in the table, the default table is used.
    """
    table = serving(table, world_size)
    return by_entries(table.rows[world_size], world_size, nbytes, algorithm), table.name


# ---- expected times --------------------------------------------------------------------------------------------------


def expected_us(table: Table, world_size: int, nbytes: int) -> float | None:
    """Returns the expected microseconds of the exact all-reduce that the table chooses; None without measurements."""
    return _between(serving(table, world_size).measured.get(world_size, []), nbytes)


def expected_quantized_us(table: Table, codec: Codec, world_size: int, numel: int) -> float | None:
    """Returns the expected microseconds of an all-reduce of ``numel`` elements with ``codec``.

    The estimate goes by the measured codec with the nearest bits per element, among codecs that use the same kernels.
    None if no such codec was measured.
    """
    measured = serving(table, world_size).codecs.get(world_size, {}).items()
    codecs = [(codec_of_text(text), points) for text, points in measured]
    alike = [(other, points) for other, points in codecs if other.spares_a_word == codec.spares_a_word]
    if not alike:
        return None
    _, points = min(alike, key=lambda pair: abs(pair[0].bits_per_element - codec.bits_per_element))
    return _between(points, numel * torch.bfloat16.itemsize)


def _between(points: list[list], nbytes: int) -> float | None:
    """Returns the time for a size, by a power law between the two nearest measured sizes.

    Smaller sizes take the time of the smallest. Larger sizes take the bytes per microsecond of the largest.
    """
    if not points:
        return None
    at = bisect_left(points, nbytes, key=lambda point: point[0])
    if at == 0:
        return points[0][1]
    (low, low_us), (high, high_us) = points[at - 1], points[min(at, len(points) - 1)]
    if at == len(points):
        return high_us * nbytes / high
    return low_us * (nbytes / low) ** (math.log(high_us / low_us) / math.log(high / low))

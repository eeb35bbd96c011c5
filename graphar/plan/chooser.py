"""Which algorithm a call takes: measured tables, as data."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import replace

import torch

from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.norms import RmsNorm
from graphar.plan.algorithms import (
    LOSSLESS_CHUNK,
    PACK_NBYTES,
    TMA_CHANNELS,
    TMA_THREADS,
    WARP,
    Algorithm,
    Shape,
    largest_nbytes,
    packs_a_part,
    scratch,
)
from graphar.plan.tables import DEFAULT, Table, shipped_table
from graphar.runtime.arguments import MAX_BLOCKS
from graphar.runtime.catalogue import CLUSTERS


def choose(table: Table, world_size: int, nbytes: int, algorithm: Algorithm | None = None) -> tuple[Shape, str]:
    """The measured shape for a call, or the nearest measured one of a given ``algorithm``, and the used table's name.

    Args:
        table: the communicator's; where it has no rows for ``world_size``, the default table serves.
        world_size: ranks, 2 to 8.
        nbytes: the size of one rank's tensor, in bytes.
        algorithm: only this one; the caller has checked that it serves ``nbytes``.
    """
    table = serving(table, world_size)
    rows = table.rows[world_size]
    if algorithm is not None:
        rows = [row for row in rows if row["algorithm"] == algorithm.value] or [_generic_row(algorithm, world_size)]
    fitting = [row for row in rows if row["max_nbytes"] is None or nbytes <= row["max_nbytes"]]
    return shape_of(fitting[0] if fitting else rows[-1], world_size, nbytes), table.name


def expected_us(table: Table, world_size: int, nbytes: int) -> float | None:
    """How long what ``choose`` gives takes, in microseconds; None: unmeasured."""
    return _between(serving(table, world_size).measured.get(world_size, []), nbytes)


def expected_quantized_us(table: Table, codec: Codec, world_size: int, numel: int) -> float | None:
    """How long what ``choose_quantized`` gives takes, in microseconds; None: unmeasured.

    Goes by that measured codec whose elements cost nearest as many bits, of those that take the same kernels.
    """
    measured = serving(table, world_size).codecs.get(world_size, {}).items()
    codecs = [(codec_of_text(text), points) for text, points in measured]
    alike = [(one, points) for one, points in codecs if one.spares_a_word == codec.spares_a_word]
    if not alike:
        return None
    _, points = min(alike, key=lambda pair: abs(pair[0].bits_per_element - codec.bits_per_element))
    return _between(points, numel * torch.bfloat16.itemsize)


def _between(points: list[list], nbytes: int) -> float | None:
    """The time for a size from those measured, by a power law between two of them.

    Below the smallest measured size its time stands; beyond the largest, its bytes a microsecond.
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


def serving(table: Table, world_size: int) -> Table:
    """``table``, or the default one where it has no rows for ``world_size``."""
    return table if world_size in table.rows else shipped_table(DEFAULT)


def _generic_row(algorithm: Algorithm, world_size: int) -> dict:
    """For what the tables never choose by themselves."""
    row = {"algorithm": algorithm, "max_nbytes": None}
    if algorithm is Algorithm.TWO_SHOT_TMA:
        return row | {"blocks": 16, "threads": TMA_THREADS, "chunk": scratch(algorithm, world_size).capacity}
    if algorithm is Algorithm.TWO_SHOT_LOSSLESS:
        return row | {"blocks": 132, "threads": 512, "chunk": LOSSLESS_CHUNK}
    return row | {"blocks": 128, "threads": 256, "chunk": 512}


# For the ops whose whole consists of parts, by the size of the largest one; measured on 2 and 4 H200s.
PART_ROWS = {
    "reducescatter": (
        {"max_nbytes": 131072, "algorithm": Algorithm.REDUCESCATTER_PUSH, "blocks": 132, "threads": 128},
        {"max_nbytes": 524288, "algorithm": Algorithm.REDUCESCATTER_PUSH, "blocks": 132, "threads": 256},
        {"max_nbytes": 2097152, "algorithm": Algorithm.REDUCESCATTER_PUSH, "blocks": 132, "threads": 512},
        {"max_nbytes": None, "algorithm": Algorithm.REDUCESCATTER_PUSH, "blocks": 132, "threads": 1024},
    ),
    "allgather": (
        {"max_nbytes": 262144, "algorithm": Algorithm.ALLGATHER_FLAGGED, "blocks": 132, "threads": 128},
        {"max_nbytes": 524288, "algorithm": Algorithm.ALLGATHER_PUSH, "blocks": 132, "threads": 512, "chunk": 512},
        {"max_nbytes": 2097152, "algorithm": Algorithm.ALLGATHER_PUSH, "blocks": 132, "threads": 1024, "chunk": 1024},
        {"max_nbytes": None, "algorithm": Algorithm.ALLGATHER_PUSH, "blocks": 132, "threads": 1024, "chunk": 2048},
    ),
}


_SMS = 132  # of the machines measured: more blocks would wait for others to end, unless two fit on an SM
_PUSH_WARPS = 16  # in a block of quantized_two_shot_push, by its launch bounds
_PAIRED_WARPS = 8  # in a block that leaves room for a second one on its SM, by the registers it takes
_PIPELINED_TILES = 8  # of a chunk: fewer cost waits, more fill no link better
_MANY_TILES = 1 << 13  # of an owner, from which on two small blocks on an SM are better than a large one
_NORM_SENT_NBYTES = 384 << 10  # by a rank in a norm, up to which one hop that sends more is faster than two, on 4 H200s
_SCATTER_WARPS = 16  # in a block of quantized_reducescatter, by its launch bounds


def choose_quantized(
    codec: Codec, world_size: int, numel: int, itemsize: int, algorithm: Algorithm | None = None
) -> Shape:
    """The shape of an all-reduce with ``codec`` on the wire, of ``numel`` elements; measured on 4 H200s.

    Args:
        algorithm: only this one; the caller has checked that it serves the call.
    """
    push, pipelined = Algorithm.QUANTIZED_TWO_SHOT_PUSH, Algorithm.QUANTIZED_TWO_SHOT_PIPELINED
    if algorithm is None:
        algorithm = pipelined if why_not_quantized(push, codec, world_size, numel * itemsize) else push
    tiles = -(-codec.tiles(numel) // world_size)  # of one owner
    if algorithm is pipelined:
        chunk = min(scratch(algorithm, world_size).capacity * PACK_NBYTES // codec.tile_nbytes, _PIPELINED_TILES, tiles)
        blocks, threads = (MAX_BLOCKS, 256) if tiles > _MANY_TILES else (_SMS, 512)
        return Shape(algorithm, min(blocks, -(-tiles // chunk)), threads, chunk, codec=codec)
    blocks, width = MAX_BLOCKS, -(-tiles // MAX_BLOCKS)  # warps for an owner: few, so that all SMs have some
    if width * world_size > _PAIRED_WARPS:
        blocks, width = _SMS, min(-(-tiles // _SMS), _PUSH_WARPS // world_size)
    return Shape(algorithm, min(blocks, -(-tiles // width)), WARP * width * world_size, codec=codec)


def choose_quantized_scatter(codec: Codec, world_size: int, numel: int) -> Shape:
    """The shape of a reduce-scatter with ``codec`` on the wire, whose largest part has ``numel`` elements.

    Not measured yet. All SMs have something to do before one has much. A block takes some four steps, so that it codes
    one chunk while another travels, and each step has something for all of its warps.
    """
    algorithm, tiles = Algorithm.QUANTIZED_REDUCESCATTER, codec.tiles(numel)
    blocks = min(_SMS, tiles)
    share = -(-tiles // blocks)  # tiles of every part that a block handles
    warps = min(_SCATTER_WARPS, world_size * share)
    largest = scratch(algorithm, world_size).capacity * PACK_NBYTES // codec.tile_nbytes
    chunk = min(largest, max(-(-share // 4), -(-warps // world_size)))
    return Shape(algorithm, blocks, WARP * warps, chunk, codec=codec)


def choose_norm(world_size: int, x: torch.Tensor, norm: RmsNorm, has_clusters: bool) -> Shape:
    """The shape of an all-reduce with residual and ``norm``, of rows whose number norm_rows allows.

    As many blocks share a row, whatever ``norm`` says, as leave none without an SM, and have two warps each.
    """
    rows, nbytes = x.numel() // norm.columns, x.numel() * x.element_size()
    packs = norm.columns * x.element_size() // PACK_NBYTES
    threads = min(1024, max(WARP, 1 << (packs - 1).bit_length()))
    fitting = [one for one in CLUSTERS if rows * one <= _SMS and threads // one >= 2 * WARP] if has_clusters else []
    cluster = max([1, *fitting])
    one_shot = (world_size - 1) * nbytes <= _NORM_SENT_NBYTES
    teams = min(rows, _SMS if one_shot else _SMS // world_size * world_size)
    algorithm = Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT if one_shot else Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT
    return Shape(algorithm, teams * cluster, threads // cluster, epilogue=replace(norm, cluster=cluster))


def why_not_quantized(algorithm: Algorithm, codec: Codec, world_size: int, nbytes: int) -> str:
    """Why ``algorithm`` cannot serve a tensor of so many bytes with ``codec`` on the wire, or nothing."""
    if algorithm is Algorithm.QUANTIZED_TWO_SHOT_PUSH and not codec.spares_a_word:
        return f"the scheme {codec.scheme} leaves no word to say 'not yet'"
    return why_too_large(algorithm, world_size, nbytes)


def why_too_large(algorithm: Algorithm, world_size: int, nbytes: int) -> str:
    """Why the scratch of ``algorithm`` cannot take a tensor of so many bytes, or nothing."""
    largest = largest_nbytes(algorithm, world_size)
    if largest is None or nbytes <= largest:
        return ""
    return f"its scratch takes {largest} bytes between {world_size} ranks, not {nbytes}"


def choose_for_parts(op: str, nbytes: int) -> Shape:
    """The shape for a call of one of ``PART_ROWS`` whose largest part has ``nbytes`` bytes."""
    row = next(row for row in PART_ROWS[op] if row["max_nbytes"] is None or nbytes <= row["max_nbytes"])
    return shape_of(row, 1, nbytes)


def shape_of(row: dict, world_size: int, nbytes: int) -> Shape:
    """A row's shape for a size: no more blocks than have something to do."""
    algorithm = Algorithm(row["algorithm"])
    packs, threads, chunk = -(-nbytes // PACK_NBYTES), row["threads"], row.get("chunk", 0)
    match algorithm:
        case Algorithm.TWO_SHOT_PUSH:  # a block has a group of whole warps for every owner
            width = max(1, threads // (WARP * world_size)) * WARP
            packs, in_block, threads = packs_a_part(packs, world_size), width, width * world_size
        case Algorithm.MULTIMEM_TWO_SHOT:
            in_block = threads * world_size  # a thread handles its pack of every shard
        case Algorithm.TWO_SHOT_LOSSLESS:
            in_block = chunk * world_size * 2 * TILE_NUMEL // PACK_NBYTES
        case Algorithm.TWO_SHOT_TMA:
            in_block = TMA_CHANNELS * chunk * world_size
        case Algorithm.ALLGATHER_PUSH:
            in_block = chunk
        case _:
            in_block = threads
    blocks = max(1, min(row["blocks"], -(-packs // in_block)))
    return Shape(algorithm, blocks, threads, chunk)

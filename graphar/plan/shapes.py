"""Computes the shape of a kernel (blocks, threads and chunk) from a row or a policy of a tuning table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.norms import ALLREDUCE_NORM
from graphar.plan.algorithms import CLUSTERS, Algorithm, Shape
from graphar.plan.call import Call
from graphar.plan.policy import Chip, NormPolicy, QuantizedPolicy, shared_blocks
from graphar.plan.scratch import LOSSLESS_CHUNK, MAX_BLOCKS, PACK_NBYTES, TMA_CHANNELS, TMA_THREADS, WARP, packs_a_part
from graphar.plan.tables import DEFAULT, Table, shipped_table

_STEPS = 4  # chunks of a block of quantized_reducescatter: it encodes one while another travels

# Algorithms for small tensors. They are launched with one block more than has work, if the table's limit allows it: the
# last block tells the other ranks what is called (cuda_src/device/sync/agreement.cuh).
_TELLING = (
    Algorithm.ONE_SHOT_PUSH,
    Algorithm.TWO_SHOT_PUSH,
    Algorithm.REDUCESCATTER_PUSH,
    Algorithm.ALLGATHER_FLAGGED,
)


def serving(table: Table, world_size: int) -> Table:
    """Returns ``table``, or the default table if it has no rows for ``world_size``."""
    return table if world_size in table.rows else shipped_table(DEFAULT)


def for_row(table: Table, world_size: int, nbytes: int, algorithm: Algorithm | None = None) -> Shape:
    """Returns the shape of an all-reduce of ``nbytes``, by the table's rows for ``world_size``.

    With ``algorithm`` the shape has this algorithm: by its first row that fits ``nbytes``, else by its last row, or by
    a generic row if it has none.
    """
    rows = table.rows[world_size]
    if algorithm is not None:
        rows = [row for row in rows if row["algorithm"] == algorithm.value] or [_generic_row(algorithm, world_size)]
    fitting = [row for row in rows if row["max_nbytes"] is None or nbytes <= row["max_nbytes"]]
    return shape_of(fitting[0] if fitting else rows[-1], world_size, nbytes)


def for_parts(rows: Sequence[dict], nbytes: int, algorithm: Algorithm | None = None) -> Shape:
    """Returns the shape of a call whose largest part has ``nbytes``, by the table's rows for its op.

    With ``algorithm``, one that compresses and has no rows, the shape has this algorithm.
    """
    if algorithm:
        return shape_of(_generic_row(algorithm, 1), 1, nbytes)
    row = next(row for row in rows if row["max_nbytes"] is None or nbytes <= row["max_nbytes"])
    return shape_of(row, 1, nbytes)


def _generic_row(algorithm: Algorithm, world_size: int) -> dict:
    """Returns a row for an algorithm that the table has no row for."""
    row = {"algorithm": algorithm, "max_nbytes": None}
    if algorithm is Algorithm.TWO_SHOT_TMA:
        return row | {"blocks": 16, "threads": TMA_THREADS, "chunk": algorithm.row.scratch(world_size).capacity}
    if algorithm.row.compresses:
        return row | {"blocks": algorithm.row.max_blocks, "threads": 512, "chunk": LOSSLESS_CHUNK}
    return row | {"blocks": 128, "threads": 256, "chunk": 512}


def shape_of(row: dict, world_size: int, nbytes: int) -> Shape:
    """Returns the shape of a row for ``nbytes``, with as many blocks as have work, or one more."""
    algorithm = Algorithm(row["algorithm"])
    packs, threads, chunk = -(-nbytes // PACK_NBYTES), row["threads"], row.get("chunk", 0)
    match algorithm:
        case Algorithm.TWO_SHOT_PUSH:  # a block has whole warps for each owner
            width = max(1, threads // (WARP * world_size)) * WARP
            packs, in_block, threads = packs_a_part(packs, world_size), width, width * world_size
        case Algorithm.MULTIMEM_TWO_SHOT:
            in_block = threads * world_size  # a thread handles one pack of each shard
        case _ if algorithm.row.compresses:
            in_block = chunk * world_size * 2 * TILE_NUMEL // PACK_NBYTES
        case Algorithm.TWO_SHOT_TMA:
            in_block = TMA_CHANNELS * chunk * world_size
        case Algorithm.ALLGATHER_PUSH:
            in_block = chunk
        case _:
            in_block = threads
    blocks = max(1, -(-packs // in_block)) + (algorithm in _TELLING)
    return Shape(algorithm, min(row["blocks"], blocks), threads, chunk)


def for_quantized(
    policy: QuantizedPolicy,
    sms: int,
    codec: Codec,
    world_size: int,
    numel: int,
    itemsize: int,
    algorithm: Algorithm | None = None,
) -> Shape:
    """Returns the shape of an all-reduce of ``numel`` elements of ``itemsize`` bytes with ``codec`` on the wire.

    With ``algorithm`` the shape has this algorithm; the caller has checked that it can serve the call.
    """
    push, pipelined = Algorithm.QUANTIZED_TWO_SHOT_PUSH, Algorithm.QUANTIZED_TWO_SHOT_PIPELINED
    if algorithm is None:
        fits = codec.spares_a_word and numel * itemsize <= push.row.limit(world_size)
        algorithm = push if fits else pipelined
    tiles = -(-codec.tiles(numel) // world_size)  # of one owner
    most_blocks = shared_blocks(sms)
    if algorithm is pipelined:
        small = min(MAX_BLOCKS, 2 * most_blocks)  # blocks of half an SM
        chunk = min(_chunk_tiles(pipelined, codec, world_size), policy.pipelined_tiles, tiles)
        blocks, threads = (small, 256) if tiles > policy.many_tiles else (most_blocks, 512)
        return Shape(algorithm, min(blocks, -(-tiles // chunk)), threads, chunk, codec=codec)
    wanted, most = -(-tiles // most_blocks), push.row.max_threads // WARP // world_size  # warps for each owner
    half = most // 2
    width = min(wanted, half if wanted <= policy.half_sm_tiles * half else most)
    return Shape(algorithm, min(most_blocks, -(-tiles // width)), WARP * width * world_size, codec=codec)


def for_quantized_parts(sms: int, codec: Codec, world_size: int, numel: int) -> Shape:
    """Returns the shape of a reduce-scatter with ``codec`` on the wire, whose largest part has ``numel`` elements.

    Tiles are spread over all SMs first, and each step has work for all warps of a block.
    """
    algorithm, tiles = Algorithm.QUANTIZED_REDUCESCATTER, codec.tiles(numel)
    blocks = min(shared_blocks(sms), tiles)
    share = -(-tiles // blocks)  # tiles of each part that a block handles
    warps = min(algorithm.row.max_threads // WARP, world_size * share)
    largest = _chunk_tiles(algorithm, codec, world_size)
    chunk = min(largest, max(-(-share // _STEPS), -(-warps // world_size)))
    return Shape(algorithm, blocks, WARP * warps, chunk, codec=codec)


def _chunk_tiles(algorithm: Algorithm, codec: Codec, world_size: int) -> int:
    """Returns how many tiles of ``codec`` fit into a slot."""
    return algorithm.row.scratch(world_size).capacity * PACK_NBYTES // codec.tile_nbytes


def for_norm(policy: NormPolicy, chip: Chip, world_size: int, call: Call) -> Shape:
    """Returns the shape of an all-reduce or a reduce-scatter with residual and RMSNorm.

    An all-reduce has the rows of one launch. The largest cluster is taken with which all blocks fit on the SMs and each
    block has at least two warps. The cluster in the call's epilogue is ignored.
    """
    norm, nbytes = call.epilogue, call.nbytes
    rows, packs = max(call.parts) // norm.columns, norm.columns * call.dtype.itemsize // PACK_NBYTES
    threads = min(1024, max(WARP, 1 << (packs - 1).bit_length()))
    clusters = CLUSTERS if chip.has_clusters else ()
    fitting = [one for one in clusters if rows * one <= chip.shared_blocks and threads // one >= 2 * WARP]
    cluster = max([1, *fitting])
    algorithm, most = Algorithm.REDUCESCATTER_RMSNORM, chip.shared_blocks
    if call.op == ALLREDUCE_NORM:
        fits = nbytes <= Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT.row.limit(world_size)
        one_shot = fits and (world_size - 1) * nbytes <= policy.one_shot_sent_nbytes
        algorithm = Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT if one_shot else Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT
        most = most if one_shot else most // world_size * world_size
    threads = min(threads // cluster, algorithm.row.max_threads)
    return Shape(algorithm, min(rows, most) * cluster, threads, epilogue=replace(norm, cluster=cluster))

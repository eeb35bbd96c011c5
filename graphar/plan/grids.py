"""The grids of the rows of algorithms: those that tuning tries, and those that follow from a policy."""

from __future__ import annotations

from collections.abc import Iterator

from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.dtypes import BYTE
from graphar.plan.call import Call
from graphar.plan.policy import Chip, Policies
from graphar.plan.row import MAX_THREADS, Candidates, Grid, Row
from graphar.plan.scratch import MAX_BLOCKS, PACK_NBYTES, WARP
from graphar.plan.sizes import KB

CLUSTERS = (1, 2, 4, 8)  # blocks that share a row of a norm; more than one from sm_90 on
MEETING_THREADS = 128  # of the block in which ranks meet before and after copies
_STEPS = 4  # chunks of a block that encodes a chunk while another travels


# What tuning tries: pairs (threads of a block, packs of a chunk).
def each_of(*pairs: tuple[int, int]) -> Candidates:
    """Returns a function that gives the same pairs for every world size and size."""
    return lambda world_size, nbytes: pairs


def in_filled_blocks(world_size: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields widths of blocks that each have a pack for every thread."""
    # At larger sizes a few full blocks would leave most of the links' bandwidth unused.
    fewest_blocks = 16 if nbytes > 64 * KB else 1
    for threads in (64, 128, 256, 512):
        if nbytes >= fewest_blocks * threads * PACK_NBYTES and (threads > 64 or nbytes <= 32 * KB):
            yield threads, 0


def in_groups(world_size: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """Yields widths of blocks that have a group of whole warps for each rank."""
    most = MAX_THREADS // world_size // WARP * WARP
    widths = {width for width in (32, 64, 96, 128, 256) if width <= most} | {most}
    return ((width * world_size, 0) for width in sorted(widths))


def of_copies(row: Row, call: Call, world_size: int, policies: Policies, chip: Chip) -> Grid:
    """Returns the grid of a rank's local sum of what copy engines brought, or of the block in which ranks meet."""
    if BYTE in row.dtypes:
        return Grid(1, MEETING_THREADS)
    return Grid(min(call.blocks or policies.copies.sum_blocks, chip.shared_blocks(halves=True)), MAX_THREADS)


# With a codec on the wire: tiles are encoded by a warp each.
def warps_for_tiles(row: Row, call: Call, world_size: int, policies: Policies, chip: Chip) -> Grid:
    """Returns a grid whose blocks have a warp for each rank and tile, up to half an SM's warps if these suffice."""
    tiles, most_blocks = _tiles_of_an_owner(call, world_size), chip.shared_blocks()
    wanted, most = -(-tiles // most_blocks), row.max_threads // WARP // world_size  # warps for each owner
    half = most // 2
    width = min(wanted, half if wanted <= policies.quantized.half_sm_tiles * half else most)
    return Grid(min(most_blocks, -(-tiles // width)), WARP * width * world_size)


def chunks_of_tiles(row: Row, call: Call, world_size: int, policies: Policies, chip: Chip) -> Grid:
    """Returns a grid whose blocks handle an owner's tiles in chunks: blocks of half an SM if there are many tiles."""
    tiles, policy = _tiles_of_an_owner(call, world_size), policies.quantized
    large = chip.shared_blocks()
    small = min(MAX_BLOCKS, 2 * large)  # blocks of half an SM
    chunk = min(_chunk_tiles(row, call, world_size), policy.pipelined_tiles, tiles)
    blocks, threads = (small, 256) if tiles > policy.many_tiles else (large, 512)
    return Grid(min(blocks, -(-tiles // chunk)), threads, chunk)


def steps_of_tiles(row: Row, call: Call, world_size: int, policies: Policies, chip: Chip) -> Grid:
    """Returns a grid that spreads a part's tiles over all SMs first; each step has work for all warps of a block."""
    tiles = codec_of_text(call.work.codec).tiles(max(call.work.parts))
    blocks = min(chip.shared_blocks(), tiles)
    share = -(-tiles // blocks)  # tiles of each part that a block handles
    warps = min(row.max_threads // WARP, world_size * share)
    chunk = min(_chunk_tiles(row, call, world_size), max(-(-share // _STEPS), -(-warps // world_size)))
    return Grid(blocks, WARP * warps, chunk)


def _tiles_of_an_owner(call: Call, world_size: int) -> int:
    return -(-codec_of_text(call.work.codec).tiles(max(call.work.parts)) // world_size)


def _chunk_tiles(row: Row, call: Call, world_size: int) -> int:
    return row.scratch(world_size).capacity * PACK_NBYTES // codec_of_text(call.work.codec).tile_nbytes


def teams_of_rows(
    row: Row, call: Call, world_size: int, policies: Policies, chip: Chip, of_each_rank: bool = False
) -> Grid:
    """Returns the grid of a sum with residual and RMSNorm. An all-reduce has the rows of one launch.

    The largest cluster is taken with which all blocks fit on the SMs and each block has at least two warps. With
    ``of_each_rank`` the grid handles equally many rows of each rank at a time.
    """
    columns = call.work.columns
    dtype = call.work.out_dtype or call.dtype
    rows, packs = max(call.work.parts) // columns, columns * dtype.itemsize // PACK_NBYTES
    threads = min(1024, max(WARP, 1 << (packs - 1).bit_length()))
    clusters = CLUSTERS if chip.has_clusters else ()
    room = {cluster: chip.shared_blocks(halves=True, cluster=cluster) for cluster in CLUSTERS}
    fitting = [cluster for cluster in clusters if rows * cluster <= room[cluster] and threads // cluster >= 2 * WARP]
    cluster = max([1, *fitting])
    most = room[cluster] // world_size * world_size if of_each_rank else room[cluster]
    return Grid(min(rows, most) * cluster, min(threads // cluster, row.max_threads), cluster=cluster)

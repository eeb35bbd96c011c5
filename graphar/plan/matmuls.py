"""Choosing the kernel and the tile of a matmul and its sum."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from graphar.numerics.codecs import Codec
from graphar.numerics.partitions import split
from graphar.plan.algorithms import Algorithm, kernels_that, with_kernels
from graphar.plan.policy import Chip, MatmulPolicy, MeasuredMatmul, TileCost
from graphar.plan.tables import Table
from graphar.plan.tiles import (
    FP8_TILES,
    GATHERED_TILES,
    LEAF_TILES,
    PARTIAL_TILES,
    REDUCED_FP8_TILES,
    SCATTERED_FP8_TILES,
    MatmulTile,
    SkinnyTile,
    for_wire,
)
from graphar.plan.work import MATMUL_ALLREDUCE, Product

COLUMNS = 8  # 16-bit elements in 16 bytes: kernels need rows of a multiple of 16 bytes
_ROWS = 128  # rows of the tallest MatmulTile of a sum
_TYPICAL_K = 4096  # of estimates on which ranks with different K agree
WAVE_TILE = 128  # rows and columns of the tile by which waves are counted
_CLUSTERED_WITH_BLOCKS = 0.92  # TileCost.clustered of e4m3 operands with scales of blocks (H100)
# A skinny kernel has registers for the sums of one block of 64 rows only, and adds them while nothing is multiplied:
# 74 us for 64 x 8192 x 14336 between two H200s, and 34 with scales of rows.
_MOST_ROWS_OF_BLOCKS = 32
_SKINNY = kernels_that(lambda row: row.is_skinny)


def owned_rows(rows: int, world_size: int) -> list[int]:
    """Returns how many rows of an all-reduce's result each rank sums: whole tiles, split as equally as possible."""
    tiles = split(-(-rows // _ROWS), world_size)
    ends = [min(sum(tiles[:rank]) * _ROWS, rows) for rank in range(world_size + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def is_skinny(world_size: int, rows: int, columns: int, itemsize: int = 2) -> bool:
    """Returns whether the skinny kernels, for at most 64 rows, can compute a result of 16-bit elements.

    Ranks send elements of ``itemsize`` bytes: rounded ones, or partials in fp32.
    """
    nbytes = itemsize * rows * columns
    return any(rows <= one.row.tiles[-1].rows and nbytes <= one.row.limit(world_size) for one in _SKINNY)


def sent_itemsize(work: Product) -> int:
    """Returns the bytes of an element that a rank sends to be summed in a product of 16-bit elements."""
    return 4 if work.order == "tree" else 2


def fused_algorithm(table: Table, work: Product, world_size: int) -> Algorithm:
    """Returns the algorithm of a product of 16-bit elements in one kernel, summed or with gathered rows."""
    rows, columns = sum(work.parts), work.columns
    takers = with_kernels(work.summing_op)
    # With a codec or an epilogue each rank sums its own rows, which no skinny kernel does.
    itemsize = sent_itemsize(work)
    skinny = not work.codec and not work.epilogue and is_skinny(world_size, rows, columns, itemsize)
    fitting = [one for one in takers if one.row.is_skinny == skinny] or takers  # not every op has skinny kernels
    return next(one for one in fitting if one.row.suits(table, world_size, itemsize * rows * columns))


class MatmulChoice(NamedTuple):
    """Whose matmul multiplies, and why, in words that begin with its name."""

    own: bool  # whether it is graphar's
    reason: str


def choose_matmul(policy: MatmulPolicy, m: int, n: int, k: int, sms: int, panels: int = 1) -> MatmulChoice:
    """Returns the matmul that "auto" takes for operands [m, k] and [n, k] on ``sms`` SMs, before a sum or a norm.

    The result may be cut into several ``panels``. All take graphar's then, so that bits do not depend on the cut. A
    result of a wave of tiles takes graphar's as well: it is as fast as torch's. Below a wave times are irregular, so
    the nearest measured shape decides; without any, graphar's has the same bits for every number of rows.
    """
    if m < policy.own_from_rows:
        return MatmulChoice(False, f"torch's matmul, for fewer than {policy.own_from_rows} rows")
    if panels > 1:
        return MatmulChoice(True, "graphar's matmul, for all panels")
    if fills_wave(m, n, sms):
        return MatmulChoice(True, "graphar's matmul, whose tiles fill the GPU")
    if not policy.against_torch:
        return MatmulChoice(True, "graphar's matmul, which was not timed against torch's")
    nearest = _nearest(policy.against_torch, m, n, k)
    shape = f"{nearest.m} x {nearest.n} x {nearest.k}"
    if nearest.ratio > 1:
        return MatmulChoice(
            False, f"torch's matmul, which was measured to be {nearest.ratio:.2f} times as fast at {shape}"
        )
    return MatmulChoice(
        True, f"graphar's matmul, which was measured to take {nearest.ratio:.2f} of torch's time at {shape}"
    )


def fills_wave(m: int, n: int, sms: int) -> bool:
    """Returns whether a result [m, n] has at least as many tiles of 128 x 128 as there are SMs."""
    return -(-m // WAVE_TILE) * -(-n // WAVE_TILE) >= sms


@functools.lru_cache(maxsize=1024)
def _nearest(measured: tuple[MeasuredMatmul, ...], m: int, n: int, k: int) -> MeasuredMatmul:
    """Returns the shape whose M, N and K differ from the given ones by the least factors, multiplied together."""
    shape = [max(length, 1) for length in (m, n, k)]
    return min(measured, key=lambda one: sum(abs(math.log2(a / b)) for a, b in zip(one[:3], shape, strict=True)))


def prefers_tiles(
    policy: MatmulPolicy,
    chip: Chip,
    world_size: int,
    rows: int,
    columns: int,
    scattered: bool = False,
    codec: str = "",
    itemsize: int = 2,
    scales: str = "",
) -> bool:
    """Returns whether one fused kernel was measured to be faster than a matmul followed by its sum.

    The result is [rows, columns]. ``scattered`` says whether each rank sums its own rows even of a skinny result, which
    no skinny kernel does: in a reduce-scatter, or with an epilogue. ``codec`` is the text of the codec on the wire, and
    ``itemsize`` the bytes of an element that a rank sends without one: :func:`sent_itemsize`. ``scales`` are those of
    e4m3 operands. Tiles of e4m3 operands and of fp32 partials have the same threshold as other tiles (e4m3, 512 x 8192
    between two H200s: 49.7 us in tiles, 56.1 us in two steps). Nothing was measured where more than two communicators
    share a GPU: a fused kernel has only a share of its SMs.
    """
    if chip.communicators > 2:
        return False
    if not scattered and not codec and is_skinny(world_size, rows, columns, itemsize):
        if scales == "blocks" and rows > _MOST_ROWS_OF_BLOCKS:
            return False
        return columns >= policy.skinny_from_columns.get(world_size, math.inf) and _fills_waves(policy, columns, chip)
    if codec and scattered:
        return False
    return rows * columns >= policy.tiles_from(world_size, bool(codec))


def _fills_waves(policy: MatmulPolicy, columns: int, chip: Chip) -> bool:
    """Returns whether a skinny kernel takes one wave of blocks, or keeps the SMs busy in all of its waves."""
    blocks, room = -(-columns // SkinnyTile.columns), chip.shared_blocks()
    waves = -(-blocks // room)
    return waves == 1 or blocks / (waves * room) >= policy.skinny_least_busy


@functools.lru_cache(maxsize=1024)
def fastest_tile(
    cost: TileCost, m: int, n: int, k: int, sms: int, layout: str = "by_rows", leaves: int = 1, in_clusters: int = 0
) -> MatmulTile:
    """Returns the tile of a plain matmul that is estimated to multiply [m, k] by [k, n] fastest on ``sms`` SMs.

    ``layout`` is the layout of the weight, one of LAYOUTS, and ``leaves`` one of LEAF_COUNTS. Clusters of 4 or 8 blocks
    find at most ``in_clusters`` SMs of the device, since those of a cluster lie in one GPC.
    """
    fitting = [tile for tile in LEAF_TILES[leaves] if layout in tile.layouts]

    def room(tile: MatmulTile) -> int:
        return min(sms, in_clusters) if max(tile.blocks, tile.tail_split) > 2 else sms

    return min(
        (tile for tile in fitting if _is_useful(tile, m, n, sms, room(tile))),
        key=lambda tile: _estimate(cost, tile, m, n, k, sms, room(tile)),
    )


def _is_useful(tile: MatmulTile, m: int, n: int, sms: int, room: int) -> bool:
    """Whether a tile is one for this result: clusters find ``room`` on so many SMs.

    Leaves are split, in all rounds or in the last one, for one round of clusters: they gain nothing where SMs have
    several (H100). A last round gains less than 10 % after more than four others. A tile of 96 columns loads its rows
    for few products, and is for one round, too.
    """
    tiles = _tiles(tile, [m], n)
    if tile.tail_split > 1:
        return sms <= tiles < 5 * sms and 0 < tiles % sms <= room // tile.tail_split
    return (tile.split == 1 and tile.columns != 96) or tiles <= room // tile.split


def _estimate(cost: TileCost, tile: MatmulTile, m: int, n: int, k: int, sms: int, room: int) -> tuple[float, float]:
    """Returns the estimated clocks of a plain matmul for 64 of K, and those of the busiest SM alone.

    The weight comes from memory. That limits matmuls with few rows whether their leaves are split or not.
    """
    tiles, rows = _tiles(tile, [m], n), min(m, tile.rows)
    if tail := tile.of_tail:
        busiest = tiles // sms * clocks(cost, tile, [rows], tile.columns, k, 1)
        busiest += _split_clocks(cost, tail, rows, tiles % sms, k) + cost.clocks_a_tail * 64 / k
    else:
        busiest = clocks(cost, tile, [m], n, k, room)
    limit = max(busiest, n * cost.clocks_a_line_of_memory)
    return (limit if tile.split == 1 else _split_clocks(cost, tile, rows, tiles, k, limit)), busiest


def _split_clocks(cost: TileCost, tile: MatmulTile, rows: int, tiles: int, k: int, limit: float = 0) -> float:
    """Returns the estimated clocks, for 64 of K, of a round of tiles of ``rows`` whose leaves are split.

    Blocks that split leaves load as many lines through L2 as fewer blocks do, and exchange their sums. Something else
    takes ``limit`` clocks or more.
    """
    alone, lines = clocks(cost, tile, [rows], tile.columns, k, tile.blocks), tiles * (rows + tile.columns)
    return max(alone, limit, lines * cost.clocks_a_line_of_l2) + cost.clocks_an_exchange * 64 / k


@functools.lru_cache(maxsize=1024)
def gathered_tile(
    cost: TileCost, counts: tuple[int, ...], n: int, k: int, chip: Chip, layout: str = "by_rows", scaled: bool = False
) -> MatmulTile:
    """Returns the tile that is estimated to multiply gathered rows, ``counts`` of each rank, with [n, k] fastest.

    ``layout`` is the layout of the weight, one of LAYOUTS. ``scaled``: operands are e4m3, with costs as in
    :func:`fastest_scaled_tile`.
    """
    fitting = FP8_TILES if scaled else [tile for tile in GATHERED_TILES if layout in tile.layouts]
    k = max(k // 2, 1) if scaled else k
    return min(fitting, key=lambda tile: clocks(cost, tile, counts, n, k, chip.shared_blocks(cluster=tile.cluster)))


@functools.lru_cache(maxsize=1024)
def fastest_scaled_tile(cost: TileCost, m: int, n: int, k: int, sms: int, in_blocks: bool = False) -> MatmulTile:
    """Returns the tile of FP8_TILES that is estimated to multiply e4m3 operands [m, k] and [n, k] fastest.

    The costs are those of 16-bit operands: 128 of K have the bytes of 64 of 16 bits, and the tensor cores multiply them
    in the same time. Adding the sums of blocks is not counted. With scales of blocks (``in_blocks``) clusters gain.
    Over 72 shapes the chosen tile takes 1.01 of the fastest one's time, and 1.005 with scales of rows (H100). The
    weight comes from memory, which limits matmuls with few rows.
    """
    cost = replace(cost, clustered=_CLUSTERED_WITH_BLOCKS) if in_blocks else cost

    def estimate(tile: MatmulTile) -> tuple[float, float]:
        busiest = clocks(cost, tile, [m], n, max(k // 2, 1), sms)
        return max(busiest, n * cost.clocks_a_line_of_memory), busiest

    return min(FP8_TILES, key=estimate)


def clocks(cost: TileCost, tile: MatmulTile, rows: Sequence[int], n: int, k: int, sms: int) -> float:
    """Returns the estimated clocks of the busiest SM for 64 of K, over all its tiles.

    A tile is limited by the tensor cores or by L2, whichever takes longer, and waits a little for each line that its
    block loads. The tensor cores wait while a tile is stored, unless consumers alternate: then for the last one alone.
    Blocks that split the leaves of a tile each compute a part of it, not counting what they exchange. ``rows`` are the
    rows of each part of C, which has ``n`` columns; no tile spans two parts.
    """
    rounds = _rounds(tile, rows, n, sms)
    step = max(tile.rows * tile.columns * cost.clocks_a_product, (tile.rows + tile.columns) * cost.clocks_a_line)
    step += (tile.rows + tile.columns / tile.cluster) * cost.wait_a_line
    step *= cost.clustered if tile.cluster > 1 else 1
    step *= cost.alone_with_leaves if tile.leaves > 1 and tile.consumers == 1 else 1
    stored = (1 if tile.alternating else rounds) * tile.rows * tile.columns * cost.clocks_a_result
    return (rounds * step + stored * 64 / k) / tile.split


def _rounds(tile: MatmulTile, rows: Sequence[int], n: int, sms: int) -> int:
    """Returns how many tiles the busiest cluster computes."""
    return -(-_tiles(tile, rows, n) // max(sms // tile.blocks, 1))


def _tiles(tile: MatmulTile, rows: Sequence[int], n: int) -> int:
    """Returns how many tiles clusters compute: a cluster that loads W together has tiles below each other."""
    return sum(-(-m // (tile.rows * tile.cluster)) for m in rows) * -(-n // tile.columns)


def tiles_of_sum(
    policy: MatmulPolicy, algorithm: Algorithm, counts: tuple[int, ...], n: int, chip: Chip, codec: Codec | None = None
) -> tuple[MatmulTile, ...]:
    """Returns the fastest tiles of a matmul that sends finished tiles; :func:`tile_for` chooses one by K.

    Large results take measured tiles, and small ones a tile by an estimate. All have equally many columns, so that
    warpgroup tiles have the same width on ranks with different K. ``counts`` are the rows that each rank sums, and the
    result has ``n`` columns.
    """
    numel = sum(counts) * n
    if numel < policy.estimated_below_numel:
        measured = policy.large_tile, policy.alternating_tile
        return (_estimated_tile(policy.cost, measured, algorithm, counts, n, chip, codec),)
    tile = policy.large_tile if numel >= policy.large_from_numel else policy.small_tile
    # With a codec fewer bytes travel, so the tensor cores are the limit for every K.
    alternates = policy.alternating_tile in algorithm.row.tiles and codec is None
    return (policy.alternating_tile, tile) if alternates else (tile,)


@functools.lru_cache(maxsize=1024)
def _estimated_tile(cost: TileCost, measured, algorithm, counts, n: int, chip: Chip, codec) -> MatmulTile:
    others = tuple(tile for tile in for_wire(algorithm.row.tiles, codec) if tile not in measured)
    return _estimated_of(others, cost, counts, n, chip, _TYPICAL_K)


def tile_of_partials(policy: MatmulPolicy, counts: tuple[int, ...], n: int, chip: Chip, leaves: int) -> MatmulTile:
    """Returns the tile of a matmul that sends partials of so many ``leaves``; all ranks take the same one.

    Large results take one with the shape that was measured to be the fastest for rounded tiles, and small ones a tile
    by an estimate. ``counts`` are the rows that each rank sums, and the result has ``n`` columns.
    """
    numel = sum(counts) * n
    measured = policy.large_tile if numel >= policy.large_from_numel else policy.small_tile
    alike = [tile for tile in PARTIAL_TILES[leaves] if _shape(tile) == _shape(measured)]
    if alike and numel >= policy.estimated_below_numel:
        return alike[0]
    return _estimated_of(PARTIAL_TILES[leaves], policy.cost, counts, n, chip, _TYPICAL_K)


def scaled_tiles(algorithm: Algorithm) -> tuple[MatmulTile | SkinnyTile, ...]:
    """Returns the tiles that a fused algorithm has for e4m3 operands."""
    if algorithm.row.is_skinny:
        return algorithm.row.tiles
    if not algorithm.row.sends_tiles:
        return FP8_TILES
    return REDUCED_FP8_TILES if algorithm.op == MATMUL_ALLREDUCE else SCATTERED_FP8_TILES


def tile_of_scaled_sum(
    policy: MatmulPolicy, algorithm: Algorithm, counts: tuple[int, ...], n: int, chip: Chip
) -> MatmulTile:
    """Returns the tile of a matmul of e4m3 operands that sends finished tiles; all ranks take the same one.

    It is estimated as in :func:`fastest_scaled_tile`. ``counts`` are the rows that each rank sums, and the result has
    ``n`` columns.
    """
    return _estimated_of(scaled_tiles(algorithm), policy.cost, counts, n, chip, _TYPICAL_K // 2)


def _shape(tile: MatmulTile) -> tuple[int, int, int]:
    return tile.rows, tile.columns, tile.cluster


@functools.lru_cache(maxsize=1024)
def _estimated_of(tiles: tuple[MatmulTile, ...], cost: TileCost, counts, n: int, chip: Chip, k: int) -> MatmulTile:
    return min(tiles, key=lambda tile: clocks(cost, tile, counts, n, k, chip.shared_blocks(cluster=tile.cluster)))


def tile_for(policy: MatmulPolicy, tiles: tuple[MatmulTile, ...], k: int) -> MatmulTile:
    """Returns the tile of ``tiles``, from :func:`tiles_of_sum`, for a rank whose operands have ``k`` columns."""
    return tiles[0 if k < policy.alternating_below_k else -1]

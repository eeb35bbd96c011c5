"""Choosing the kernel and the tile of a matmul and its sum."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple

import torch

from graphar.errors import Reason
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT, split_units
from graphar.plan.algorithms import MATMUL_ARCH, MATMUL_TYPES, Algorithm, kernels_that, with_kernels
from graphar.plan.policy import Chip, MatmulPolicy, MeasuredMatmul, TileCost
from graphar.plan.scratch import MATMUL_BOX_COLUMNS, MATMUL_BOX_ROWS, MATMUL_PARTIAL_PLACES, boxes_a_slot
from graphar.plan.tables import Table
from graphar.plan.tiles import (
    FP8_TILES,
    LAYOUTS,
    LEAF_TILES,
    PARTIAL_TILES,
    REDUCED_FP8_TILES,
    SCATTERED_FP8_TILES,
    MatmulTile,
    SkinnyTile,
    T,
    narrow,
    skinny_tile,
    travels_in_tiles,
)
from graphar.plan.work import MATMUL_ALLREDUCE, PLAIN, Factors, Product

COLUMNS = 8  # 16-bit elements in 16 bytes: kernels need rows of a multiple of 16 bytes
_ROWS = 128  # rows of the tallest MatmulTile of a sum
_TYPICAL_K = 4096  # of estimates on which ranks with different K agree
WAVE_TILE = 128  # rows and columns of the tile by which waves are counted
_SKINNY = kernels_that(lambda row: row.is_skinny)


def owned_rows(rows: int, world_size: int) -> list[int]:
    """Returns how many rows of an all-reduce's result each rank sums: whole tiles, split as equally as possible."""
    return split_units(rows, world_size, _ROWS)


def is_skinny(work: Product, world_size: int) -> bool:
    """Returns whether skinny kernels can compute a product of at most 64 rows, and sum it whole on every rank."""
    if work.codec or work.owns_rows:  # no skinny kernel encodes, or divides rows
        return False
    rows, nbytes = sum(work.parts), work.sent_nbytes
    return any(rows <= algorithm.row.tiles[-1].rows and algorithm.row.fits(world_size, nbytes) for algorithm in _SKINNY)


def fused_algorithm(table: Table, work: Product, world_size: int) -> Algorithm:
    """Returns the algorithm of a product of 16-bit elements in one kernel, summed or with gathered rows."""
    skinny, takers = is_skinny(work, world_size), with_kernels(work.summing_op)
    fitting = [taker for taker in takers if taker.row.is_skinny == skinny] or takers  # not every op has skinny kernels
    return next(taker for taker in fitting if taker.row.suits(table, world_size, work.sent_nbytes))


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
    shape, ratio = f"{nearest.m} x {nearest.n} x {nearest.k}", f"{nearest.ratio:.2f}"
    if nearest.ratio > 1:
        return MatmulChoice(False, f"torch's matmul, which was measured to be {ratio} times as fast at {shape}")
    return MatmulChoice(True, f"graphar's matmul, which was measured to take {ratio} of torch's time at {shape}")


def fills_wave(m: int, n: int, sms: int) -> bool:
    """Returns whether a result [m, n] has a tile of 128 x 128 for each SM, or more."""
    return -(-m // WAVE_TILE) * -(-n // WAVE_TILE) >= sms


@functools.lru_cache(maxsize=1024)
def _nearest(measured: tuple[MeasuredMatmul, ...], m: int, n: int, k: int) -> MeasuredMatmul:
    """Returns the shape whose M, N and K differ from ``m``, ``n`` and ``k`` by the least product of factors."""
    shape = [max(length, 1) for length in (m, n, k)]
    return min(measured, key=lambda other: sum(abs(math.log2(a / b)) for a, b in zip(other[:3], shape, strict=True)))


def prefers_tiles(work: Product, policy: MatmulPolicy, chip: Chip, world_size: int) -> bool:
    """Returns whether one fused kernel was measured to be faster than a matmul followed by its sum.

    Tiles of e4m3 operands and of fp32 partials have the same threshold as others (e4m3, 512 x 8192 between two H200s:
    49.7 us in tiles, 56.1 us in two steps). Nothing was measured where more than two communicators share a GPU: a fused
    kernel has only a share of its SMs.
    """
    if chip.communicators > 2:
        return False
    rows, columns = sum(work.parts), work.columns
    if is_skinny(work, world_size):
        if work.factors.most_skinny_rows and rows > work.factors.most_skinny_rows:
            return False
        blocks, room = -(-columns // SkinnyTile.columns), chip.shared_blocks()
        waves = -(-blocks // room)
        is_busy = waves == 1 or blocks / (waves * room) >= policy.skinny_least_busy
        return is_busy and columns >= policy.skinny_from_columns.get(world_size, math.inf)
    if work.codec and work.owns_rows:
        return False
    return rows * columns >= policy.tiles_from(world_size, bool(work.codec))


def may_take_one_kernel(work: Product, dtype: torch.dtype) -> bool:
    """Whether some chip has a kernel that multiplies and sums ``work``, whose result has ``dtype``."""
    if work.norm or work.partition not in ("auto", "tiles", BATCH_INVARIANT, TP_INVARIANT):
        return False
    if work.columns % COLUMNS or dtype not in MATMUL_TYPES or (work.codec and not work.factors.is_plain):
        return False
    return not work.codec or travels_in_tiles(codec_of_text(work.codec), work.columns)


def why_not_columns(work: Product, chip: Chip, world_size: int) -> Reason | None:
    """Returns why no kernel sums tiles of the work's columns. The answer is the same on every rank."""
    if chip.arch != MATMUL_ARCH:
        return f"a rank's device is not of {MATMUL_ARCH}"
    if summed_rows_a_launch(work, world_size) < 4 * MATMUL_BOX_ROWS:
        return f"{work.columns} columns are too many for its scratch"
    return None


def summed_rows_a_launch(work: Product, world_size: int) -> int:
    """Returns how many rows of each rank's part one launch sums."""
    places = MATMUL_PARTIAL_PLACES if work.as_tree else 1  # of a box in the scratch
    return boxes_a_slot(world_size) // places // -(-work.columns // MATMUL_BOX_COLUMNS) * MATMUL_BOX_ROWS


@dataclass(frozen=True, eq=False)
class Kind(Generic[T]):
    """The use of tiles, such as a plain matmul. There is one object of each kind."""

    tiles: tuple[T, ...]
    factors: Factors = PLAIN


class Shape(NamedTuple):
    """The shape of a product, and how its weight lies."""

    rows: tuple[int, ...]  # of each part of the result; no tile spans two parts
    n: int
    k: int
    layout: str = LAYOUTS[0]


class Sms(NamedTuple):
    """The SMs that a matmul has alone."""

    total: int
    in_clusters: int = 0  # SMs that clusters of 4 or 8 blocks can use, since a cluster lies in one GPC

    def room(self, tile: MatmulTile) -> int:
        """Returns how many of these SMs the blocks of a tile can use."""
        return min(self) if max(tile.blocks, tile.tail_split) > 2 else self.total


@functools.cache
def alone(factors: Factors = PLAIN, leaves: int = 1) -> Kind[MatmulTile]:
    """Returns the tiles of a plain matmul, which cuts K into ``leaves``."""
    return Kind(LEAF_TILES[leaves] if factors.is_plain else FP8_TILES, factors)


@functools.lru_cache(maxsize=4096)
def best_tile(kind: Kind[MatmulTile], shape: Shape, cost: TileCost, chip: Chip | Sms) -> MatmulTile:
    """Returns the tile of a kind that is estimated to multiply a shape fastest.

    A kernel that sends or gathers shares a chip with the kernels of other communicators; a plain matmul has its own
    SMs. The costs are for 16-bit operands. In e4m3 adding the sums of blocks is not counted: over 72 shapes the
    chosen tile takes 1.01 times as long as the fastest (H100).
    """
    tiles = [tile for tile in kind.tiles if shape.layout in tile.layouts]
    rows, n, k, _ = shape = shape._replace(k=kind.factors.k_of_16_bits(shape.k))
    if isinstance(chip, Chip):
        return min(tiles, key=lambda tile: clocks(cost, tile, rows, n, k, chip.shared_blocks(cluster=tile.cluster)))
    cost = replace(cost, clustered=kind.factors.clustered or cost.clustered)
    useful = [tile for tile in tiles if _is_useful(tile, shape, chip)]
    return min(useful, key=lambda tile: _alone(cost, tile, shape, chip))


def _is_useful(tile: MatmulTile, shape: Shape, sms: Sms) -> bool:
    """Whether a tile may be the fastest for a result of this shape on these SMs.

    Leaves are split for one round of clusters, either all rounds or the last: they gain nothing where SMs have
    several (H100). A last round gains less than 10 % after more than four others. A tile of 96 columns loads its rows
    for few products, and is for one round, too.
    """
    tiles, count, room = tiles_of_clusters(tile, shape.rows, shape.n), sms.total, sms.room(tile)
    if tile.tail_split > 1:
        return count <= tiles < 5 * count and 0 < tiles % count <= room // tile.tail_split
    return (tile.split == 1 and tile.columns != 96) or tiles <= room // tile.split


def _alone(cost: TileCost, tile: MatmulTile, shape: Shape, sms: Sms) -> tuple[float, float]:
    """Returns the estimated clocks of a plain matmul for 64 of K, and the clocks of the busiest SM alone.

    The weight comes from memory. That limits matmuls with few rows whether their leaves are split or not.
    """
    parts, n, k, _ = shape
    tiles, rows = tiles_of_clusters(tile, parts, n), min(sum(parts), tile.rows)
    if tail := tile.of_tail:
        busiest = tiles // sms.total * clocks(cost, tile, [rows], tile.columns, k, 1)
        busiest += _split_clocks(cost, tail, rows, tiles % sms.total, k) + cost.clocks_a_tail * 64 / k
    else:
        busiest = clocks(cost, tile, parts, n, k, sms.room(tile))
    limit = max(busiest, n * cost.clocks_a_line_of_memory)
    return (limit if tile.split == 1 else _split_clocks(cost, tile, rows, tiles, k, limit)), busiest


def _split_clocks(cost: TileCost, tile: MatmulTile, rows: int, tiles: int, k: int, limit: float = 0) -> float:
    """Returns the estimated clocks, for 64 of K, of a round of tiles of ``rows`` whose leaves are split.

    Blocks that split leaves load as many lines through L2 as others, and exchange their sums. ``limit`` is a minimum.
    """
    alone, lines = clocks(cost, tile, [rows], tile.columns, k, tile.blocks), tiles * (rows + tile.columns)
    return max(alone, limit, lines * cost.clocks_a_line_of_l2) + cost.clocks_an_exchange * 64 / k


def clocks(cost: TileCost, tile: MatmulTile, rows: Sequence[int], n: int, k: int, sms: int) -> float:
    """Returns the estimated clocks of the busiest SM for 64 of K, over all its tiles.

    A tile is limited by the tensor cores or by L2, whichever takes longer, and waits a little for each line that its
    block loads. The tensor cores wait while a tile is stored, unless consumers alternate: then only for the last.
    Blocks that split the leaves of a tile each compute a part of it, not counting what they exchange. ``rows`` are the
    rows of each part of C, which has ``n`` columns; no tile spans two parts.
    """
    rounds = -(-tiles_of_clusters(tile, rows, n) // max(sms // tile.blocks, 1))  # tiles of the busiest cluster
    step = max(tile.rows * tile.columns * cost.clocks_a_product, (tile.rows + tile.columns) * cost.clocks_a_line)
    step += (tile.rows + tile.columns / tile.cluster) * cost.wait_a_line
    step *= cost.clustered if tile.cluster > 1 else 1
    step *= cost.alone_with_leaves if tile.leaves > 1 and tile.consumers == 1 else 1
    stored = (1 if tile.alternating else rounds) * tile.rows * tile.columns * cost.clocks_a_result
    return (rounds * step + stored * 64 / k) / tile.split


def tiles_of_clusters(tile: MatmulTile, rows: Sequence[int], n: int) -> int:
    """Returns how many tiles clusters compute: a cluster that loads W together has tiles below each other."""
    return sum(-(-m // (tile.rows * tile.cluster)) for m in rows) * -(-n // tile.columns)


def tiles_that_serve(algorithm: Algorithm, work: Product, world_size: int) -> Kind:
    """Returns the tiles that a fused algorithm has for a product's factors and for what it sends."""
    leaves = work.leaves(world_size) if work.as_tree and algorithm.row.sends_tiles else 0
    return _kind(algorithm, work.factors, leaves, bool(work.codec))


@functools.cache
def _kind(algorithm: Algorithm, factors: Factors, leaves: int, is_encoded: bool) -> Kind:
    row = algorithm.row
    if row.is_skinny or (factors.is_plain and not (leaves or is_encoded)):
        return Kind(row.tiles, factors)
    if leaves:
        return Kind(PARTIAL_TILES[leaves])
    if factors.is_plain:
        return Kind(narrow(row.tiles))
    if not row.sends_tiles:
        return Kind(FP8_TILES, factors)
    return Kind(REDUCED_FP8_TILES if algorithm.op == MATMUL_ALLREDUCE else SCATTERED_FP8_TILES, factors)


def tiles_to_load(
    policy: MatmulPolicy, algorithm: Algorithm, work: Product, chip: Chip, world_size: int
) -> tuple[MatmulTile | SkinnyTile, ...]:
    """Returns the tiles of a fused kernel that all ranks load; each takes one of them: :func:`tile_for`.

    Large sums take measured tiles, and large sums of partials a tile of the same shape. Small sums, and sums of e4m3
    operands, take a tile by an estimate. Tiles of a sum have equally many columns on ranks with different K.
    """
    kind, as_tree = tiles_that_serve(algorithm, work, world_size), work.as_tree
    if algorithm.row.is_skinny:
        return (skinny_tile(sum(work.parts), work.leaves(world_size) if as_tree else None),)
    if not algorithm.row.sends_tiles:
        return kind.tiles
    numel = sum(work.parts) * work.columns
    if numel >= policy.estimated_below_numel and work.factors.is_plain:
        tile = policy.large_tile if numel >= policy.large_from_numel else policy.small_tile
        if not as_tree:
            # With a codec fewer bytes travel, so the tensor cores are the limit for every K.
            alternates = policy.alternating_tile in kind.tiles and not work.codec
            return (policy.alternating_tile, tile) if alternates else (tile,)
        shape = tile.rows, tile.columns, tile.cluster
        if alike := [other for other in kind.tiles if (other.rows, other.columns, other.cluster) == shape]:
            return (alike[0],)
    if work.factors.is_plain:  # for small results, not those that were measured on large results
        kind = Kind(tuple(tile for tile in kind.tiles if tile not in (policy.large_tile, policy.alternating_tile)))
    return (best_tile(kind, Shape(work.parts, work.columns, _TYPICAL_K), policy.cost, chip),)


def tile_for(policy: MatmulPolicy, tiles: tuple[T, ...], k: int) -> T:
    """Returns which of the tiles of :func:`tiles_to_load` a rank takes whose operands have ``k`` columns."""
    return tiles[0 if k < policy.alternating_below_k else -1]

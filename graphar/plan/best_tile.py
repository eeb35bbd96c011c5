"""Which tile multiplies a shape in the least estimated time: one chooser for all kinds of tiles."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple

from graphar.plan.factors import PLAIN, Factors
from graphar.plan.policy import Chip, TileCost
from graphar.plan.tiles import FP8_TILES, GATHERED_TILES, LAYOUTS, LEAF_TILES, MatmulTile, T


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


@functools.cache
def gathered(factors: Factors) -> Kind[MatmulTile]:
    """Returns the tiles of a matmul that gathers its rows."""
    return Kind(GATHERED_TILES if factors.is_plain else FP8_TILES, factors)


@functools.lru_cache(maxsize=4096)
def best_tile(kind: Kind[MatmulTile], shape: Shape, cost: TileCost, chip: Chip | Sms) -> MatmulTile:
    """Returns the tile of a kind that is estimated to multiply a shape fastest.

    A kernel that sends or gathers shares a chip with the kernels of other communicators; a plain matmul has its own
    SMs. The costs are those of 16-bit operands: 128 of K in e4m3 have the bytes of 64 of 16 bits, and the tensor cores
    multiply them in the same time. Adding the sums of blocks is not counted. Over 72 shapes the chosen tile takes 1.01
    times as long as the fastest tile in e4m3 (H100).
    """
    tiles = [tile for tile in kind.tiles if shape.layout in tile.layouts]
    rows, n, k, _ = shape = shape._replace(k=kind.factors.k_of_16_bits(shape.k))
    if isinstance(chip, Chip):
        return min(tiles, key=lambda tile: clocks(cost, tile, rows, n, k, chip.shared_blocks(cluster=tile.cluster)))
    cost = replace(cost, clustered=kind.factors.clustered or cost.clustered)
    return min(
        (tile for tile in tiles if _is_useful(tile, shape, chip)), key=lambda tile: _alone(cost, tile, shape, chip)
    )


def _is_useful(tile: MatmulTile, shape: Shape, sms: Sms) -> bool:
    """Whether a tile may be the fastest for a result of this shape on these SMs.

    Leaves are split for one round of clusters, either all rounds or the last: they gain nothing where SMs have
    several (H100). A last round gains less than 10 % after more than four others. A tile of 96 columns loads its rows
    for few products, and is for one round, too.
    """
    tiles, count, room = _tiles(tile, shape.rows, shape.n), sms.total, sms.room(tile)
    if tile.tail_split > 1:
        return count <= tiles < 5 * count and 0 < tiles % count <= room // tile.tail_split
    return (tile.split == 1 and tile.columns != 96) or tiles <= room // tile.split


def _alone(cost: TileCost, tile: MatmulTile, shape: Shape, sms: Sms) -> tuple[float, float]:
    """Returns the estimated clocks of a plain matmul for 64 of K, and those of the busiest SM alone.

    The weight comes from memory. That limits matmuls with few rows whether their leaves are split or not.
    """
    parts, n, k, _ = shape
    tiles, rows = _tiles(tile, parts, n), min(sum(parts), tile.rows)
    if tail := tile.of_tail:
        busiest = tiles // sms.total * clocks(cost, tile, [rows], tile.columns, k, 1)
        busiest += _split_clocks(cost, tail, rows, tiles % sms.total, k) + cost.clocks_a_tail * 64 / k
    else:
        busiest = clocks(cost, tile, parts, n, k, sms.room(tile))
    limit = max(busiest, n * cost.clocks_a_line_of_memory)
    return (limit if tile.split == 1 else _split_clocks(cost, tile, rows, tiles, k, limit)), busiest


def _split_clocks(cost: TileCost, tile: MatmulTile, rows: int, tiles: int, k: int, limit: float = 0) -> float:
    """Returns the estimated clocks, for 64 of K, of a round of tiles of ``rows`` whose leaves are split.

    Blocks that split leaves load as many lines through L2 as fewer blocks do, and exchange their sums. Something else
    takes ``limit`` clocks or more.
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
    rounds = -(-_tiles(tile, rows, n) // max(sms // tile.blocks, 1))  # tiles of the busiest cluster
    step = max(tile.rows * tile.columns * cost.clocks_a_product, (tile.rows + tile.columns) * cost.clocks_a_line)
    step += (tile.rows + tile.columns / tile.cluster) * cost.wait_a_line
    step *= cost.clustered if tile.cluster > 1 else 1
    step *= cost.alone_with_leaves if tile.leaves > 1 and tile.consumers == 1 else 1
    stored = (1 if tile.alternating else rounds) * tile.rows * tile.columns * cost.clocks_a_result
    return (rounds * step + stored * 64 / k) / tile.split


def _tiles(tile: MatmulTile, rows: Sequence[int], n: int) -> int:
    """Returns how many tiles clusters compute: a cluster that loads W together has tiles below each other."""
    return sum(-(-m // (tile.rows * tile.cluster)) for m in rows) * -(-n // tile.columns)

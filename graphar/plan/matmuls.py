"""Choosing the kernel and the tile of a matmul and its sum."""

from __future__ import annotations

import functools
import itertools
import math
from typing import NamedTuple, TypeVar

import torch

from graphar.errors import Reason
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT, split
from graphar.plan.algorithms import MATMUL_ARCH, MATMUL_TYPES, Algorithm, kernels_that, with_kernels
from graphar.plan.best_tile import Kind, Shape, best_tile, gathered
from graphar.plan.factors import PLAIN, Factors
from graphar.plan.policy import Chip, MatmulPolicy, MeasuredMatmul
from graphar.plan.scratch import MATMUL_BOX_ROWS
from graphar.plan.slices import rows_a_launch
from graphar.plan.tables import Table
from graphar.plan.tiles import (
    PARTIAL_TILES,
    REDUCED_FP8_TILES,
    SCATTERED_FP8_TILES,
    MatmulTile,
    SkinnyTile,
    narrow,
    skinny_tile,
    travels_in_tiles,
)
from graphar.plan.work import MATMUL_ALLREDUCE, Product

Tile = TypeVar("Tile", bound=MatmulTile | SkinnyTile)
COLUMNS = 8  # 16-bit elements in 16 bytes: kernels need rows of a multiple of 16 bytes
_ROWS = 128  # rows of the tallest MatmulTile of a sum
_TYPICAL_K = 4096  # of estimates on which ranks with different K agree
WAVE_TILE = 128  # rows and columns of the tile by which waves are counted
_SKINNY = kernels_that(lambda row: row.is_skinny)


def owned_rows(rows: int, world_size: int) -> list[int]:
    """Returns how many rows of an all-reduce's result each rank sums: whole tiles, split as equally as possible."""
    tiles = split(-(-rows // _ROWS), world_size)
    ends = [min(sum(tiles[:rank]) * _ROWS, rows) for rank in range(world_size + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def is_skinny(world_size: int, rows: int, columns: int, itemsize: int = 2) -> bool:
    """Returns whether the skinny kernels, for at most 64 rows, can compute a result of 16-bit elements.

    Ranks send elements of ``itemsize`` bytes: rounded sums, or partials in fp32.
    """
    nbytes = itemsize * rows * columns
    return any(rows <= algorithm.row.tiles[-1].rows and algorithm.row.fits(world_size, nbytes) for algorithm in _SKINNY)


def fused_algorithm(table: Table, work: Product, world_size: int) -> Algorithm:
    """Returns the algorithm of a product of 16-bit elements in one kernel, summed or with gathered rows."""
    rows, columns = sum(work.parts), work.columns
    # With a codec or an epilogue each rank sums its own rows, which no skinny kernel does.
    itemsize = work.factors.sent_itemsize
    skinny = not work.codec and not work.epilogue and is_skinny(world_size, rows, columns, itemsize)
    takers = with_kernels(work.summing_op)
    fitting = [taker for taker in takers if taker.row.is_skinny == skinny] or takers  # not every op has skinny kernels
    return next(taker for taker in fitting if taker.row.suits(table, world_size, itemsize * rows * columns))


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
    """Returns whether a result [m, n] has at least as many tiles of 128 x 128 as there are SMs."""
    return -(-m // WAVE_TILE) * -(-n // WAVE_TILE) >= sms


@functools.lru_cache(maxsize=1024)
def _nearest(measured: tuple[MeasuredMatmul, ...], m: int, n: int, k: int) -> MeasuredMatmul:
    """Returns the shape whose M, N and K differ from ``m``, ``n`` and ``k`` by the least product of factors."""
    shape = [max(length, 1) for length in (m, n, k)]
    return min(measured, key=lambda other: sum(abs(math.log2(a / b)) for a, b in zip(other[:3], shape, strict=True)))


def prefers_tiles(
    policy: MatmulPolicy,
    chip: Chip,
    world_size: int,
    rows: int,
    columns: int,
    scattered: bool = False,
    codec: str = "",
    factors: Factors = PLAIN,
) -> bool:
    """Returns whether one fused kernel was measured to be faster than a matmul followed by its sum.

    The result is [rows, columns]. ``scattered`` says whether each rank sums its own rows even of a skinny result, which
    no skinny kernel does: in a reduce-scatter, or with an epilogue. ``codec`` is the text of the codec on the wire.
    Tiles of e4m3 operands and of fp32 partials have the same threshold as other tiles (e4m3, 512 x 8192 between two
    H200s: 49.7 us in tiles, 56.1 us in two steps). Nothing was measured where more than two communicators share a GPU:
    a fused kernel has only a share of its SMs.
    """
    if chip.communicators > 2:
        return False
    if not scattered and not codec and is_skinny(world_size, rows, columns, factors.sent_itemsize):
        if factors.most_skinny_rows and rows > factors.most_skinny_rows:
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


def may_take_one_kernel(work: Product, dtype: torch.dtype) -> bool:
    """Whether some chip has a kernel that multiplies and sums ``work``, whose result has ``dtype``."""
    if work.norm or work.partition not in ("auto", "tiles", BATCH_INVARIANT, TP_INVARIANT):
        return False
    if work.columns % COLUMNS or dtype not in MATMUL_TYPES or (work.codec and not work.factors.is_plain):
        return False
    return not work.codec or travels_in_tiles(codec_of_text(work.codec), work.columns)


def takes_one_kernel(work: Product, policy: MatmulPolicy, chip: Chip, world_size: int) -> bool:
    """Whether one kernel multiplies and sums: it can, and the call asks for it, or it was measured to be faster."""
    if why_not_columns(work, chip, world_size):
        return False
    if work.partition == "tiles":
        return True
    shape, scattered = (sum(work.parts), work.columns), work.scattered or work.epilogue is not None
    return prefers_tiles(policy, chip, world_size, *shape, scattered, work.codec, work.factors)


def why_not_columns(work: Product, chip: Chip, world_size: int) -> Reason | None:
    """Returns why no kernel sums tiles of the work's columns. The answer is the same on every rank."""
    if chip.arch != MATMUL_ARCH:
        return f"a rank's device is not of {MATMUL_ARCH}"
    if summed_rows_a_launch(work, world_size) < 4 * MATMUL_BOX_ROWS:
        return f"{work.columns} columns are too many for its scratch"
    return None


def summed_rows_a_launch(work: Product, world_size: int) -> int:
    """Returns how many rows of each rank's part one launch sums. Partials take several places in the scratch."""
    return rows_a_launch(world_size, work.columns, work.factors.sent_places)


# ---- the tiles of fused kernels -------------------------------------------------------------------------------------


def tiles_that_serve(algorithm: Algorithm, work: Product, world_size: int) -> Kind:
    """Returns the tiles that a fused algorithm has for a product's factors and for what it sends."""
    factors = work.factors._replace(own=False)
    leaves = work.leaves(world_size) if factors.as_tree and algorithm.row.sends_tiles else 0
    return _kind(algorithm, factors, leaves, bool(work.codec))


@functools.cache
def _kind(algorithm: Algorithm, factors: Factors, leaves: int, is_encoded: bool) -> Kind:
    row = algorithm.row
    if row.is_skinny or (factors.is_plain and not (leaves or is_encoded)):
        return Kind(row.tiles, factors)
    if leaves:
        return Kind(PARTIAL_TILES[leaves])
    if factors.is_plain:
        return Kind(narrow(row.tiles))
    reduced = REDUCED_FP8_TILES if algorithm.op == MATMUL_ALLREDUCE else SCATTERED_FP8_TILES
    return Kind(reduced, factors) if row.sends_tiles else gathered(factors)


def tiles_to_load(
    policy: MatmulPolicy, algorithm: Algorithm, work: Product, chip: Chip, world_size: int
) -> tuple[MatmulTile | SkinnyTile, ...]:
    """Returns the tiles of a fused kernel that all ranks load; each takes one of them.

    Large sums take measured tiles. Large sums of partials take a tile of the same shape. Small sums, and sums of e4m3
    operands, take a tile by an estimate. Tiles of a sum have equally many columns, so that warpgroup tiles have the
    same width on ranks with different K: :func:`tile_for`.
    """
    kind, as_tree = tiles_that_serve(algorithm, work, world_size), work.factors.as_tree
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
        if alike := [candidate for candidate in kind.tiles if candidate.size == tile.size]:
            return (alike[0],)
    kind = _without(kind, policy.large_tile, policy.alternating_tile) if work.factors.is_plain else kind
    return (best_tile(kind, Shape(work.parts, work.columns, _TYPICAL_K), policy.cost, chip),)


@functools.cache
def _without(kind: Kind, *measured: MatmulTile) -> Kind:
    """Returns the tiles of a kind that are for small results: not those that were measured on large results."""
    return Kind(tuple(tile for tile in kind.tiles if tile not in measured))


def tile_for(policy: MatmulPolicy, tiles: tuple[Tile, ...], k: int) -> Tile:
    """Returns which of the tiles of :func:`tiles_to_load` a rank takes whose operands have ``k`` columns."""
    return tiles[0 if k < policy.alternating_below_k else -1]

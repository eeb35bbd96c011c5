"""The tiles of graphar's matmuls: the blocks of a result that one thread block computes at a time."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from graphar.numerics.codecs import Codec

LAYOUTS = ("by_rows", "by_columns")  # layouts of the weight: OperandLayout in cuda_src/device/matmul/tiles.cuh

LEAF_COUNTS = (1, 2, 4, 8)  # leaves of a rank: of all 8 ranks, of 4, of 2 and of one (graphar.numerics.leaf_tree)


@dataclass(frozen=True)
class MatmulTile:
    """A tile of a matmul C = A W^T with many rows. Kernels do not compile for a tile that they cannot compute."""

    rows: int  # rows of C: 64, 128 or 192
    columns: int  # columns of C: 64, 128, 160, 192, 224 or 256
    stages: int  # pipeline stages in shared memory, of 128 bytes of K each: 64 elements of 16 bits, 128 of 8
    cluster: int = 1  # thread blocks of a cluster: their tiles lie below each other in C, and they load W together
    # Whether shared memory holds a whole finished tile, as kernels need that send it to other ranks. Otherwise it holds
    # two boxes of each warpgroup, or with three warpgroups one box of each.
    whole: bool = False
    # Whether two consumer warpgroups compute separate tiles, so that one multiplies while the other finishes its tile.
    # Otherwise each warpgroup computes 64 rows of the same tile.
    alternating: bool = False
    # Leaves into which K is cut, added as a binary tree: 1, 2, 4 or 8. The caller chooses them; tables have none.
    leaves: int = field(default=1, metadata={"measured": False})
    # Thread blocks of a cluster that compute the leaves of one tile together, equally many each: 1, 2, 4 or 8.
    split: int = field(default=1, metadata={"measured": False})
    # The same for tiles of the last round, if that round would leave SMs idle; 1: all rounds are alike.
    tail_split: int = field(default=1, metadata={"measured": False})
    # Whether shared memory has room for the whole tile in fp32, for other ranks to add it to their tiles as a tree.
    partials: bool = field(default=False, metadata={"measured": False})

    @property
    def of_tail(self) -> MatmulTile | None:
        """The tile of the last round, as large as this tile; None if the last round is like the others."""
        return split_tile(self.rows, self.columns, self.leaves, self.tail_split) if self.tail_split > 1 else None

    @property
    def threads(self) -> int:
        """Threads of a block: one warpgroup that loads, and the consumer warpgroups."""
        return 128 + 128 * self.consumers

    @property
    def blocks(self) -> int:
        """Thread blocks of a cluster."""
        return self.cluster * self.split

    @property
    def consumers(self) -> int:
        """Number of warpgroups that compute."""
        return 2 if self.alternating else self.rows // 64

    @property
    def shared_nbytes(self) -> int:
        """Dynamic shared memory of a block, as the kernels' ring of stages lays it out."""
        loaded = self.stages * (self.rows + self.columns) * 128
        boxes = -(-self.columns // 64)
        staged = boxes if self.whole else min(boxes, 2 if self.consumers <= 2 else 1)
        if self.spills or self.split > 1 or self.partials:
            staged = self.columns // 32
        mbarriers = 2 * (self.stages + (self.consumers if self.split > 1 else 0))
        return loaded + self.consumers * staged * 8192 + mbarriers * 8

    @property
    def spills(self) -> bool:
        """Whether the sum of the first half of the leaves waits in shared memory: registers do not hold all nodes."""
        nodes = (self.leaves // self.split).bit_length()  # at the same time
        return nodes * self.columns // 2 > 192  # a thread has half as many sums of a node as columns

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts of the weight that it serves: boxes of a weight by columns have 64 columns."""
        return LAYOUTS if self.columns % 64 == 0 else LAYOUTS[:1]

    def __str__(self) -> str:
        flags = [str(flag).lower() for flag in (self.whole, self.alternating)]
        more = [self.split, "true"] if self.partials else [self.split] if self.split > 1 else []
        arguments = [self.rows, self.columns, self.stages, self.cluster, *flags, self.leaves, *more]
        return f"MatmulTile<{', '.join(map(str, arguments))}>"


@dataclass(frozen=True)
class SkinnyTile:
    """A tile of a skinny matmul (at most 64 rows). One thread block computes it, and its sum over the ranks."""

    columns: ClassVar[int] = 64  # columns of the result, equal for all tiles
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS  # the layouts of the weight that it serves

    rows: int  # the most rows that the result may have: 8, 16, 32 or 64
    stages: int  # pipeline stages in shared memory, of 64 of K each
    cluster: int = 1  # thread blocks of a cluster: their tiles lie side by side in the result, and they load A together
    leaves: int = 1  # leaves into which K is cut, added as a binary tree: 1, 2 or 4
    partials: bool = False  # whether other ranks get the sums in fp32, and add them to their sums as a tree

    @property
    def threads(self) -> int:
        """Threads of a block: a computing warpgroup and a loading warp, and at least one for each received pack."""
        return max(160, 8 * self.rows)

    @property
    def shared_nbytes(self) -> int:
        """Dynamic shared memory of a block, as the kernels' ring of stages lays it out."""
        return self.stages * ((self.columns + self.rows) * 128 + 16) + (16384 if self.partials else 8192)

    def __str__(self) -> str:
        arguments = [self.rows, self.stages, self.cluster, *([self.leaves, "true"] if self.partials else [])]
        return f"SkinnyTile<{', '.join(map(str, arguments))}>"


# Rows and columns of tiles whose leaves are split, and their stages.
_SPLIT_STAGES = {(64, 64): 13, (64, 128): 8, (128, 128): 5}


def split_tile(rows: int, columns: int, leaves: int, split: int) -> MatmulTile:
    """Returns a tile whose leaves ``split`` thread blocks compute. It has the size of a tile that is listed below."""
    return MatmulTile(rows, columns, _SPLIT_STAGES[rows, columns], leaves=leaves, split=split)


def _tiles(*sizes: Any, **how: Any) -> tuple[MatmulTile, ...]:
    return tuple(MatmulTile(*size, **how) for size in sizes)


# The tiles of the plain matmul. Their areas differ little: for most shapes one leaves few SMs idle in its last round.
MATMUL_TILES = (
    *_tiles((64, 64, 12), (64, 128, 8), (64, 160, 7), (64, 192, 6)),
    *_tiles((128, 128, 6), (128, 160, 5), (128, 192, 4), alternating=True),
    *_tiles((128, 224, 4), (128, 256, 4, 2), (192, 128, 5), (192, 160, 4), (192, 192, 4)),
)
# The tiles of the plain matmul, by the leaves of K. More leaves need more registers, or shared memory. A few tiles with
# a long K, of a whole result or of its last round, keep more SMs busy if their leaves are split.
LEAF_TILES = {
    1: MATMUL_TILES,
    2: (
        *_tiles((64, 64, 12), (64, 128, 8), (64, 160, 7), leaves=2),
        *_tiles((128, 96, 6), (128, 128, 6), (128, 160, 5), (128, 192, 4), leaves=2),
    ),
    4: (
        *_tiles((64, 64, 12), (64, 128, 8), (64, 160, 6), leaves=4),
        *_tiles((128, 96, 6), (128, 128, 6), (128, 160, 4), (128, 192, 3), leaves=4),
        *(split_tile(64, columns, leaves=4, split=4) for columns in (64, 128)),
    ),
    8: (
        *_tiles((64, 64, 12), (64, 128, 8), (128, 96, 6), (128, 128, 5), leaves=8),
        MatmulTile(128, 128, stages=5, leaves=8, tail_split=4),
        *(split_tile(rows, 128, leaves=8, split=split) for rows in (64, 128) for split in (4, 8)),
    ),
}
# The tiles of matmuls that gather rows. All are loaded together, since ranks may choose different ones.
GATHERED_TILES = (
    *_tiles((64, 64, 12), (64, 128, 8), (64, 160, 7)),
    *_tiles((128, 128, 6), (128, 160, 5), (128, 192, 4), (128, 256, 4, 2)),
)
# The tiles of the plain matmul of e4m3 operands. A thread has the totals of its part of the tile in registers, and the
# sums of two blocks of K besides, or of one in tiles of 192 columns: those need two warpgroups, so that one multiplies
# while the other adds. Wider tiles do not fit.
FP8_TILES = (
    *_tiles((64, 64, 12), (64, 128, 8)),
    *_tiles((128, 128, 6), (128, 128, 6, 2), (128, 192, 4), (128, 192, 4, 2)),
)
# The tiles of matmuls that send finished tiles to other ranks.
SUMMED_TILES = (
    *_tiles((64, 64, 12), (64, 128, 8), (64, 256, 4), whole=True),
    MatmulTile(64, 128, stages=7, cluster=2, whole=True, alternating=True),
    *_tiles((128, 128, 6), (128, 128, 6, 2), (128, 192, 4), (128, 256, 3), (128, 256, 3, 2), whole=True),
)
# The tiles of matmuls of e4m3 operands that send finished tiles to other ranks. The warps that gather the sums of other
# ranks, in an all-reduce, leave too few registers for 192 columns.
SCATTERED_FP8_TILES = tuple(replace(tile, whole=True) for tile in FP8_TILES)
REDUCED_FP8_TILES = tuple(tile for tile in SCATTERED_FP8_TILES if tile.columns <= 128)
# The tiles of matmuls that send partials, added as a tree, by the leaves of a rank: of 8 ranks, of 4 and of 2.
PARTIAL_TILES = {
    leaves: _tiles(
        (64, 64, 12), (64, 128, 8), (128, 128, 5), (128, 128, 5, 2), whole=True, leaves=leaves, partials=True
    )
    for leaves in (1, 2, 4)
}
# The tiles that a tuning table may name: ranks with different K take different tiles, which have as many columns.
NAMED_TILES = tuple(tile for tile in SUMMED_TILES if tile.columns == 128)
# Each tile takes most of an SM's shared memory: loads in flight are worth more than room for the next kernel's block.
# From 32 rows on, A has half as many bytes as W or more, so a cluster loads A only once.
SKINNY_TILES = (SkinnyTile(8, 22), SkinnyTile(16, 20), SkinnyTile(32, 16, cluster=2), SkinnyTile(64, 12, cluster=2))


T = TypeVar("T", bound=MatmulTile | SkinnyTile)


def narrow(tiles: tuple[T, ...]) -> tuple[T, ...]:
    """Returns the ``tiles`` that kernels can encode: the others leave too few registers."""
    return tuple(tile for tile in tiles if tile.columns <= 128)


def skinny_tile(rows: int, leaves: int | None = None) -> SkinnyTile:
    """Returns the smallest tile for at most 64 rows; with ``leaves`` of a rank, sums are added to others as a tree."""
    tile = next(tile for tile in SKINNY_TILES if tile.rows >= rows)
    return tile if leaves is None else replace(tile, leaves=leaves, partials=True)


def travels_in_tiles(codec: Codec, columns: int) -> bool:
    """Returns whether ``codec`` can encode the tiles of a result with ``columns``: rows must be whole buckets."""
    kind = codec.rounding, codec.scheme, codec.feedback
    return kind == ("nearest", "absmax", False) and codec.bucket_size <= 64 and columns % codec.bucket_size == 0

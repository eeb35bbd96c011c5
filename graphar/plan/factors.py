"""Factors: what a product multiplies, and in which order it adds; one value.

Whatever depends on the format of the operands or on the order asks here, so that no other module needs to know the
formats: there are scales of rows, and scales of blocks of 128 columns.
"""

from __future__ import annotations

from typing import NamedTuple

from graphar.numerics.fp8_products import BLOCK
from graphar.plan.scratch import MATMUL_PARTIAL_PLACES, PACK_NBYTES
from graphar.plan.tiles import LAYOUTS

FORMATS = ("rows", "blocks")  # what each scale of e4m3 operands is for
_TEMPLATES = {"rows": "RowScales", "blocks": "BlockScales"}  # classes of cuda_src/device/matmul/scaled_products.cuh


class Factors(NamedTuple):
    """The factors A and W of a product. ``str()`` is the C++ class of their format, or an empty string.

    The words on which ranks agree contain this class, and so do the names of kernels.
    """

    format: str = ""  # one of FORMATS: operands are e4m3, results have 16 bits; an empty string: both have one dtype
    order: str = "rank"  # "rank": products are rounded, and added in the order of ranks; "tree": leaves of K, in fp32

    def __str__(self) -> str:
        return _TEMPLATES[self.format] if self.format else ""

    @property
    def inputs(self) -> int:
        """How many tensors a rank's factors have."""
        return 4 if self.format else 2

    @property
    def words(self) -> str:
        """What must be the same on all ranks, in words; empty if operands have the dtype of the result."""
        return f"products of e4m3 operands with scales of {self.format}" if self.format else ""

    @property
    def multiplied_by(self) -> str:
        """What multiplies operands of 8 bits, in words."""
        return f"graphar's scaled matmul of e4m3 operands with scales of {self.format}"

    @property
    def is_plain(self) -> bool:
        """Whether operands have the dtype of results, and no scales."""
        return not self.format

    @property
    def layouts(self) -> tuple[str, ...]:
        """The layouts of W that kernels load. Tensor cores cannot transpose e4m3."""
        return LAYOUTS[:1] if self.format else LAYOUTS

    @property
    def most_skinny_rows(self) -> int | None:
        """The most rows that a skinny kernel multiplies fast; None: as many as it takes.

        It has registers for the sums of one block of 64 rows only, and adds them while nothing is multiplied: 74 us for
        64 x 8192 x 14336 between two H200s, and 34 with scales of rows.
        """
        return 32 if self.format == "blocks" else None

    @property
    def clustered(self) -> float | None:
        """The cost of clusters of a matmul alone, as TileCost has it; None: the cost measured with 16 bits."""
        return 0.92 if self.format == "blocks" else None  # H100

    def k_of_16_bits(self, k: int) -> int:
        """Returns the columns of 16-bit operands that take as long: 128 of e4m3 have the bytes of 64."""
        return max(k // 2, 1) if self.format else k

    def row_nbytes(self, k: int) -> int:
        """Returns the bytes of a row of A with ``k`` columns on its way to another rank, in whole packs."""
        packs = -(-k * (1 if self.format else 2) // PACK_NBYTES)
        of_row = {"": 0, "rows": 1, "blocks": -(-k // BLOCK)}[self.format]  # `of_row` in scaled_products.cuh
        return packs * PACK_NBYTES + 4 * of_row

    @property
    def as_tree(self) -> bool:
        """Whether leaves of K are added in fp32 as a tree; else rounded products, in the order of ranks."""
        return self.order == "tree"

    @property
    def sent_itemsize(self) -> int:
        """The bytes of an element that a rank sends to be summed in a product of 16-bit elements."""
        return 4 if self.as_tree else 2

    @property
    def sent_places(self) -> int:
        """How many places in the scratch a box of elements takes."""
        return MATMUL_PARTIAL_PLACES if self.as_tree else 1


PLAIN = Factors()

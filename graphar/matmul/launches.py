"""Launch parameters and grid of each fused kernel.

Grids are equal on all ranks, and leave SMs free. Kernels of tiles start only after the previous kernel in the stream
has ended. So another communicator's kernels find room: (18) in cuda_src/device/sync/kernel_order.cuh.
"""

from __future__ import annotations

from graphar.matmul.gemm import STORE_ROWS, Order, operand_maps
from graphar.matmul.tensor_maps import BOX_COLUMNS, Matrix, tensor_map
from graphar.plan.policy import shared_blocks
from graphar.plan.slices import Slice
from graphar.plan.tiles import MatmulTile, SkinnyTile
from graphar.runtime.arguments import MatmulArguments
from graphar.runtime.launcher import Grid

Matrices = tuple[Matrix, Matrix, Matrix]  # A, W as it lies in memory, and the rows of the result that a launch writes
Pointers = tuple[int, int]  # the addresses of the bias and of the timeline; 0 for none


def bind(
    tile: MatmulTile | SkinnyTile, layout: str, matrices: Matrices, pointers: Pointers, one: Slice, sms: int
) -> tuple[list, Grid]:
    """Returns the kernel's parameters, without the collective arguments, and its grid.

    ``one`` has the rows of each rank, and ``sms`` are the SMs of the ranks' devices, of unequal ones the fewest.
    The skinny kernels ignore ``one``, since they take one launch, and write no timeline.
    """
    if isinstance(tile, SkinnyTile):
        return _skinny(tile, matrices, pointers, sms)
    return _summed_tiles(tile, layout, matrices, pointers, one, sms)


def _summed_tiles(
    tile: MatmulTile, layout: str, matrices: Matrices, pointers: Pointers, one: Slice, sms: int
) -> tuple[list, Grid]:
    (a, w, out), (bias, timeline) = matrices, pointers
    n = w.rows if layout == "by_rows" else w.columns
    tiles = sum(-(-count // (tile.rows * tile.cluster)) for count in one.count) * -(-n // tile.columns)
    blocks = min(shared_blocks(sms, tile.cluster), tiles * tile.cluster)
    sizes = MatmulArguments(bias, a.rows, n, a.columns, 0, Order.group_rows, timeline)
    grid = Grid(blocks, tile.threads, tile.shared_nbytes, overlaps=False, cluster=tile.cluster)
    return [*operand_maps(tile, layout, a, w), tensor_map(out, STORE_ROWS), sizes], grid


def _skinny(tile: SkinnyTile, matrices: Matrices, pointers: Pointers, sms: int) -> tuple[list, Grid]:
    a, w, out = matrices
    clusters = -(-out.columns // (tile.columns * tile.cluster))
    blocks = min(shared_blocks(sms, tile.cluster), clusters * tile.cluster)
    grid = Grid(blocks, tile.threads, tile.shared_nbytes, overlaps=True, cluster=tile.cluster)
    sizes = MatmulArguments(pointers[0], out.rows, out.columns, a.columns)
    return [tensor_map(w, BOX_COLUMNS), tensor_map(a, box_rows(tile, out.rows)), sizes], grid


def box_rows(tile: SkinnyTile, rows: int) -> int:
    """Returns the rows of A that each block of a cluster loads: `share` in the kernel."""
    return -(-rows // (8 * tile.cluster)) * 8

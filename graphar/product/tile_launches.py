"""Launch parameters and grid of each fused kernel of a matmul.

Grids leave SMs free. Kernels of tiles start only after the previous kernel in the stream has ended. So another
communicator's kernels find room: (18) in cuda_src/device/sync/kernel_order.cuh. The grids of sums are equal on all
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphar.plan.policy import Chip
from graphar.plan.scratch import gathered_slot_offset
from graphar.plan.slices import Slice
from graphar.plan.tiles import MatmulTile, SkinnyTile
from graphar.product.gemm import GROUP_ROWS, STORE_ROWS, operand_maps, rows_map, weight_map
from graphar.product.operands import Placed, kernel_arguments
from graphar.product.tensor_maps import BOX_COLUMNS, Matrix, TensorMap, matrix_of, tensor_map
from graphar.runtime.arguments import Arguments, MatmulArguments
from graphar.runtime.launcher import Grid

Tile = MatmulTile | SkinnyTile


@dataclass(frozen=True)
class Matrices:
    """The memory of one rank's operands and result, for the tensor maps of a launch."""

    a: Matrix
    w: Matrix  # as it lies in memory
    layout: str  # the layout of W, one of LAYOUTS
    out: torch.Tensor  # [M, N]
    bias: int = 0  # the address of the bias; 0 without one
    constant_weight: bool = False  # whether W may be loaded while the kernel before still runs
    beside: Placed | None = None  # the scales of operands in e4m3

    @property
    def key(self) -> tuple:
        """Equal where all memory has the same addresses and is read alike."""
        out = self.out.data_ptr(), self.out.shape
        return self.a, self.w, self.layout, *out, self.bias, self.constant_weight, self.beside

    @property
    def columns(self) -> int:
        return self.w.rows if self.layout == "by_rows" else self.w.columns


def _arguments(matrices: Matrices, rows: int, **more: int) -> MatmulArguments:
    """Returns the arguments of a matmul of this number of rows."""
    return kernel_arguments(matrices.beside, matrices.bias, rows, matrices.columns, matrices.a.columns, **more)


def summed_tiles(
    tile: MatmulTile, matrices: Matrices, piece: Slice, arguments: Arguments, rows: slice, chip: Chip
) -> tuple[list, Grid]:
    """Returns the parameters of a kernel that sums tiles, without the collective arguments, and its grid.

    ``rows`` are those of ``out`` that the launch writes. ``chip`` is what the ranks' devices have in common.
    """
    tiles = sum(-(-count // (tile.rows * tile.cluster)) for count in piece.count) * -(-matrices.columns // tile.columns)
    blocks = min(chip.shared_blocks(cluster=tile.cluster), tiles * tile.cluster)
    sizes = _arguments(matrices, matrices.a.rows, group_rows=GROUP_ROWS)
    grid = Grid(blocks, tile.threads, tile.shared_nbytes, overlaps=False, cluster=tile.cluster)
    # A rank without rows writes nothing, but the kernel needs a valid tensor map.
    out = matrix_of(matrices.out[rows]) or matrices.a
    return [*operand_maps(tile, matrices.layout, matrices.a, matrices.w), tensor_map(out, STORE_ROWS), sizes], grid


def skinny(
    tile: SkinnyTile, matrices: Matrices, piece: Slice, arguments: Arguments, rows: slice, chip: Chip
) -> tuple[list, Grid]:
    """Returns what :func:`summed_tiles` returns, of a skinny kernel. It takes one launch."""
    rows_of_out, columns = matrices.out.shape
    clusters = -(-columns // (tile.columns * tile.cluster))
    blocks = min(chip.shared_blocks(cluster=tile.cluster), clusters * tile.cluster)
    grid = Grid(blocks, tile.threads, tile.shared_nbytes, chip.may_overlap(blocks, halves=False), cluster=tile.cluster)
    sizes = _arguments(matrices, rows_of_out, constant_weight=matrices.constant_weight)
    return [tensor_map(matrices.w, BOX_COLUMNS), tensor_map(matrices.a, box_rows(tile, rows_of_out)), sizes], grid


def box_rows(tile: SkinnyTile, rows: int) -> int:
    """Returns the rows of A that each block of a cluster loads: `share` in the kernel."""
    return -(-rows // (8 * tile.cluster)) * 8


def gathered_tiles(
    tile: MatmulTile, matrices: Matrices, piece: Slice, arguments: Arguments, rows: slice, chip: Chip
) -> tuple[list, Grid]:
    """Returns what :func:`summed_tiles` returns, of a kernel that gathers rows; ``chip`` may differ between ranks."""
    k, (m, n), world_size, rank = matrices.a.columns, matrices.out.shape, arguments.world_size, arguments.rank
    a_maps, c_maps = (TensorMap * world_size)(), (TensorMap * world_size)()
    for source, (begin, count) in enumerate(zip(piece.begin, piece.count, strict=True)):
        if not count:  # nothing reads its maps
            continue
        if source == rank:
            pointer = matrices.a.pointer + piece.offset * matrices.a.leading * matrices.a.dtype.itemsize
        else:
            hops = (source - rank) % world_size
            pointer = arguments.scratch[rank] + gathered_slot_offset(world_size, arguments.capacity, hops)
        a_maps[source] = rows_map(tile, Matrix(pointer, matrices.a.dtype, count, k, matrices.a.leading))
        c_maps[source] = tensor_map(matrix_of(matrices.out[begin : begin + count]), STORE_ROWS)
    sizes = _arguments(matrices, m, from_row=piece.offset, group_rows=GROUP_ROWS)
    of_tiles = sum(-(-count // (tile.rows * tile.cluster)) for count in piece.count)
    blocks = min(chip.shared_blocks(cluster=tile.cluster), of_tiles * -(-n // tile.columns) * tile.cluster)
    grid = Grid(blocks, tile.threads, tile.shared_nbytes, overlaps=False, cluster=tile.cluster)
    return [a_maps, weight_map(tile, matrices.layout, matrices.w), c_maps, sizes], grid

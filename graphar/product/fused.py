"""Fused kernels: a matmul, with the sum of its products over ranks or the all-gather of its rows, in one launch."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace

import torch

from graphar.errors import UnsupportedError
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.code import Corner
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.matmuls import (
    Shape,
    best_tile,
    summed_rows_a_launch,
    tile_for,
    tiles_that_serve,
    tiles_to_load,
    why_not_columns,
)
from graphar.plan.policy import Chip
from graphar.plan.scratch import PACK_NBYTES, gathered_slot_offset
from graphar.plan.slices import Slice, gathered_rows_a_launch, row_slices
from graphar.plan.tiles import MatmulTile, SkinnyTile
from graphar.plan.work import ALLGATHER_MATMUL, Product
from graphar.product.gemm import (
    GROUP_ROWS,
    STORE_COLUMNS,
    STORE_ROWS,
    Matrices,
    layout_of,
    rows_map,
    weight_map,
    why_not,
)
from graphar.product.multiply import in_whole_loads
from graphar.product.operands import MatmulOperands, operands_of
from graphar.product.tensor_maps import (
    BOX_COLUMNS,
    TensorMap,
    aligned_copy,
    aligned_like,
    matrix_of,
    tensor_map,
)
from graphar.ranks import agreement
from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments
from graphar.runtime.bind.launches import bind_launch, on_own_device, put_agreed, runner_of
from graphar.runtime.catalogue import KernelSource, fused_matmul_source
from graphar.runtime.engine import Engine
from graphar.runtime.launcher import Grid
from graphar.runtime.launcher import Launch as KernelLaunch
from graphar.runtime.member import Member
from graphar.runtime.plan import BoundedCache, Launch, Plan
from graphar.runtime.runner import Runner

Tile = MatmulTile | SkinnyTile


# ---- launch parameters and grids ------------------------------------------------------------------------------------
#
# Grids leave SMs free. Kernels of tiles start only after the previous kernel in the stream has ended. So another
# communicator's kernels find room: (18) in cuda_src/device/sync/kernel_order.cuh. The grids of sums are equal on all
# ranks.


def _grid(tile: MatmulTile, matrices: Matrices, piece: Slice, chip: Chip) -> Grid:
    """Returns the grid of a kernel with a block for each tile, as far as there is room."""
    rows_of_tiles = sum(-(-count // (tile.rows * tile.cluster)) for count in piece.count)
    tiles = rows_of_tiles * -(-matrices.out.columns // tile.columns)
    blocks = min(chip.shared_blocks(cluster=tile.cluster), tiles * tile.cluster)
    return Grid(blocks, tile.threads, tile.shared_nbytes, overlaps=False, cluster=tile.cluster)


def summed_tiles(
    tile: MatmulTile, matrices: Matrices, piece: Slice, arguments: Arguments, first: int, chip: Chip
) -> tuple[list, Grid]:
    """Returns the parameters of a kernel that sums tiles, without the collective arguments, and its grid.

    ``first`` is the first row of ``out`` that the launch writes. ``chip`` is what the ranks' devices have in common.
    """
    sizes, grid = matrices.arguments(matrices.a.rows, group_rows=GROUP_ROWS), _grid(tile, matrices, piece, chip)
    # A rank without rows writes nothing, but the kernel needs a valid tensor map.
    count = piece.count[arguments.rank]
    out = matrices.out.part(first, count) if count else matrices.a
    maps = [rows_map(tile, matrices.a), weight_map(tile, matrices.layout, matrices.w), tensor_map(out, STORE_ROWS)]
    return [*maps, sizes], grid


def skinny(
    tile: SkinnyTile, matrices: Matrices, piece: Slice, arguments: Arguments, first: int, chip: Chip
) -> tuple[list, Grid]:
    """Returns what :func:`summed_tiles` returns, of a skinny kernel. It takes one launch."""
    rows, clusters = matrices.out.rows, -(-matrices.out.columns // (tile.columns * tile.cluster))
    blocks = min(chip.shared_blocks(cluster=tile.cluster), clusters * tile.cluster)
    grid = Grid(blocks, tile.threads, tile.shared_nbytes, chip.may_overlap(blocks, halves=False), cluster=tile.cluster)
    sizes = matrices.arguments(rows, constant_weight=matrices.constant_weight)
    return [tensor_map(matrices.w, BOX_COLUMNS), tensor_map(matrices.a, box_rows(tile, rows)), sizes], grid


def box_rows(tile: SkinnyTile, rows: int) -> int:
    """Returns the rows of A that each block of a cluster loads: `share` in the kernel."""
    return -(-rows // (8 * tile.cluster)) * 8


def gathered_tiles(
    tile: MatmulTile, matrices: Matrices, piece: Slice, arguments: Arguments, first: int, chip: Chip
) -> tuple[list, Grid]:
    """Returns what :func:`summed_tiles` returns, of a kernel that gathers rows."""
    world_size, rank = arguments.world_size, arguments.rank
    a_maps, c_maps = (TensorMap * world_size)(), (TensorMap * world_size)()
    for source, (begin, count) in enumerate(zip(piece.begin, piece.count, strict=True)):
        if not count:  # nothing reads its maps
            continue
        rows = matrices.a.part(piece.offset, count)
        if hops := (source - rank) % world_size:
            slot = gathered_slot_offset(world_size, arguments.capacity, hops)
            rows = replace(rows, pointer=arguments.scratch[rank] + slot)
        a_maps[source] = rows_map(tile, rows)
        c_maps[source] = tensor_map(matrices.out.part(begin, count), STORE_ROWS)
    sizes = matrices.arguments(matrices.out.rows, from_row=piece.offset, group_rows=GROUP_ROWS)
    maps = [a_maps, weight_map(tile, matrices.layout, matrices.w), c_maps]
    return [*maps, sizes], _grid(tile, matrices, piece, chip)


# ---- launches --------------------------------------------------------------------------------------------------------


def load_tile(runner: Runner, algorithm: Algorithm, dtype: torch.dtype, tile: Tile, work: Product) -> list[dict]:
    """Returns each member's kernels of a tile, by tile and layout of W. The first call for a tile is collective."""
    epilogue, wire = work.epilogue, codec_of_text(work.codec) if work.codec else None

    def load(member: Member) -> dict:
        return {
            kind: launcher.load(source, member.device, tile.shared_nbytes, algorithm.value)
            for kind, source in sources_of_tile(runner.world_size, algorithm, dtype, tile, work).items()
        }

    # The codec's type and not its text, which has the seed: ranks may have different seeds.
    follows = wire.type_name if wire else epilogue and epilogue.generated.name
    words = agreement.words_of_tile(algorithm, dtype, tile, work)
    return runner.kernels.prepare_all((algorithm, dtype, tile, follows, str(work.factors)), algorithm, words, load)


def sources_of_tile(
    world_size: int, algorithm: Algorithm, dtype: torch.dtype, tile: Tile, work: Product
) -> dict[tuple[Tile, str], KernelSource]:
    """Returns the sources of a tile's kernels, by tile and layout of W."""
    wire = codec_of_text(work.codec) if work.codec else None
    how = work.epilogue and work.epilogue.generated, wire, str(work.factors)
    kinds = [(tile, layout) for layout in tile.layouts if layout in work.factors.layouts]
    return {kind: fused_matmul_source(algorithm, dtype, world_size, *kind, *how) for kind in kinds}


class FusedMatmul:
    """The launches of one call by a fused kernel, bound to the addresses of the operands. Making it is collective.

    In a sum each finished tile is pushed to the rank that owns its rows. A rank computes its own rows last, and gathers
    the summed tiles of its peers meanwhile. The rows of a skinny result, at most 64, are not divided: either every rank
    pushes its whole product to all ranks (one-shot), or each rank sums a shard (two-shot). In an all-gather each tile
    begins when its rows have arrived.

    The engine has a runner. Ranks take ``tile``, or those that plans choose. UnsupportedError if no kernel serves.
    """

    def __init__(self, engine: Engine, call: Call[Product], algorithm: Algorithm, tile: Tile | None = None) -> None:
        self._engine, self._runner, self._call, self.algorithm = engine, runner_of(engine), call, algorithm
        self._tile, self._gathers = tile, call.op == ALLGATHER_MATMUL
        self._slices = self._cut(call.work)
        # The tiles whose kernels every rank loads: ranks may take different ones of them.
        chosen = tiles_to_load(engine.table.matmul, algorithm, call.work, self._runner.chip, engine.world_size)
        self.tiles = (tile,) if tile else chosen
        # Each member's kernels by tile and layout of W, in which ranks may differ.
        of_tiles = [load_tile(self._runner, algorithm, call.dtype, tile, call.work) for tile in self.tiles]
        self._functions = [dict(ChainMap(*of_member)) for of_member in zip(*of_tiles, strict=True)]
        self._launches: BoundedCache[Launch] = BoundedCache()

    def _cut(self, work: Product) -> list[Slice]:
        """Returns the slices of the call, each of one launch."""
        world_size = self._engine.world_size
        if self._gathers:
            step = gathered_rows_a_launch(self.algorithm, world_size, work.columns, work.factors)
            return row_slices(work.parts, step)
        if self.algorithm.row.is_skinny:  # chosen only for results that fit its scratch (plan.matmuls.is_skinny)
            return [Slice(sum(work.parts) * work.columns)]
        if reason := why_not_columns(work, self._runner.chip, world_size):
            raise UnsupportedError(f"{work.op}: {reason}")
        return row_slices(work.parts, summed_rows_a_launch(work, world_size))

    def plan(self, reason: str) -> Plan:
        """Returns the plan of a call by these launches, with the ``reason`` for them."""
        return Plan(self.run, Config(self.algorithm, 0, self.tiles[0].threads), reason, self.launch_like)

    def run(self, ranks: Sequence[Operands]) -> None:
        """Launches the kernels on the members' current streams, for the operands of each rank of this process."""
        wanted = [operands_of(self._call.work, of_rank) for of_rank in ranks]
        placed = [self._place(operands) for operands in wanted]
        with self._runner.lock:
            self._runner.raise_failure()  # before any member launches
            for piece in self._slices:
                for member, operands in zip(self._runner.members, placed, strict=True):
                    launch = on_own_device(member.device, self._launch(member, operands, piece))
                    launch(*self._tensors(member, operands, piece))
        for mine, taken in zip(wanted, placed, strict=True):
            for result, written in ((mine.out, taken.out), (mine.gathered, taken.gathered)):
                if result is not None and written is not None and written is not result:
                    result.copy_(written[:, : result.shape[1]])

    def launch_like(self, like: Operands) -> Launch | None:
        """Returns the launch of calls with tensors like these: see :class:`graphar.runtime.plan.Plan`."""
        work, mine = self._call.work, operands_of(self._call.work, like)
        if len(self._slices) > 1 or len(self._runner.members) > 1 or self._place(mine) is not mine:
            return None
        if mine.is_copy_of(like):
            return None
        (piece,), (member,) = self._slices, self._runner.members
        addressed = work.factors.inputs + work.bias  # inputs to whose addresses a launch is bound
        corner, launches = self._corner(member, mine, piece), BoundedCache[Launch]()
        first = int(work.gathered)  # the kernel gets the address of the gathered rows; those after it are bound
        unwanted = (mine.a.new_empty(0),) if self._gathers and not work.gathered else ()

        def launch(inputs, outputs, numbers, _=None) -> None:
            # Each launch is given the address of the gathered rows, but bound to those of the results after them.
            key = tuple([x.data_ptr() for x in (*inputs[:addressed], outputs[0], *outputs[2:])])
            bound = launches.get(key)
            if bound is None:
                operands = operands_of(work, Operands(inputs, outputs, numbers))
                if self._place(operands) is not operands:  # its addresses are not aligned as the others are
                    self.run([Operands(inputs, outputs, numbers)])
                    return
                bound = launches.keep(key, self._launch(member, operands, piece))
            bound((inputs[0], *inputs[addressed:]), unwanted or outputs[first:], numbers, corner)

        return launch

    def _place(self, operands: MatmulOperands) -> MatmulOperands:
        """Returns operands as kernels take them: the same ones, or copies where their alignment requires it."""
        placed = place_gathering(operands) if self._gathers else self._place_summed(operands)
        is_same = all(getattr(placed, name) is getattr(operands, name) for name in _PLACED)
        return operands if is_same else placed

    def _place_summed(self, operands: MatmulOperands) -> MatmulOperands:
        whole, leaves, out = operands.with_columns(), self._call.work.leaves(self._engine.world_size), operands.out
        a, w = in_whole_loads(whole.a, leaves), in_whole_loads(whole.w, leaves)
        given_k = None if a.shape[1] == operands.a.shape[1] else operands.a.shape[1]
        if not self._call.work.scattered and out.data_ptr() % PACK_NBYTES:
            out = torch.empty_like(out)
        w = w if layout_of(w) in operands.layouts else aligned_copy(w)
        placed = replace(
            whole,
            a=a if matrix_of(a) else aligned_copy(a),
            w=w,
            out=out,
            constant_weight=operands.constant_weight and w is operands.w,  # the kernel before writes a copy
            given_k=given_k,
        )
        if reason := why_not(placed.a, placed.w, placed.out):  # ranks may differ in alignment
            raise UnsupportedError(f"{self._call.op}: {reason}")
        return placed

    def _tensors(self, member: Member, operands: MatmulOperands, piece: Slice) -> tuple:
        """Returns what a launch is called with."""
        a, out = operands.a, operands.out
        if self._gathers:  # an empty tensor's address is null: the rows are not wanted
            a = a[piece.offset : piece.offset + piece.count[member.rank]]
            out = a.new_empty(0) if operands.gathered is None else operands.gathered
        return (a, *operands.tensors), (out,), operands.numbers, self._corner(member, operands, piece)

    def _corner(self, member: Member, operands: MatmulOperands, piece: Slice) -> Corner:
        """Returns where the epilogue's row, col and index of a launch begin, in this rank's result."""
        # A skinny result is not divided. A kernel that gathers adds where an owner's rows begin.
        if self._gathers or not piece.begin:
            first = 0
        else:
            first = piece.offset if self._call.work.scattered else piece.begin[member.rank]
        return first, 0, operands.out.shape[1]

    def _launch(self, member: Member, operands: MatmulOperands, piece: Slice) -> Launch:
        """Returns one member's launch of a slice, bound to the addresses of its operands; cached."""
        at = member.rank if self._engine.devices else 0
        matrices = Matrices.of(operands.step, operands.constant_weight, operands.gathered_scales)
        tile = self._tile_of(operands, piece, matrices.layout)
        key = member.rank, piece, tile, matrices, operands.given_k
        if (launch := self._launches.get(key)) is not None:
            return launch
        k = operands.a.shape[1] if operands.given_k is None else operands.given_k
        told = k if self._call.work.factors.as_tree and not self._gathers else None
        words = agreement.words_of_matmul_launch(self._call, self.algorithm, piece, told)
        seconds = self._engine.deadline(self._call)
        arguments = self._runner.arguments(member, self.algorithm, piece, seconds, words)
        first, *_ = self._corner(member, operands, piece)
        parameters, grid = self._parameters(tile, matrices, piece, arguments, first, self._runner.chip)
        launch = KernelLaunch(self._functions[at][tile, matrices.layout], [*parameters, arguments], grid)
        epilogue = self._call.work.epilogue
        put = epilogue and put_agreed(self._runner, arguments, words, epilogue, arguments.epilogue.put)
        return self._launches.keep(key, bind_launch(self._runner, member, launch, arguments, put))

    def _tile_of(self, operands: MatmulOperands, piece: Slice, layout: str) -> Tile:
        if not self._gathers:
            return tile_for(self._engine.table.matmul, self.tiles, operands.a.shape[1])
        # Each rank takes the one with the least estimated time for its weight.
        kind = tiles_that_serve(self.algorithm, self._call.work, self._engine.world_size)
        (n, k), cost = operands.w.shape, self._engine.table.matmul.cost
        return self._tile or best_tile(kind, Shape(piece.count, n, k, layout), cost, self._runner.chip)

    def _parameters(self, *launch) -> tuple[list, Grid]:
        """Returns the parameters of a launch, without the collective arguments, and its grid."""
        if self._gathers:
            return gathered_tiles(*launch)
        return (skinny if self.algorithm.row.is_skinny else summed_tiles)(*launch)


def place_gathering(operands: MatmulOperands) -> MatmulOperands:
    """Returns the operands of gathered tiles as kernels take them, in part copies."""
    k = operands.a.shape[1]
    operands = operands.with_features(STORE_COLUMNS)  # a rank without features sends its rows all the same
    # The rows are sent as they lie: without gaps, and each in whole packs.
    in_packs = k * operands.a.dtype.itemsize % PACK_NBYTES == 0
    whole = in_packs and operands.a.is_contiguous() and operands.a.data_ptr() % PACK_NBYTES == 0
    rows = operands.gathered
    return replace(
        operands,
        a=operands.a if whole else aligned_copy(operands.a),
        w=operands.w if layout_of(operands.w) in operands.layouts else aligned_copy(operands.w),
        out=operands.out if len(operands.w) % STORE_COLUMNS == 0 else aligned_like(operands.out),
        gathered=rows if rows is None or in_packs else aligned_like(rows),
    )


_PLACED = ("a", "w", "out", "gathered", "tensors")  # the fields that may be copies

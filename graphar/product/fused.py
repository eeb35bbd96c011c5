"""Fused kernels: a matmul, with the sum of its products over ranks or the all-gather of its rows, in one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphar.errors import UnsupportedError
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.code import Corner
from graphar.plan import matmuls
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import Config
from graphar.plan.policy import Chip
from graphar.plan.scratch import PACK_NBYTES, gathered_slot_offset
from graphar.plan.slices import Slice, gathered_rows_a_launch, row_slices
from graphar.plan.tiles import MatmulTile, SkinnyTile
from graphar.plan.work import ALLGATHER_MATMUL, Product
from graphar.product.gemm import GROUP_ROWS, STORE_COLUMNS, STORE_ROWS, Matrices, layout_of, rows_map, why_not
from graphar.product.multiply import in_whole_loads
from graphar.product.operands import MatmulOperands, operands_of
from graphar.product.tensor_maps import BOX_COLUMNS, TensorMap, aligned_copy, aligned_like, matrix_of, tensor_map
from graphar.ranks import agreement
from graphar.runtime import launcher
from graphar.runtime.arguments import Arguments
from graphar.runtime.bind.launches import bind_launch, on_own_device, put_agreed
from graphar.runtime.catalogue import KernelSource, fused_matmul_source
from graphar.runtime.engine import Engine, runner_of
from graphar.runtime.launcher import Grid
from graphar.runtime.launcher import Launch as KernelLaunch
from graphar.runtime.member import Member
from graphar.runtime.plan import BoundedCache, Launch, Plan
from graphar.runtime.runner import Runner

Tile = MatmulTile | SkinnyTile


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
    return runner.prepare_all((algorithm, dtype, tile, follows, str(work.factors)), algorithm, words, load)


def sources_of_tile(
    world_size: int, algorithm: Algorithm, dtype: torch.dtype, tile: Tile, work: Product
) -> dict[tuple[Tile, str], KernelSource]:
    """Returns the sources of a tile's kernels, by tile and layout of W."""
    wire = codec_of_text(work.codec) if work.codec else None
    how = work.epilogue and work.epilogue.generated, wire, str(work.factors)
    kinds = [(tile, layout) for layout in tile.layouts if layout in work.factors.layouts]
    return {kind: fused_matmul_source(algorithm, dtype, world_size, *kind, *how) for kind in kinds}


class Fused(ABC):
    """The launches of one call by a fused kernel, bound to the addresses of the operands. Making it is collective.

    The engine has a runner. Ranks take ``tile``, or those that plans choose. UnsupportedError if no kernel serves.
    """

    # From a tile, the matrices, the slice and the collective arguments to a launch's other parameters, and its grid.
    parameters: Callable[..., tuple[list, Grid]]
    _first_output = 0  # the first of a call's results whose address a launch is given

    def __init__(self, engine: Engine, call: Call[Product], algorithm: Algorithm, tile: Tile | None = None) -> None:
        self._engine, self._runner, self._call, self.algorithm = engine, runner_of(engine), call, algorithm
        self._tile, self._slices = tile, self._cut(call.work)
        # The tiles whose kernels every rank loads: ranks may take different ones of them.
        chosen = matmuls.tiles_to_load(engine.table.matmul, algorithm, call.work, self._runner.chip, engine.world_size)
        self.tiles = (tile,) if tile else chosen
        # Each member's kernels by tile and layout of W, in which ranks may differ.
        of_tiles = [load_tile(self._runner, algorithm, call.dtype, tile, call.work) for tile in self.tiles]
        self._functions = [dict(ChainMap(*of_member)) for of_member in zip(*of_tiles, strict=True)]
        self._launches: BoundedCache[Launch] = BoundedCache()

    @abstractmethod
    def _cut(self, work: Product) -> list[Slice]:
        """Returns the slices of the call, each of one launch."""

    @abstractmethod
    def _place(self, operands: MatmulOperands) -> MatmulOperands:
        """Returns operands as kernels take them: the same ones, or copies where their alignment requires it."""

    def _tile_of(self, operands: MatmulOperands, piece: Slice, layout: str) -> Tile:
        """Returns the tile that a rank takes, of those that all ranks load."""
        return matmuls.tile_for(self._engine.table.matmul, self.tiles, operands.a.shape[1])

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
        unwanted = (mine.a.new_empty(0),)  # in place of gathered rows: its address is null

        def launch(inputs, outputs, numbers, _=None) -> None:
            # Each launch is given the address of the gathered rows, but bound to the addresses of later results.
            key = tuple([x.data_ptr() for x in (*inputs[:addressed], outputs[0], *outputs[2:])])
            bound = launches.get(key)
            if bound is None:
                operands = operands_of(work, Operands(inputs, outputs, numbers))
                if self._place(operands) is not operands:  # its addresses are not aligned as the others are
                    self.run([Operands(inputs, outputs, numbers)])
                    return
                bound = launches.keep(key, self._launch(member, operands, piece))
            bound((inputs[0], *inputs[addressed:]), outputs[self._first_output :] or unwanted, numbers, corner)

        return launch

    def _tensors(self, member: Member, operands: MatmulOperands, piece: Slice) -> tuple:
        """Returns what a launch is called with."""
        corner = self._corner(member, operands, piece)
        return (operands.a, *operands.tensors), (operands.out,), operands.numbers, corner

    def _corner(self, member: Member, operands: MatmulOperands, piece: Slice) -> Corner:
        """Returns where the epilogue's row, col and index of a launch begin, in this rank's result."""
        return self._first_row(member.rank, piece), 0, operands.out.shape[1]

    def _first_row(self, rank: int, piece: Slice) -> int:
        return 0  # a kernel that gathers adds where an owner's rows begin

    def _launch(self, member: Member, operands: MatmulOperands, piece: Slice) -> Launch:
        """Returns one member's launch of a slice, bound to the addresses of its operands; cached."""
        at = member.rank if self._engine.devices else 0
        matrices = Matrices.of(operands.step, operands.constant_weight, operands.gathered_scales)
        tile = self._tile_of(operands, piece, matrices.layout)
        key = member.rank, piece, tile, matrices, operands.given_k
        if (launch := self._launches.get(key)) is not None:
            return launch
        k = operands.a.shape[1] if operands.given_k is None else operands.given_k
        told = k if self._call.work.as_tree and self._call.op != ALLGATHER_MATMUL else None
        words = agreement.words_of_matmul_launch(self._call, self.algorithm, piece, told)
        seconds = self._engine.deadline(self._call)
        arguments = self._runner.arguments(member, self.algorithm, piece, seconds, words)
        parameters, grid = self.parameters(tile, matrices, piece, arguments)
        launch = KernelLaunch(self._functions[at][tile, matrices.layout], [*parameters, arguments], grid)
        epilogue = self._call.work.epilogue
        put = epilogue and put_agreed(self._runner, arguments, words, epilogue, arguments.epilogue.put)
        return self._launches.keep(key, bind_launch(self._runner, member, launch, arguments, put))


# Grids leave SMs free. Kernels of tiles start only after the previous kernel in the stream has ended. So another
# communicator's kernels find room: (18) in cuda_src/device/sync/kernel_order.cuh. The grids of sums are equal on all
# ranks.


def _grid(tile: MatmulTile, matrices: Matrices, piece: Slice, chip: Chip) -> Grid:
    """Returns the grid of a kernel with a block for each tile, up to the room on the chip."""
    tiles = matmuls.tiles_of_clusters(tile, piece.count, matrices.out.columns)
    blocks = min(chip.shared_blocks(cluster=tile.cluster), tiles * tile.cluster)
    return Grid(blocks, tile.threads, tile.shared_nbytes, overlaps=False, cluster=tile.cluster)


def box_rows(tile: SkinnyTile, rows: int) -> int:
    """Returns the rows of A that each block of a cluster loads: `share` in the kernel."""
    return -(-rows // (8 * tile.cluster)) * 8


class Summed(Fused):
    """Pushes each finished tile to the rank that owns its rows.

    A rank computes its own rows last, and gathers the summed tiles of its peers meanwhile.
    """

    def _cut(self, work: Product) -> list[Slice]:
        return row_slices(work.parts, matmuls.summed_rows_a_launch(work, self._engine.world_size))

    def _place(self, operands: MatmulOperands) -> MatmulOperands:
        whole, leaves, out = operands.with_columns(), self._call.work.leaves(self._engine.world_size), operands.out
        a, w = in_whole_loads(whole.a, leaves), in_whole_loads(whole.w, leaves)
        given_k = None if a.shape[1] == operands.a.shape[1] else operands.a.shape[1]
        if not self._call.work.scattered and out.data_ptr() % PACK_NBYTES:
            out = torch.empty_like(out)
        w = w if layout_of(w) in self._call.work.factors.layouts else aligned_copy(w)
        placed = whole.placed(
            a=a if matrix_of(a) else aligned_copy(a),
            w=w,
            out=out,
            constant_weight=operands.constant_weight and w is operands.w,  # the kernel before writes a copy
            given_k=given_k,
        )
        if reason := why_not(placed.a, placed.w, placed.out):  # ranks may differ in alignment
            raise UnsupportedError(f"{self._call.op}: {reason}")
        return placed

    def _first_row(self, rank: int, piece: Slice) -> int:
        # A skinny result is not divided.
        return piece.offset if self._call.work.scattered or not piece.begin else piece.begin[rank]

    def parameters(self, tile: MatmulTile, matrices: Matrices, piece: Slice, arguments: Arguments) -> tuple[list, Grid]:
        # A rank without rows writes nothing, but the kernel needs a valid tensor map.
        rank, count = arguments.rank, piece.count[arguments.rank]
        out = matrices.out.part(self._first_row(rank, piece), count) if count else matrices.a
        maps = [rows_map(tile, matrices.a), matrices.weight_map(tile), tensor_map(out, STORE_ROWS)]
        sizes = matrices.arguments(matrices.a.rows, group_rows=GROUP_ROWS)
        return [*maps, sizes], _grid(tile, matrices, piece, self._runner.chip)


class Skinny(Summed):
    """Sums a result of at most 64 rows, which are not divided, and which fits the scratch of one launch.

    Either every rank pushes its whole product to all ranks (one-shot), or each rank sums a shard (two-shot).
    """

    def _cut(self, work: Product) -> list[Slice]:
        return [Slice(sum(work.parts) * work.columns)]

    def parameters(self, tile: Any, matrices: Matrices, piece: Slice, arguments: Arguments) -> tuple[list, Grid]:
        chip = self._runner.chip
        rows, clusters = matrices.out.rows, -(-matrices.out.columns // (tile.columns * tile.cluster))
        blocks = min(chip.shared_blocks(cluster=tile.cluster), clusters * tile.cluster)
        overlaps = chip.may_overlap(blocks, halves=False)
        grid = Grid(blocks, tile.threads, tile.shared_nbytes, overlaps, cluster=tile.cluster)
        sizes = matrices.arguments(rows, constant_weight=matrices.constant_weight)
        return [tensor_map(matrices.w, BOX_COLUMNS), tensor_map(matrices.a, box_rows(tile, rows)), sizes], grid


class Gathered(Fused):
    """Gathers the rows of all ranks, and begins each tile when its rows have arrived."""

    _first_output = 1  # the gathered rows: a launch is bound to the other results

    def _cut(self, work: Product) -> list[Slice]:
        step = gathered_rows_a_launch(self._engine.world_size, work.columns, work.factors)
        return row_slices(work.parts, step)

    def _place(self, operands: MatmulOperands) -> MatmulOperands:
        operands = operands.with_features(STORE_COLUMNS)  # a rank without features sends its rows all the same
        a, w, rows = operands.a, operands.w, operands.gathered
        # The rows are sent as they lie: without gaps, and each in whole packs.
        in_packs = a.shape[1] * a.dtype.itemsize % PACK_NBYTES == 0
        whole = in_packs and a.is_contiguous() and a.data_ptr() % PACK_NBYTES == 0
        return operands.placed(
            a=a if whole else aligned_copy(a),
            w=w if layout_of(w) in self._call.work.factors.layouts else aligned_copy(w),
            out=operands.out if len(w) % STORE_COLUMNS == 0 else aligned_like(operands.out),
            gathered=rows if rows is None or in_packs else aligned_like(rows),
        )

    def _tile_of(self, operands: MatmulOperands, piece: Slice, layout: str) -> Tile:
        # Each rank takes the one with the least estimated time for its weight.
        kind = matmuls.tiles_that_serve(self.algorithm, self._call.work, self._engine.world_size)
        (n, k), cost = operands.w.shape, self._engine.table.matmul.cost
        return self._tile or matmuls.best_tile(kind, matmuls.Shape(piece.count, n, k, layout), cost, self._runner.chip)

    def _tensors(self, member: Member, operands: MatmulOperands, piece: Slice) -> tuple:
        (a, *tensors), _, *more = super()._tensors(member, operands, piece)
        # An empty tensor's address is null: the rows are not wanted.
        rows = a.new_empty(0) if operands.gathered is None else operands.gathered
        return (a[piece.offset : piece.offset + piece.count[member.rank]], *tensors), (rows,), *more

    def parameters(self, tile: MatmulTile, matrices: Matrices, piece: Slice, arguments: Arguments) -> tuple[list, Grid]:
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
        maps = [a_maps, matrices.weight_map(tile), c_maps]
        return [*maps, sizes], _grid(tile, matrices, piece, self._runner.chip)


def fused_launches(engine: Engine, call: Call[Product], algorithm: Algorithm, tile: Tile | None = None) -> Fused:
    """Returns the launches of a call by the kernel of ``algorithm``. Collective."""
    kind = Gathered if call.op == ALLGATHER_MATMUL else Skinny if algorithm.row.is_skinny else Summed
    return kind(engine, call, algorithm, tile)

"""How an all-gather and a matmul overlap, and the way in one launch: each tile begins when its rows are here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from graphar.errors import UnsupportedError
from graphar.matmul.gathered_chunks import GatheredChunks
from graphar.matmul.gemm import STORE_COLUMNS, STORE_ROWS, Order, layout_of, weight_map
from graphar.matmul.operands import Gathering, alike
from graphar.matmul.tensor_maps import Matrix, TensorMap, aligned_copy, matrix_of, tensor_map
from graphar.numerics.epilogues.epilogue import EpilogueInputs
from graphar.plan.algorithms import MATMUL_ARCH, Algorithm
from graphar.plan.call import Call
from graphar.plan.matmuls import gathered_tile
from graphar.plan.policy import shared_blocks
from graphar.plan.scratch import PACK_NBYTES, gathered_slot_offset
from graphar.plan.slices import Slice, gathered_rows_a_launch, row_slices
from graphar.plan.tiles import GATHERED_TILES, LAYOUTS, MatmulTile
from graphar.runtime import launcher
from graphar.runtime.arguments import MatmulArguments
from graphar.runtime.bounded_cache import BoundedCache
from graphar.runtime.catalogue import fused_matmul_source
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.launcher import Grid, Launch
from graphar.runtime.runner import Member

ALGORITHM = Algorithm.ALLGATHER_MATMUL


def method_of(engine: Engine, partition: str, a: torch.Tensor, rows: int, has_epilogue: bool = False) -> str:
    """Returns how a call runs: as "tiles", in "chunks", or, if it is "none", as two ops. The first call is collective.

    It depends only on facts that ranks share. Memory layouts and weights may differ between ranks.

    Args:
        a: a rank's rows [M_r, K].
        rows: the rows of all ranks.
        has_epilogue: whether an epilogue follows the matmul.
    """
    if partition == "none" or not a.is_cuda or a.dtype not in ALGORITHM.row.dtypes:
        return "none"
    with engine.keeping_failure():
        if engine.why_no_kernel(ALGORITHM.op, a):
            return "none"
    k, has_tiles = a.shape[1], engine.runner.chip.arch == MATMUL_ARCH
    if not k or not gathered_rows_a_launch(engine.world_size, k):
        return "none"
    method = engine.table.allgather_matmul.faster(engine.world_size, rows) if partition == "auto" else partition
    served = has_tiles if method == "tiles" else not has_epilogue
    return method if served else "none"


def run(
    engine: Engine, method: str, members: Sequence[Gathering], counts: Sequence[int], timeout_s: float | None = None
) -> None:
    """Writes the product of all ranks' rows into every ``out``, and the rows into every ``gathered``. Collective.

    Args:
        method: "tiles" or "chunks", as :func:`method_of` found for the call.
        members: the operands of this process's ranks. K is equal on all ranks.
        counts: the rows of every rank; not all zero.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the engine's.

    Raises:
        UnsupportedError: no kernel serves the call; the message says why.
    """
    in_tiles, counts = method == "tiles", tuple(counts)
    placed = [_place(one) for one in members] if in_tiles else members
    first, ways = placed[0], engine.attached(AllgatherMatmuls if in_tiles else GatheredChunks)
    call = Call.of(ALGORITHM.op, first.a, counts, timeout_s=timeout_s, epilogue=first.form)

    def run_whole() -> None:
        with engine.keeping_failure():
            if reason := engine.why_no_kernel(call.op, first.a):
                raise UnsupportedError(f"{call.op}: {reason}")
            ways.run(call, placed)

    engine.watch(call, as_taken(engine, [one.a for one in placed]), run_whole, f", {alike(first)}, in {method}")
    for one, mine in zip(members, placed, strict=True):
        for result, written in ((one.out, mine.out), (one.gathered, mine.gathered)):
            if written is not result:
                result.copy_(written[:, : result.shape[1]])


def _place(one: Gathering) -> Gathering:
    """Returns operands and results as kernels take them: copies, where rows do not begin at multiples of 16 bytes."""
    k, n = one.a.shape[1], one.w.shape[0]
    if n == 0:  # this rank sends its rows all the same
        one = replace(
            one,
            w=one.w.new_zeros(STORE_COLUMNS, k),
            bias=None,
            out=one.out.new_empty(len(one.out), STORE_COLUMNS),
            inputs=one.inputs and _never_empty(one.inputs, len(one.out) * STORE_COLUMNS),
        )
    # The rows are sent as they lie: without gaps, and each in whole packs.
    whole = k % STORE_COLUMNS == 0 and one.a.is_contiguous() and one.a.data_ptr() % PACK_NBYTES == 0
    a = one.a if whole else aligned_copy(one.a)
    w = one.w if layout_of(one.w) else aligned_copy(one.w)
    out = one.out if n % STORE_COLUMNS == 0 else _aligned_like(one.out)
    gathered = one.gathered if one.gathered is None or k % STORE_COLUMNS == 0 else _aligned_like(one.gathered)
    bias = None if one.bias is None else one.bias.contiguous()
    return replace(one, a=a, w=w, bias=bias, out=out, gathered=gathered)


def _never_empty(inputs: EpilogueInputs, numel: int) -> EpilogueInputs:
    """Returns inputs with zeros in place of tensors without elements, as many as a kernel reads."""
    return inputs._replace(tensors=[one if one.numel() else one.new_zeros(numel) for one in inputs.tensors])


def _aligned_like(x: torch.Tensor) -> torch.Tensor:
    """Returns an uninitialised tensor like ``x``, whose rows begin at multiples of 16 bytes."""
    rows, columns = x.shape
    return x.new_empty(rows, -(-columns // STORE_COLUMNS) * STORE_COLUMNS)[:, :columns]


class AllgatherMatmuls:
    """The all-gather + matmuls of one engine: their loaded kernels, and a cache of bound launches."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._launches: BoundedCache[Callable] = BoundedCache()

    def run(self, call: Call, placed: Sequence[Gathering]) -> None:
        """Launches the kernels on the members' current streams. The engine must have a runner."""
        with self._engine.runner.lock:
            self._engine.runner.raise_failure()  # raises before any member launches a kernel
            for _, launch in self.launches(call, placed):
                launch()

    def launches(
        self, call: Call, placed: Sequence[Gathering], tile: MatmulTile | None = None
    ) -> list[tuple[Member, Callable[[], None]]]:
        """Returns the launches of a call, and the member of each. The first call is collective.

        ``tile`` is one of GATHERED_TILES; None: each rank takes the one with the least estimated time for its weight.
        """
        runner, cost = self._engine.runner, self._engine.table.matmul.cost
        functions = self._prepare(call)
        step = gathered_rows_a_launch(runner.world_size, placed[0].a.shape[1])
        found = []
        for one in row_slices(call.counts, step):
            for member, mine, loaded in zip(runner.members, placed, functions, strict=True):
                own = mine.a[one.offset : one.offset + one.count[member.rank]]
                # An empty tensor's address is null: the rows are not wanted.
                rows = own.new_empty(0) if mine.gathered is None else mine.gathered
                chosen = tile or gathered_tile(cost, one.count, len(mine.w), runner.chip.sms)
                launch = self._launch(call, member, mine, loaded, chosen, one)
                # Places are those in the whole product, of all its rows and of this rank's columns.
                inputs = [mine.inputs._replace(corner=(0, 0, mine.out.shape[1]))] if mine.inputs else []
                found.append((member, partial(launch, own, rows, *inputs)))
        return found

    def _prepare(self, call: Call) -> list[dict]:
        """Loads the kernels of all tiles and layouts of W for each member: ranks may differ in them. Collective."""
        runner, form = self._engine.runner, call.epilogue
        key = (ALGORITHM, call.dtype, form and form.kernel)
        if found := runner.loaded(key):
            return found

        def load(member: Member, tile: MatmulTile, layout: str):
            generated = form.generated if form else None
            source = fused_matmul_source(ALGORITHM, call.dtype, runner.world_size, tile, layout, generated)
            return launcher.load(source, member.device, tile.shared_nbytes, ALGORITHM.value)

        def load_all() -> list[dict]:
            kinds = list(itertools.product(GATHERED_TILES, LAYOUTS))
            return [{kind: load(member, *kind) for kind in kinds} for member in runner.members]

        described = f"{call.dtype}, epilogue {form.text}" if form else str(call.dtype)
        return runner.prepare_kernel(key, ALGORITHM, described, load_all)

    def _launch(
        self, call: Call, member: Member, mine: Gathering, functions: dict, tile: MatmulTile, one: Slice
    ) -> Callable:
        """Returns one member's launch, bound to the addresses of its operands; cached."""
        layout = layout_of(mine.w)
        weights = matrix_of(mine.w if layout == "by_rows" else mine.w.t())
        pointers = tuple([0 if x is None else x.data_ptr() for x in (mine.a, mine.bias, mine.out)])
        key = (member.rank, tile, layout, one, call.timeout_s, weights, pointers, mine.out.shape, call.epilogue)
        launch = self._launches.get(key)
        if launch is None:
            engine = self._engine
            agreed = f"{call.agreed}, {alike(mine)}"
            arguments = engine.runner.arguments(member, ALGORITHM, one, call.timeout_s or engine.timeout_s, agreed)
            parameters = _parameters(tile, layout, weights, mine, member, one, arguments, engine.world_size)
            sms = launcher.sm_count(member.device)
            blocks = min(shared_blocks(min(sms, engine.runner.chip.sms), tile.cluster), _most_blocks(tile, one, mine))
            grid = Grid(blocks, tile.threads, tile.shared_nbytes, overlaps=False, cluster=tile.cluster)
            bound = Launch(functions[tile, layout], [*parameters, arguments], grid)
            put = (lambda arguments, own, rows, inputs: arguments.epilogue.put(inputs)) if call.epilogue else None
            launch = self._launches.keep(key, engine.runner.bind_member(member, bound, arguments, put))
        return launch


def _parameters(
    tile: MatmulTile,
    layout: str,
    weights: Matrix,
    mine: Gathering,
    member: Member,
    one: Slice,
    arguments,
    world_size: int,
) -> list:
    """Returns the parameters of the kernel before the collective arguments."""
    k, (m, n) = mine.a.shape[1], mine.out.shape
    pitch = -(-k // 8) * 8
    a_maps, c_maps = (TensorMap * world_size)(), (TensorMap * world_size)()
    for rank, (begin, count) in enumerate(zip(one.begin, one.count, strict=True)):
        if not count:  # nothing reads its maps
            continue
        if rank == member.rank:
            pointer = mine.a.data_ptr() + one.offset * pitch * mine.a.itemsize
        else:
            hops = (rank - member.rank) % world_size
            pointer = arguments.scratch[member.rank] + gathered_slot_offset(world_size, arguments.capacity, hops)
        a_maps[rank] = tensor_map(Matrix(pointer, mine.a.dtype, count, k, pitch), tile.rows)
        c_maps[rank] = tensor_map(matrix_of(mine.out[begin : begin + count]), STORE_ROWS)
    bias = 0 if mine.bias is None else mine.bias.data_ptr()
    sizes = MatmulArguments(bias, m, n, k, 0, Order.group_rows)
    return [a_maps, weight_map(tile, layout, weights), c_maps, sizes]


def _most_blocks(tile: MatmulTile, one: Slice, mine: Gathering) -> int:
    """Returns the blocks that have a tile to compute."""
    rows = sum(-(-count // (tile.rows * tile.cluster)) for count in one.count)
    return rows * -(-mine.out.shape[1] // tile.columns) * tile.cluster

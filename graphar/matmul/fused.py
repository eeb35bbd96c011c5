"""Fused kernels: a matmul and the sum of its result over ranks, in one launch.

summed tiles   Each finished tile is pushed to the rank that owns its rows. A rank computes its own rows last, and
               gathers the summed tiles of its peers meanwhile.
skinny         For at most 64 rows. Either every rank pushes its whole product to all ranks (one-shot), or each rank
               sums a shard (two-shot).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from graphar.errors import UnsupportedError
from graphar.matmul import launches
from graphar.matmul.gemm import why_not
from graphar.matmul.operands import Operands
from graphar.matmul.tensor_maps import Matrix, aligned_copy, matrix_of
from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.epilogue import AppliedEpilogue
from graphar.numerics.epilogues.form import Form
from graphar.numerics.partitions import BATCH_INVARIANT
from graphar.plan.algorithms import MATMUL_ARCH, Algorithm
from graphar.plan.call import Call
from graphar.plan.matmuls import COLUMNS, allreduce_algorithm, prefers_tiles, tile_for, tiles_of_sum
from graphar.plan.scratch import MATMUL_BOX_ROWS
from graphar.plan.slices import Slice, row_slices, rows_a_launch
from graphar.plan.tiles import LAYOUTS, MatmulTile, SkinnyTile, skinny_tile, travels_in_tiles
from graphar.runtime import launcher
from graphar.runtime.bounded_cache import BoundedCache
from graphar.runtime.catalogue import SKINNY_KERNELS, fused_matmul_source
from graphar.runtime.engine import Engine, as_taken
from graphar.runtime.launcher import Launch
from graphar.runtime.runner import Member

Tile = MatmulTile | SkinnyTile


def takes(
    engine: Engine,
    partition: str,
    codec: str,
    members: Sequence[Operands],
    counts: Sequence[int],
    columns: int,
    scattered: bool = False,
) -> bool:
    """Whether a call runs as one fused kernel. The first call is collective; the answer is the same on every rank.

    It depends only on facts that ranks share. K and the memory layout of the operands may differ between ranks.

    Args:
        counts: the rows of the result that each rank sums; neither their sum nor ``columns`` is 0.
        scattered: whether each rank sums only its own rows at any size: in a reduce-scatter, or with an epilogue.
    """
    a = members[0].a
    if partition not in ("auto", "tiles", BATCH_INVARIANT) or not a.is_cuda or columns % COLUMNS:
        return False
    if a.dtype not in Algorithm.MATMUL_ALLREDUCE.row.dtypes:
        return False
    if codec and not travels_in_tiles(codec_of_text(codec), columns):
        return False
    with engine.keeping_failure():
        if engine.why_no_kernel(Algorithm.MATMUL_ALLREDUCE.op, a) or why_not_columns(engine, columns):
            return False
    if partition == "tiles":
        return True
    policy, sms = engine.table.matmul, engine.runner.chip.sms
    return prefers_tiles(policy, sms, engine.world_size, sum(counts), columns, scattered, codec)


def why_not_columns(engine: Engine, columns: int) -> str:
    """Returns why no fused kernel serves so many columns, or an empty string; the same on every rank."""
    if engine.runner.chip.arch != MATMUL_ARCH:
        return f"a rank's device is not of {MATMUL_ARCH}"
    if rows_a_launch(engine.world_size, columns) < 4 * MATMUL_BOX_ROWS:
        return f"{columns} columns are too many for its scratch"
    return ""


def allreduce(
    engine: Engine,
    members: Sequence[Operands],
    counts: Sequence[int],
    timeout_s: float | None,
    epilogue: AppliedEpilogue | None = None,
    codec: str = "",
) -> None:
    """Writes the whole sum into every ``out``. Collective. It takes the arguments of :func:`run`.

    The skinny kernels ignore ``counts``, the rows that each rank sums for all ranks.
    """
    size = engine.world_size, *members[0].out.shape
    in_tiles = epilogue or codec
    algorithm = Algorithm.MATMUL_ALLREDUCE if in_tiles else allreduce_algorithm(engine.table.matmul, *size)
    aligned = [replace(one, out=torch.empty_like(one.out)) if one.out.data_ptr() % 16 else one for one in members]
    run(engine, algorithm, aligned, counts, timeout_s, epilogue, codec)
    for one, other in zip(members, aligned, strict=True):
        if other is not one:
            one.out.copy_(other.out)


def run(
    engine: Engine,
    algorithm: Algorithm,
    members: Sequence[Operands],
    counts: Sequence[int],
    timeout_s: float | None = None,
    epilogue: AppliedEpilogue | None = None,
    codec: str = "",
    tile: Tile | None = None,
    timelines: Sequence[torch.Tensor] | None = None,
) -> None:
    """Runs a fused matmul by the given algorithm. Collective.

    Args:
        members: the operands of this process's ranks. ``a`` is [M, K], where K may differ between ranks; ``w`` is
            [N, K]; ``bias`` is [N] or None, equal on all ranks, and is added to the sum before rounding. ``out`` is
            [counts[rank], N] for a reduce-scatter, or [M, N], contiguous, for an all-reduce.
        counts: the rows that each rank sums. They add up to M, which is not 0.
        timeout_s: the deadline of each wait on another rank, in seconds; None: the engine's.
        epilogue: applied to the sums before they are rounded; without a bias. Bound for the tensor that ``out`` is.
        codec: the text of a codec that ``travels_in_tiles``, or an empty string; not with an epilogue.
        tile: the same on every rank; None: the one that plans choose.
        timelines: one timeline of timelines.py for each member, with a block for each of its SMs. The recorded variant
            of the tile writes its events there, and overwrites, without clearing, the events of the launch before.

    Raises:
        UnsupportedError: no kernel serves the call; the message says why.
    """
    placed, counts = [_place(one) for one in members], tuple(counts)
    first, kernels = placed[0], engine.attached(FusedMatmuls)
    form = epilogue.form if epilogue else None
    call = Call.of(algorithm.op, first.a, counts, timeout_s=timeout_s, codec=codec, epilogue=form)

    def run_kernels() -> None:
        with engine.keeping_failure():
            if reason := engine.why_no_kernel(call.op, first.a):
                raise UnsupportedError(f"{call.op}: {reason}")
            kernels.run(call, placed, epilogue.inputs if epilogue else None, tile, timelines)

    engine.watch(call, as_taken(engine, [one.a for one in placed]), run_kernels, f", {_alike(first)}")


class Placed(NamedTuple):
    """One rank's operands for a kernel, copied if their alignment requires it, and their addresses."""

    # As in Operands.
    a: torch.Tensor
    w: torch.Tensor
    bias: torch.Tensor | None
    out: torch.Tensor
    a_matrix: Matrix | None  # the memory of A; None if A is empty
    w_matrix: Matrix | None  # the memory of W, or of its transpose if the layout is "by_columns"; None if W is empty
    layout: str  # the layout of W, one of LAYOUTS


def _place(one: Operands) -> Placed:
    a, w = one.a, one.w
    if a.shape[1] == 0:
        a, w = a.new_zeros(len(a), COLUMNS), w.new_zeros(len(w), COLUMNS)
    a_matrix, w_matrix, layout = matrix_of(a), matrix_of(w), "by_rows"
    if a_matrix is None:
        a = aligned_copy(a)
        a_matrix = matrix_of(a)
    if w_matrix is None and (w_matrix := matrix_of(w.t())):
        layout = "by_columns"
    if w_matrix is None:
        w = aligned_copy(w)
        w_matrix = matrix_of(w)
    return Placed(a, w, None if one.bias is None else one.bias.contiguous(), one.out, a_matrix, w_matrix, layout)


def _alike(one: Placed) -> str:
    """Returns what operands must have alike on all ranks, beside the call's own counts and dtype, in words."""
    return f"{len(one.w)} columns{'' if one.bias is None else ' with a bias'}"


def why_not_operands(one: Placed) -> str:
    """Returns why a kernel cannot take one rank's operands, or an empty string. Ranks may differ in alignment."""
    return "a rank has nothing to add" if one.a.numel() == 0 else why_not(one.a, one.w, one.out)


class FusedMatmuls:
    """The fused matmuls of one engine: their loaded kernels, and a cache of bound launches."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._launches: BoundedCache[Callable] = BoundedCache()

    def tiles(
        self, algorithm: Algorithm, counts: tuple[int, ...], rows: int, columns: int, codec: Codec | None = None
    ) -> tuple[Tile, ...]:
        """Returns the tiles of a call. Every rank loads the kernel of each tile, and takes one of them by its K."""
        if algorithm in SKINNY_KERNELS:
            return (skinny_tile(rows),)
        policy, sms = self._engine.table.matmul, self._engine.runner.chip.sms
        return tiles_of_sum(policy, algorithm, counts, columns, sms, codec)

    def run(
        self,
        call: Call,
        placed: Sequence[Placed],
        inputs: Sequence | None,
        tile: Tile | None,
        timelines: Sequence[torch.Tensor] | None,
    ) -> None:
        """Launches the call's kernels on the members' current streams; ``inputs`` has each member's epilogue inputs.

        The engine must have a runner. Raises UnsupportedError if no kernel serves the operands.
        """
        algorithm, runner, columns = Algorithm(call.op), self._engine.runner, len(placed[0].w)
        # Skinny algorithms are chosen only for results that fit their scratch (plan.matmuls.is_skinny).
        too_wide = "" if algorithm in SKINNY_KERNELS else why_not_columns(self._engine, columns)
        for one in placed:
            if reason := too_wide or why_not_operands(one):
                raise UnsupportedError(f"{call.op}: {reason}")
        tiles = (tile,) if tile else self.tiles(algorithm, call.counts, len(placed[0].out), columns, call.wire)
        if timelines:
            tiles = tuple(replace(one, recorded=True) for one in tiles)
        functions = self._prepare(call, algorithm, tiles)
        with runner.lock:
            runner.raise_failure()  # raises before any member launches a kernel
            for one in _slices(algorithm, call.counts, placed[0].out, runner.world_size):
                for rank, (member, mine) in enumerate(zip(runner.members, placed, strict=True)):
                    own_tile = tile_for(self._engine.table.matmul, tiles, mine.a.shape[1])
                    timeline = timelines[rank] if timelines else None
                    launch = self._launch(call, algorithm, member, mine, functions[rank], own_tile, one, timeline)
                    corner = (_first_row(algorithm, member, one), 0, columns)
                    more = [inputs[rank]._replace(corner=corner)] if inputs else []
                    launch(mine.a, mine.out, *more)

    def _prepare(self, call: Call, algorithm: Algorithm, tiles: tuple[Tile, ...]) -> list[dict]:
        """Loads the kernels of every tile and layout for each member: ranks may differ in K and in W's layout."""
        key = (algorithm, call.dtype, tiles, _kernel_key(call))
        if found := self._engine.runner.loaded(key):
            return found
        form: Form | None = call.epilogue
        generated, codec, runner = form.generated if form else None, call.wire, self._engine.runner

        def load(member: Member, tile: Tile, layout: str):
            source = fused_matmul_source(algorithm, call.dtype, runner.world_size, tile, layout, generated, codec)
            return launcher.load(source, member.device, tile.shared_nbytes, algorithm.value)

        def load_all() -> list[dict]:
            return [
                {(tile, layout): load(member, tile, layout) for tile in tiles for layout in LAYOUTS}
                for member in runner.members
            ]

        # The codec's type and not its text, which has the seed: ranks may have different seeds.
        follows = f", epilogue {form.text}" if form else f", {codec.type_name}" if codec else ""
        described = f"{call.dtype}, {' and '.join(map(str, tiles))}{follows}"
        return runner.prepare_kernel(key, algorithm, described, load_all)

    def _launch(
        self,
        call: Call,
        algorithm: Algorithm,
        member: Member,
        placed: Placed,
        functions: dict,
        tile: Tile,
        one: Slice,
        timeline: torch.Tensor | None,
    ) -> Callable:
        """Returns one member's launch, bound to the addresses of its operands; cached."""
        first = _first_row(algorithm, member, one)
        rows = placed.out[first : first + one.count[member.rank]] if one.count else placed.out
        # A rank without rows writes nothing, but the kernel needs a valid tensor map.
        matrices = (placed.a_matrix, placed.w_matrix, matrix_of(rows) or placed.a_matrix)
        pointers = tuple([0 if one is None else one.data_ptr() for one in (placed.bias, timeline)])
        key = (algorithm, member.rank, tile, placed.layout, one, call.timeout_s, pointers, placed.out.data_ptr())
        key = (*key, call.codec, call.epilogue, *matrices)
        launch = self._launches.get(key)
        if launch is None:
            timeout_s = call.timeout_s or self._engine.timeout_s
            agreed = f"{call.agreed}, {_alike(placed)} by {algorithm.value}"
            arguments = self._engine.runner.arguments(member, algorithm, one, timeout_s, agreed)
            sms = self._engine.runner.chip.sms  # of every rank's device: see (10) in cuda_src
            parameters, grid = launches.bind(tile, placed.layout, matrices, pointers, one, sms)
            bound = Launch(functions[tile, placed.layout], [*parameters, arguments], grid)
            put = (lambda arguments, a, out, inputs: arguments.epilogue.put(inputs)) if call.epilogue else None
            launch = self._launches.keep(key, self._engine.runner.bind_member(member, bound, arguments, put))
        return launch


def _slices(algorithm: Algorithm, counts: tuple[int, ...], out: torch.Tensor, world_size: int) -> list[Slice]:
    if algorithm in SKINNY_KERNELS:  # rows are not divided between ranks
        return [Slice(out.numel())]
    return row_slices(counts, rows_a_launch(world_size, out.shape[1]))


def _kernel_key(call: Call) -> str | None:
    """Returns the part of a kernel's key that is not its algorithm, dtype or tile."""
    return call.epilogue.kernel if call.epilogue else call.wire and call.wire.type_name


def _first_row(algorithm: Algorithm, member: Member, one: Slice) -> int:
    """Returns the first row of a member's ``out`` that a launch writes."""
    return one.begin[member.rank] if algorithm is Algorithm.MATMUL_ALLREDUCE else one.offset

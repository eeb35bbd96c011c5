"""Matmuls that end in a collective, in one kernel: each rank owns some rows of the sum over all ranks of A * W^T."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from graphar.errors import UnsupportedError
from graphar.matmul.gemm import STORE_ROWS, Order, clocks, layout_of, operand_maps, sm_count, why_not
from graphar.matmul.tensor_maps import Matrix, matrix_of, tensor_map
from graphar.plan.algorithms import MATMUL_BOX_ROWS, Algorithm, Slice, row_slices, rows_a_launch
from graphar.runtime import launcher, loader
from graphar.runtime.arguments import MatmulArguments
from graphar.runtime.bounded_cache import Kept
from graphar.runtime.catalogue import MATMUL_ARCH, MATMUL_LAYOUTS, MatmulTile, matmul_sum_source, parts_tiles

if TYPE_CHECKING:
    from graphar.numerics.codecs import Codec
    from graphar.numerics.epilogues.epilogue import AppliedEpilogue, Form
    from graphar.runtime.runner import Member, Runner

_MEASURED_NUMEL, _LARGE_NUMEL = 512 * 8192, 1024 * 8192  # of a result
_LARGE_K = 4096  # with which the links carry finished tiles sooner than the tensor cores make them
_SMALL_TILE = MatmulTile(128, 128, stages=6, whole=True)
_LARGE_TILE = MatmulTile(128, 128, stages=6, cluster=2, whole=True)
_ALTERNATING_TILE = MatmulTile(64, 128, stages=7, cluster=2, whole=True, alternating=True)
_MEASURED_TILES = (_LARGE_TILE, _ALTERNATING_TILE)


class MatmulParts:
    """The matmuls of one communicator whose ranks' parts are rows of the result.

    Args:
        runner: the communicator's.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches: Kept[Callable] = Kept()
        self._fewest_sms: int | None = None

    def why_not(self, columns: int) -> str:
        """Why the kernels cannot compute results with so many columns, or nothing; the same on every rank.

        Collective the first time.
        """
        if self._sms() == 0:
            return f"a rank's device is not of {MATMUL_ARCH}"
        if rows_a_launch(self._runner.world_size, columns) < 4 * MATMUL_BOX_ROWS:
            return f"{columns} columns are too many for its scratch"
        return ""

    def _sms(self) -> int:
        """The SMs that every rank's device has; 0 where one cannot run the kernels."""
        if self._fewest_sms is None:
            self._fewest_sms = self._runner.least("counting SMs", self._own_sms())
        return self._fewest_sms

    def _own_sms(self) -> int:
        devices = [member.device for member in self._runner.members]
        able = all(launcher.architecture(device) == MATMUL_ARCH for device in devices)
        return min(map(sm_count, devices)) if able else 0

    def tiles(
        self, algorithm: Algorithm, counts: tuple[int, ...], columns: int, codec: Codec | None = None
    ) -> tuple[MatmulTile, ...]:
        """Of :func:`choose_tiles`, for the SMs that every rank has. Collective the first time."""
        return choose_tiles(algorithm, counts, columns, self._sms(), codec)

    def run(
        self,
        algorithm: Algorithm,
        a: Sequence[torch.Tensor],
        w: Sequence[torch.Tensor],
        bias: Sequence[torch.Tensor | None],
        out: Sequence[torch.Tensor],
        counts: tuple[int, ...],
        timeout_s: float,
        tile: MatmulTile | None = None,
        epilogue: AppliedEpilogue | None = None,
        timelines: Sequence[torch.Tensor] | None = None,
        codec: Codec | None = None,
    ) -> None:
        """Launches on the members' current streams; lists have a tensor for each member. Collective at first.

        Args:
            algorithm: which kernel.
            a: [M, K], as :func:`graphar.matmul.gemm.matmul` takes it; K is the rank's own.
            w: [N, K], likewise.
            bias: [N], equal on all ranks, added to the sum before it is rounded; or None.
            out: [counts[rank], N], takes this rank's rows of the sum; or all, [M, N] without gaps, of MATMUL_ALLREDUCE.
            counts: the rows of each rank, M in all and not 0.
            timeout_s: the deadline of each wait on another rank.
            tile: the same on every rank, of ``parts_tiles``; None: of :meth:`tiles`.
            epilogue: what is done to the sums, in the place of a bias; bound for the tensor of which ``out`` is all.
            timelines: of graphar/timelines.py, one for each member with a block for each of its SMs, which the recorded
                form of the tile puts its events in, over those of the launch before, which are not cleared.
            codec: what is on the wire, without an epilogue: one that ``travels_in_tiles``.

        Raises:
            UnsupportedError: what :meth:`why_not`, or :func:`why_not_parts`, has a reason for.
        """
        members, world_size = self._runner.members, self._runner.world_size
        for operands in zip(a, w, out, strict=True):
            if reason := self.why_not(operands[1].shape[0]) or why_not_parts(*operands):
                raise UnsupportedError(f"{algorithm.value}: {reason}")
        columns = w[0].shape[0]
        tiles = (tile,) if tile else self.tiles(algorithm, counts, columns, codec)
        if timelines:
            tiles = tuple(replace(one, recorded=True) for one in tiles)
        timelines = timelines or [None] * len(members)
        form, applied = (epilogue.form, epilogue.operands) if epilogue else (None, [None] * len(members))
        functions = self._prepare(algorithm, a[0].dtype, tiles, form, codec)
        self._runner.raise_failure()  # before any of them launches
        for one in row_slices(counts, rows_a_launch(world_size, columns)):
            for member, by_tile, mine, *given in zip(
                members, functions, applied, a, w, bias, out, timelines, strict=True
            ):
                own_tile = tile_for(tiles, given[0].shape[1])
                launch = self._bind(algorithm, member, by_tile[own_tile], own_tile, one, timeout_s, *given, form, codec)
                corner = (_first_row(algorithm, member, one), 0, columns)
                launch(given[0], given[3], *([mine._replace(corner=corner)] if mine else []))

    def _prepare(
        self,
        algorithm: Algorithm,
        dtype: torch.dtype,
        tiles: tuple[MatmulTile, ...],
        form: Form | None,
        codec: Codec | None,
    ) -> list[dict]:
        """For each member its kernels by tile and layout: K and the layout of the weight may differ between ranks."""
        way = algorithm, dtype, form, codec

        def load() -> list[dict]:
            return [{tile: self._load(*way, tile, member) for tile in tiles} for member in self._runner.members]

        # By its type: ranks may have seeds of their own, which the text has and the kernel has no use for.
        follows = f", epilogue {form.text}" if form else f", {codec.type_name}" if codec else ""
        described = f"{dtype}, {' and '.join(map(str, tiles))}{follows}"
        key = algorithm, dtype, tiles, _kernel_key(form, codec)
        return self._runner.prepare_kernel(key, algorithm, described, load)

    def _load(
        self,
        algorithm: Algorithm,
        dtype: torch.dtype,
        form: Form | None,
        codec: Codec | None,
        tile: MatmulTile,
        member: Member,
    ) -> dict:
        way, made = (algorithm.value, dtype, self._runner.world_size, tile), form.generated if form else None
        sources = {layout: matmul_sum_source(*way, layout, made, codec) for layout in MATMUL_LAYOUTS}
        return {
            layout: loader.load(source, member.device, tile.shared_nbytes, algorithm.value)
            for layout, source in sources.items()
        }

    def _bind(
        self,
        algorithm: Algorithm,
        member: Member,
        by_layout: dict,
        tile: MatmulTile,
        one: Slice,
        timeout_s,
        a,
        w,
        bias,
        out,
        timeline,
        form: Form | None,
        codec: Codec | None,
    ) -> Callable:
        layout, first = layout_of(w), _first_row(algorithm, member, one)
        weights, rows = matrix_of(w if layout == "by_rows" else w.t()), out[first : first + one.count[member.rank]]
        pointers = tuple(0 if one is None else one.data_ptr() for one in (bias, timeline))
        # Where a rank has no rows, nothing is written; a map of something there has to be.
        matrices = (matrix_of(a), weights, matrix_of(rows) or matrix_of(a))
        kernel = _kernel_key(form, codec)
        key = (algorithm, member.rank, layout, tile, one, timeout_s, pointers, out.data_ptr(), kernel, *matrices)
        launch = self._launches.get(key)
        if launch is None:
            arguments = self._runner.arguments(member, algorithm, one, timeout_s)
            arguments.output = out.data_ptr()
            enqueue = _make_enqueue(by_layout[layout], tile, layout, matrices, pointers, arguments, one, member.device)

            def launch_alone(_input: int, _output: int, stream: int) -> None:
                enqueue(stream)

            if form:
                launch = self._runner.bind_with_operands(member, launch_alone, arguments.epilogue)
            else:
                launch = self._runner.bind_member(member, launch_alone)
            self._launches.keep(key, launch)
        return launch


def _kernel_key(form: Form | None, codec: Codec | None):
    """What tells the kernels of a tile apart."""
    return form.kernel if form else codec and codec.type_name


def _first_row(algorithm: Algorithm, member: Member, one: Slice) -> int:
    """The first row of a member's result that a launch writes."""
    return one.begin[member.rank] if algorithm is Algorithm.MATMUL_ALLREDUCE else one.offset


def _make_enqueue(
    function,
    tile: MatmulTile,
    layout: str,
    matrices: tuple[Matrix, Matrix, Matrix],
    pointers: tuple[int, int],
    arguments,
    one: Slice,
    device,
) -> Callable[[int], None]:
    (a, w, out), (bias, timeline) = matrices, pointers
    n = w.rows if layout == "by_rows" else w.columns
    tiles = sum(-(-count // (tile.rows * tile.cluster)) for count in one.count) * -(-n // tile.columns)
    # A grid of its own device's: strips find their places by where they lie in the result, whoever computes them.
    blocks = min(max(sm_count(device) // tile.cluster, 1), tiles) * tile.cluster
    return launcher.make_enqueue(
        function,
        [
            *operand_maps(tile, layout, a, w),
            tensor_map(out, STORE_ROWS),
            MatmulArguments(bias, a.rows, n, a.columns, 0, Order.group_rows, timeline),
            arguments,
        ],
        blocks,
        tile.threads,
        tile.shared_nbytes,
        overlap=True,
        cluster=tile.cluster,
    )


def why_not_parts(a: torch.Tensor, w: torch.Tensor, out: torch.Tensor) -> str:
    """Why the kernels cannot compute ``out`` from these, or nothing. Ranks may differ in the alignment of theirs."""
    if a.numel() == 0:
        return "a rank has nothing to add"
    return why_not(a, w, out)


@functools.lru_cache(maxsize=1024)
def choose_tiles(
    algorithm: Algorithm, counts: tuple[int, ...], n: int, sms: int, codec: Codec | None = None
) -> tuple[MatmulTile, ...]:
    """The tiles with which ``sms`` SMs have the ranks' rows of a result with ``n`` columns soonest, by K.

    From some size on as measured on H200s; below it by an estimate. They have equally many columns: so strips are as
    wide on every rank, whatever its K.
    """
    numel = sum(counts) * n
    if numel < _MEASURED_NUMEL:
        others = [tile for tile in parts_tiles(algorithm.value, codec) if tile not in _MEASURED_TILES]
        return (min(others, key=lambda tile: clocks(tile, counts, n, sms)),)
    tile = _LARGE_TILE if numel >= _LARGE_NUMEL else _SMALL_TILE
    # Codes are fewer bytes, so it is the tensor cores that have to be kept busy, whatever K.
    alternates = algorithm is Algorithm.MATMUL_ALLREDUCE and codec is None
    return (_ALTERNATING_TILE, tile) if alternates else (tile,)


def tile_for(tiles: tuple[MatmulTile, ...], k: int) -> MatmulTile:
    """The one of :func:`choose_tiles` that a rank with ``k`` takes."""
    return tiles[0 if k < _LARGE_K else -1]

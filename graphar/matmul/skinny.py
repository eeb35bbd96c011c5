"""A matmul of few rows and the sum of its result over all ranks, in one kernel: MATMUL_TOKENS_KERNELS."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from graphar.errors import UnsupportedError
from graphar.matmul.gemm import layout_of, sm_count
from graphar.matmul.tensor_maps import BOX_COLUMNS, Matrix, matrix_of, tensor_map
from graphar.matmul.tiled import why_not_parts
from graphar.plan.algorithms import Algorithm, Slice
from graphar.runtime import launcher, loader
from graphar.runtime.arguments import MatmulArguments
from graphar.runtime.bounded_cache import Kept
from graphar.runtime.catalogue import MATMUL_LAYOUTS, TOKEN_TILES, TokenTile, matmul_sum_source

if TYPE_CHECKING:
    from graphar.runtime.runner import Member, Runner


def choose_tile(rows: int) -> TokenTile:
    """The smallest that has room for ``rows`` of a result, of which the last has room for the most."""
    return next(tile for tile in TOKEN_TILES if tile.tokens >= rows)


def box_tokens(tile: TokenTile, rows: int) -> int:
    """Rows of A that each block of a cluster loads: `share` in cuda_src/device/matmul_tokens.cuh."""
    return -(-rows // (8 * tile.cluster)) * 8


class MatmulTokens:
    """The matmuls of one communicator whose results have few rows.

    Args:
        runner: the communicator's.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._launches: Kept[Callable] = Kept()

    def run(
        self,
        algorithm: Algorithm,
        a: Sequence[torch.Tensor],
        w: Sequence[torch.Tensor],
        bias: Sequence[torch.Tensor | None],
        out: Sequence[torch.Tensor],
        timeout_s: float,
        tile: TokenTile | None = None,
    ) -> None:
        """Launches on the members' current streams; lists have a tensor for each member. Collective at first.

        Args:
            algorithm: of MATMUL_TOKENS_KERNELS.
            a: [M, K], as :func:`graphar.matmul.gemm.matmul` takes it; a tile has room for M, the scratch for [M, N].
                K is the rank's own.
            w: [N, K], likewise.
            bias: [N], equal on all ranks, added to the sum before it is rounded; or None.
            out: [M, N] without gaps, takes the sum.
            timeout_s: the deadline of each wait on another rank.
            tile: with room for M; ranks may differ. None: the one :func:`choose_tile` picks.

        Raises:
            UnsupportedError: operands or a device that the kernel cannot take.
        """
        for operands in zip(a, w, out, strict=True):
            if reason := why_not_parts(*operands):
                raise UnsupportedError(f"{algorithm.value}: {reason}")
        tile = tile or choose_tile(len(out[0]))
        functions = self._prepare(algorithm, a[0].dtype, tile)
        self._runner.raise_failure()  # before any of them launches
        for member, by_layout, *operands in zip(self._runner.members, functions, a, w, bias, out, strict=True):
            launch = self._bind(algorithm, member, by_layout, tile, timeout_s, *operands)
            launch(operands[0], operands[3])

    def _prepare(self, algorithm: Algorithm, dtype: torch.dtype, tile: TokenTile) -> list[dict]:
        """For each member its kernels by layout: that of the weight may differ between ranks."""
        way = algorithm.value, dtype, self._runner.world_size, tile

        def load() -> list[dict]:
            sources = {layout: matmul_sum_source(*way, layout) for layout in MATMUL_LAYOUTS}
            return [
                {
                    layout: loader.load(source, member.device, tile.shared_nbytes, algorithm.value)
                    for layout, source in sources.items()
                }
                for member in self._runner.members
            ]

        return self._runner.prepare_kernel((algorithm, dtype, tile), algorithm, f"{dtype}, {tile}", load)

    def _bind(
        self, algorithm: Algorithm, member: Member, by_layout: dict, tile: TokenTile, timeout_s, a, w, bias, out
    ) -> Callable:
        layout = layout_of(w)
        tokens, weights = matrix_of(a), matrix_of(w if layout == "by_rows" else w.t())
        pointer = 0 if bias is None else bias.data_ptr()
        key = (algorithm, member.rank, tile, layout, timeout_s, tokens, weights, pointer, out.data_ptr())
        launch = self._launches.get(key)
        if launch is None:
            arguments = self._runner.arguments(member, algorithm, Slice(out.numel()), timeout_s)
            arguments.output = out.data_ptr()
            sizes = MatmulArguments(pointer, *out.shape, a.shape[1])
            enqueue = _make_enqueue(by_layout[layout], tile, tokens, weights, sizes, arguments, member.device)
            launch = self._runner.bind_member(member, lambda _input, _output, stream: enqueue(stream))
            self._launches.keep(key, launch)
        return launch


def _make_enqueue(
    function, tile: TokenTile, tokens: Matrix, weights: Matrix, sizes: MatmulArguments, arguments, device: int
) -> Callable[[int], None]:
    tiles = -(-sizes.n // (tile.columns * tile.cluster))
    # A grid of its own device's: packs find their slots by where they lie in the result, whichever block sends them.
    blocks = min(sm_count(device) // tile.cluster, tiles) * tile.cluster
    return launcher.make_enqueue(
        function,
        [
            tensor_map(weights, BOX_COLUMNS),
            tensor_map(tokens, box_tokens(tile, sizes.m)),
            sizes,
            arguments,
        ],
        blocks,
        tile.threads,
        tile.shared_nbytes,
        overlap=True,
        cluster=tile.cluster,
    )

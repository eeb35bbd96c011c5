"""A matmul whose kernel sums each tile over the ranks: which calls take one, which one, and what it is given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from graphar.communicator import Communicator
from graphar.matmul.overlap import Operands
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.epilogue import AppliedEpilogue
from graphar.ops.scatter import split
from graphar.plan.algorithms import MIB, Algorithm, largest_nbytes
from graphar.runtime.availability import missing_software
from graphar.runtime.catalogue import MATMUL_TYPES, TOKEN_TILES, TokenTile, travels_in_tiles

# By ranks, from how many elements of the result on "auto" takes it: where it was faster than a matmul and then its sum,
# with 8192 columns and K of 2048 and 7168, bf16, in CUDA graphs on H200s.
_PAYS_FROM = {2: 1024 * 8192, 3: 2048 * 8192, 4: 1024 * 8192}
# Likewise of an all-reduce with a codec, in place of a matmul and then its sum with that: measured between two alone.
_PAYS_WITH_CODEC_FROM = {2: 4096 * 8192}
# Likewise the ranks between which it takes MATMUL_TOKENS_KERNELS, where these keep so many of an H200's SMs busy.
_TOKENS_PAY = (2, 3, 4)
_SMS, _LEAST_BUSY = 132, 0.9
# By ranks, up to how many bytes of the result every rank sums all of it: with two, that sends no more.
_ONE_SHOT_NBYTES = {2: 2 * MIB, 3: 512 << 10, 4: 256 << 10}
_ONE_SHOT_NBYTES_OF_MORE = 128 << 10
_ROWS = 128  # of a tile of many rows
_COLUMNS = 8  # of 16 bits in 16 bytes: what rows begin at multiples of, and results have a multiple of


def owned_rows(rows: int, world_size: int) -> list[int]:
    """How many of the rows of an all-reduce's result each rank sums: whole tiles, as equally many as there can be."""
    ends = [min(sum(split(-(-rows // _ROWS), world_size)[:rank]) * _ROWS, rows) for rank in range(world_size + 1)]
    return [end - begin for begin, end in itertools.pairwise(ends)]


def are_tokens(world_size: int, rows: int, columns: int) -> bool:
    """Whether a result of 16-bit elements is so small that MATMUL_TOKENS_KERNELS serve it."""
    largest = largest_nbytes(Algorithm.MATMUL_TWO_SHOT, world_size)
    return rows <= TOKEN_TILES[-1].tokens and 2 * rows * columns <= largest


def algorithm_of(world_size: int, rows: int, columns: int) -> Algorithm:
    """The kernel of an all-reduce whose result is so large, of 16-bit elements."""
    if not are_tokens(world_size, rows, columns):
        return Algorithm.MATMUL_ALLREDUCE
    in_one = 2 * rows * columns <= _ONE_SHOT_NBYTES.get(world_size, _ONE_SHOT_NBYTES_OF_MORE)
    return Algorithm.MATMUL_ONE_SHOT if in_one else Algorithm.MATMUL_TWO_SHOT


def pays(world_size: int, rows: int, columns: int, scattered: bool = False, codec: str = "") -> bool:
    """Whether it is known to be faster than what comes of no partition; ``scattered`` as for :func:`takes`."""
    if codec:
        return not scattered and rows * columns >= _PAYS_WITH_CODEC_FROM.get(world_size, math.inf)
    if not scattered and are_tokens(world_size, rows, columns):
        return world_size in _TOKENS_PAY and _busy(columns) >= _LEAST_BUSY
    return rows * columns >= _PAYS_FROM.get(world_size, math.inf)


def _busy(columns: int) -> float:
    """The share of an H200's SMs that MATMUL_TOKENS_KERNELS, keep busy in all rounds."""
    blocks = -(-columns // TokenTile.columns)
    return blocks / (-(-blocks // _SMS) * _SMS)


def takes(
    ranks: Communicator,
    partition: str,
    codec: str,
    members: Sequence[Operands],
    counts: Sequence[int],
    columns: int,
    scattered: bool = False,
) -> bool:
    """Whether a call of ``partition`` is one kernel. Collective at first, and the same on every rank.

    It goes by what ranks have in common, and not by K or by where operands lie.

    Args:
        counts: the rows of the result that each rank sums.
        columns: of the result; neither is empty.
        codec: the text of what is on the wire, or nothing.
        scattered: whether each rank sums a part at any size: in a reduce-scatter, or with an epilogue.
    """
    if partition not in ("auto", "tiles") or missing_software():
        return False
    a = members[0].a
    if not a.is_cuda or a.dtype not in MATMUL_TYPES or columns % _COLUMNS:
        return False
    if codec and not travels_in_tiles(codec_of_text(codec), columns):
        return False
    if partition == "auto" and not pays(ranks.world_size, sum(counts), columns, scattered, codec):
        return False
    with ranks.keeping_failure():
        return not (ranks._why_no_kernel(a) or ranks._runner.matmuls.why_not(columns))


def reducescatter(
    ranks: Communicator,
    members: Sequence[Operands],
    counts: Sequence[int],
    timeout_s: float | None,
    epilogue: AppliedEpilogue | None = None,
    codec: str = "",
) -> None:
    """Writes each rank's rows of the sum into its ``out``; ``counts`` has the rows of each. Collective.

    With an ``epilogue``, which is bound for ``out``, there is no bias, and no ``codec``.
    """
    outs = [one.out for one in members]
    _run(Algorithm.MATMUL_REDUCESCATTER, ranks, members, outs, counts, timeout_s, epilogue, codec)


def allreduce(
    ranks: Communicator,
    members: Sequence[Operands],
    counts: Sequence[int],
    timeout_s: float | None,
    epilogue: AppliedEpilogue | None = None,
    codec: str = "",
) -> None:
    """Writes all of the sum into every ``out``. Collective.

    ``counts`` has the rows that each rank sums for all, if not every rank does it by itself; the rest as there.
    """
    size = ranks.world_size, *members[0].out.shape
    algorithm = Algorithm.MATMUL_ALLREDUCE if epilogue or codec else algorithm_of(*size)
    outs = [torch.empty_like(one.out) if one.out.data_ptr() % 16 else one.out for one in members]
    _run(algorithm, ranks, members, outs, counts, timeout_s, epilogue, codec)
    for one, out in zip(members, outs, strict=True):
        if out is not one.out:
            one.out.copy_(out)


def _run(algorithm: Algorithm, ranks: Communicator, members, outs, counts, timeout_s, epilogue, codec: str) -> None:
    a, w = zip(*(_operands(one) for one in members), strict=True)
    bias = [None if one.bias is None else one.bias.contiguous() for one in members]
    operands = a, w, bias, outs
    if not ranks.devices:
        operands = [xs[0] for xs in operands]
    ranks.run_matmul(algorithm.value, *operands, tuple(counts), timeout_s, epilogue, codec)


def _operands(one: Operands) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's ``a`` and ``w``, or copies of them, as the kernels take them: any rank may have to copy."""
    from graphar.matmul.gemm import layout_of
    from graphar.matmul.tensor_maps import matrix_of

    a, w = one.a, one.w
    if a.shape[1] == 0:
        return a.new_zeros(len(a), _COLUMNS), w.new_zeros(len(w), _COLUMNS)
    return a if matrix_of(a) else _aligned(a), w if layout_of(w) else _aligned(w)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """A copy whose rows begin at multiples of 16 bytes."""
    rows, columns = x.shape
    return x.new_empty(rows, -(-columns // _COLUMNS) * _COLUMNS)[:, :columns].copy_(x)

"""The calls of the self-test: some of every op, each with the kernel that it must take and its expected result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import graphar
from graphar import reference
from graphar.communicator import Communicator
from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.norms import RmsNorm
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.matmuls import allreduce_algorithm
from graphar.plan.policy import LosslessPolicy
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.shapes import for_norm, for_parts
from graphar.plan.tables import DEFAULT, Table, shipped_table
from graphar.runtime.user_tables import find_table

_NUMELS = (7, 8199, 262149)  # less than a pack for every rank, a few blocks, many blocks; all with a partial pack
_QUANTIZED_NUMELS = (7, 8199, 65541)  # the same cases, but smaller: the specification is slow
_ROWS = ((1, 1032), (24, 1032), (300, 1032))  # rows and columns of a norm; one-shot up to 24 rows for any world size
_RESULTS = ((7, 264), (64, 4104), (300, 264))  # rows and columns of a matmul; one case for each kernel that sums it
_PARTS = _RESULTS[-1:]
_K = 136
_CODEC = codec_of_text("int8")
_SPECIAL = (-0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(torch.bfloat16).tiny / 4)

Results = list[tuple[torch.Tensor, torch.Tensor]]  # pairs of a result and its expected value on the CPU


@dataclass(frozen=True)
class SelfTestCall:
    """A call of an op on all ranks, in bf16."""

    op: str  # the name of the op
    # Makes the call over a communicator with devices, and returns the results of all ranks.
    make: Callable[[Communicator], Results]
    # The algorithm whose kernel it must take, in one launch on each rank; None: the fallback.
    kernel: Algorithm | None = None


def calls_on_gpus(algorithm: Algorithm, world_size: int) -> list[SelfTestCall]:
    """Returns the calls that take ``algorithm`` on ``world_size`` GPUs, by name or by choice; there may be none."""
    found = []
    for op in _OPS:
        for size in op.sizes:
            if algorithm is op.kernel(world_size, size) if op.kernel else _can_be_named(algorithm, op):
                launched = None if algorithm is Algorithm.FALLBACK else algorithm
                found.append(SelfTestCall(op.name, partial(op.make, size=size, algorithm=algorithm.value), launched))
    return found


def _can_be_named(algorithm: Algorithm, op: _Op) -> bool:
    """Whether a call of ``op`` can name ``algorithm``; only all-reduces can."""
    return algorithm.op == "allreduce" and algorithm.row.takes_codec == op.name.startswith("quantized")


def calls_on_cpu() -> list[SelfTestCall]:
    """Returns calls of every op; on the CPU all of them take the fallback, which compresses nothing without loss."""
    name, ops = Algorithm.FALLBACK.value, [op for op in _OPS if not op.compresses]
    return [SelfTestCall(op.name, partial(op.make, size=size, algorithm=name)) for op in ops for size in op.sizes]


# ---- ops: each takes a size and, where calls can name one, an algorithm ---------------------------------------------


def _allreduce(ranks: Communicator, size: int, algorithm: str, codec: Codec | None = None) -> Results:
    parts = _of_ranks(ranks, _normal if codec else _with_special, size)
    found = ranks.allreduce(_place(ranks, parts), codec=codec, algorithm=algorithm)
    return _all_ranks(found, reference.quantized_allreduce(parts, codec) if codec else reference.allreduce(parts))


def _reducescatter(ranks: Communicator, size: int, algorithm: str, codec: Codec | None = None) -> Results:
    parts = _of_ranks(ranks, _normal if codec else _with_special, size)
    found = ranks.reducescatter(_place(ranks, parts), codec=codec)
    return _by_rank(found, reference.quantized_reducescatter(parts, codec) if codec else reference.reducescatter(parts))


def _allgather(ranks: Communicator, size: int, algorithm: str) -> Results:
    parts = _of_ranks(ranks, _with_special, size)
    return _all_ranks(ranks.allgather(_place(ranks, parts)), reference.allgather(parts))


def _compressed(ranks: Communicator, size: int, algorithm: str, make: Callable[..., Results]) -> Results:
    """The call of ``make`` under a tuning table by which parts of any size are compressed without loss."""
    engine, any_size = ranks.engine, dict.fromkeys(WORLD_SIZES, 1)
    ranks.explain(_place(ranks, _of_ranks(ranks, _normal, 1)))  # finds the engine's own table
    own = engine.table
    try:
        engine.use_table(replace(own, lossless=LosslessPolicy(any_size, any_size, any_size)))
        return make(ranks, size, algorithm)
    finally:
        engine.use_table(own)


def _norm(ranks: Communicator, size: tuple[int, int], algorithm: str) -> Results:
    parts, rest = _of_ranks(ranks, _normal, *size), _residual_and_weight(size)
    found = graphar.allreduce_residual_rmsnorm(_place(ranks, parts), *_same(ranks, rest), group=ranks)
    expected = reference.allreduce_residual_rmsnorm(parts, *rest)
    return [one for pair in zip(found, expected, strict=True) for one in _all_ranks(*pair)]


def _norm_of_parts(ranks: Communicator, size: tuple[int, int], algorithm: str) -> Results:
    parts, (residual, weight) = _of_ranks(ranks, _normal, *size), _residual_and_weight(size)
    own = list(residual.tensor_split(ranks.world_size))
    found = graphar.reducescatter_residual_rmsnorm(
        _place(ranks, parts), _place(ranks, own), *_same(ranks, [weight]), group=ranks
    )
    expected = reference.reducescatter_residual_rmsnorm(parts, own, weight)
    return [one for pair in zip(found, zip(*expected, strict=True), strict=True) for one in _by_rank(*pair)]


def _matmul_allreduce(ranks: Communicator, size: tuple[int, int], algorithm: str) -> Results:
    a, w = _factors(ranks, size)
    found = graphar.fused_matmul_allreduce(_place(ranks, a), _place(ranks, w), partition="tiles", group=ranks)
    return _all_ranks(found, reference.fused_matmul_allreduce(a, w))


def _matmul_reducescatter(ranks: Communicator, size: tuple[int, int], algorithm: str) -> Results:
    a, w = _factors(ranks, size)
    found = graphar.fused_matmul_reducescatter(_place(ranks, a), _place(ranks, w), partition="tiles", group=ranks)
    return _by_rank(found, reference.fused_matmul_reducescatter(a, w))


def _allgather_matmul(ranks: Communicator, size: tuple[int, int], algorithm: str) -> Results:
    a, w = _factors(ranks, size)
    found = graphar.fused_allgather_matmul(_place(ranks, a), _place(ranks, w), partition="tiles", group=ranks)
    return _by_rank(found, [reference.fused_allgather_matmul(a, one) for one in w])


def _matmul_norm(ranks: Communicator, size: tuple[int, int], algorithm: str) -> Results:
    (a, w), rest = _factors(ranks, size), _residual_and_weight(size)
    found = graphar.fused_matmul_allreduce_residual_rmsnorm(
        _place(ranks, a), _place(ranks, w), *_same(ranks, rest), partition="tiles", group=ranks
    )
    expected = reference.fused_matmul_allreduce_residual_rmsnorm(a, w, *rest)
    return [one for pair in zip(found, expected, strict=True) for one in _all_ranks(*pair)]


def _matmul_norm_of_parts(ranks: Communicator, size: tuple[int, int], algorithm: str) -> Results:
    (a, w), (residual, weight) = _factors(ranks, size), _residual_and_weight(size)
    own = list(residual.tensor_split(ranks.world_size))
    given = _place(ranks, a), _place(ranks, w), _place(ranks, own), *_same(ranks, [weight])
    found = graphar.fused_matmul_reducescatter_residual_rmsnorm(*given, partition="tiles", group=ranks)
    expected = reference.fused_matmul_reducescatter_residual_rmsnorm(a, w, own, weight)
    return [one for pair in zip(found, zip(*expected, strict=True), strict=True) for one in _by_rank(*pair)]


@dataclass(frozen=True)
class _Op:
    """How the calls of an op are made."""

    name: str  # the name of the op
    # Makes a call, given a communicator, a size and an algorithm's name, and returns the results.
    make: Callable[..., Results]
    sizes: tuple  # the sizes of its calls
    # The algorithm that a call takes, given a world size and a size; None: the one that the call names.
    kernel: Callable[[int, Any], Algorithm] | None = None
    compresses: bool = False  # whether its calls are compressed without loss


def _table() -> Table:
    """Returns the tuning table of calls on this machine."""
    return find_table(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else shipped_table(DEFAULT)


def _norm_kernel(world_size: int, size: tuple[int, int]) -> Algorithm:
    table, (rows, columns) = _table(), size
    call = Call("allreduce_residual_rmsnorm", rows * columns, torch.bfloat16, 0, epilogue=RmsNorm(columns))
    return for_norm(table.norm, table.chip, world_size, call).algorithm


def _matmul_kernel(world_size: int, size: tuple[int, int]) -> Algorithm:
    return allreduce_algorithm(_table().matmul, world_size, *size)


def _gather_kernel(world_size: int, size: int) -> Algorithm:
    return for_parts(_table().parts["allgather"], 2 * size).algorithm


_OPS = (
    _Op("allreduce", _allreduce, _NUMELS),
    _Op("reducescatter", _reducescatter, _NUMELS, lambda *_: Algorithm.REDUCESCATTER_PUSH),
    _Op("allgather", _allgather, _NUMELS, _gather_kernel),
    _Op(
        "lossless_reducescatter",
        partial(_compressed, make=_reducescatter),
        _NUMELS,
        lambda *_: Algorithm.REDUCESCATTER_LOSSLESS,
        compresses=True,
    ),
    _Op(
        "lossless_allgather",
        partial(_compressed, make=_allgather),
        _NUMELS,
        lambda *_: Algorithm.ALLGATHER_LOSSLESS,
        compresses=True,
    ),
    _Op("quantized_allreduce", partial(_allreduce, codec=_CODEC), _QUANTIZED_NUMELS),
    _Op(
        "quantized_reducescatter",
        partial(_reducescatter, codec=_CODEC),
        _QUANTIZED_NUMELS,
        lambda *_: Algorithm.QUANTIZED_REDUCESCATTER,
    ),
    _Op("allreduce_residual_rmsnorm", _norm, _ROWS, _norm_kernel),
    _Op("reducescatter_residual_rmsnorm", _norm_of_parts, _ROWS, lambda *_: Algorithm.REDUCESCATTER_RMSNORM),
    _Op("fused_matmul_allreduce", _matmul_allreduce, _RESULTS, _matmul_kernel),
    _Op("fused_matmul_allreduce_residual_rmsnorm", _matmul_norm, _RESULTS, _matmul_kernel),
    _Op("fused_matmul_reducescatter", _matmul_reducescatter, _PARTS, lambda *_: Algorithm.MATMUL_REDUCESCATTER),
    _Op("fused_allgather_matmul", _allgather_matmul, _PARTS, lambda *_: Algorithm.ALLGATHER_MATMUL),
    _Op(
        "fused_matmul_reducescatter_residual_rmsnorm",
        _matmul_norm_of_parts,
        _PARTS,
        lambda *_: Algorithm.MATMUL_REDUCESCATTER,
    ),
)


# ---- operands and results -------------------------------------------------------------------------------------------


def _of_ranks(ranks: Communicator, fill: Callable[..., torch.Tensor], *shape: int) -> list[torch.Tensor]:
    return [fill(rank, *shape) for rank in range(ranks.world_size)]


def _place(ranks: Communicator, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.to(device) for part, device in zip(parts, ranks.devices, strict=True)]


def _same(ranks: Communicator, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [_place(ranks, [one] * ranks.world_size) for one in tensors]


def _by_rank(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Results:
    return list(zip(found, expected, strict=True))


def _all_ranks(found: Sequence[torch.Tensor], expected: torch.Tensor) -> Results:
    return [(one, expected) for one in found]


def _normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _with_special(seed: int, numel: int) -> torch.Tensor:
    """Returns normal values with special ones among them; ranks have special values at the same places."""
    x, special = _normal(seed, numel), torch.tensor(_SPECIAL).bfloat16()
    generator = torch.Generator().manual_seed(seed)
    x[::13] = special[torch.randint(len(special), (len(x[::13]),), generator=generator)]
    return x


def _residual_and_weight(size: tuple[int, int]) -> list[torch.Tensor]:
    return [_normal(100, *size), _normal(101, size[1])]


def _factors(ranks: Communicator, size: tuple[int, int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns each rank's ``a`` and ``w``: small integers, whose products add up to the same bits in any order."""
    rows, columns = size
    return _of_ranks(ranks, _integers, rows, _K), _of_ranks(ranks, _integers, columns, _K)


def _integers(seed: int, *shape: int) -> torch.Tensor:
    """Returns integers from -4 to 4 without 0, so that no product is -0."""
    x = torch.randint(-4, 4, shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(x < 0, x, x + 1).bfloat16()

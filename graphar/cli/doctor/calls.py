"""The calls of the self-test: some of every op, each with the kernel that it must take and its expected result."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from graphar.cli.specified import DTYPE, OfRanks, Results, SpecifiedCall, random
from graphar.communicator import Communicator
from graphar.numerics.norms import REDUCESCATTER_NORM
from graphar.plan.algorithms import COMPRESSING, COPYING, Algorithm, with_kernels
from graphar.plan.call import Call
from graphar.plan.config import FALLBACK
from graphar.plan.matmuls import fused_algorithm
from graphar.plan.policy import LosslessPolicy
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.select import Facts, select
from graphar.plan.tables import DEFAULT, Table, shipped_table
from graphar.plan.work import Exchange, Norm, Parts, Product, Work
from graphar.runtime.user_tables import find_table

_NUMELS = (7, 8199, 262149)  # less than a pack for every rank, a few blocks, many blocks; all with a partial pack
_QUANTIZED_NUMELS = (7, 8199, 65541)  # the same cases, but smaller: the specification is slow
_ROWS = ((1, 1032), (24, 1032), (300, 1032))  # rows and columns of a norm; one-shot up to 24 rows for any world size
_RESULTS = ((7, 264), (64, 4104), (300, 264))  # rows and columns of a matmul; one case for each kernel that sums it
_PARTS = _RESULTS[-1:]
_K = 136
_LOSSLESS, _QUANTIZED, _COPIED = "lossless", "quantized", "copied"
_SPECIAL = (-0.0, torch.inf, -torch.inf, torch.nan, torch.finfo(DTYPE).tiny / 4)

Compared = list[tuple[torch.Tensor, torch.Tensor]]  # pairs of a result and its expected value on the CPU


@dataclass(frozen=True)
class SelfTestCall:
    """A call of an op on all ranks, in bf16."""

    op: str  # the name of the op
    # Makes the call over a communicator with devices, and returns the results of all ranks.
    make: Callable[[Communicator], Compared]
    # The algorithm whose kernel it must take, in one launch on each rank; None: the fallback.
    kernel: Algorithm | None = None


def calls_on_gpus(algorithm: Algorithm, world_size: int) -> list[SelfTestCall]:
    """Returns the calls that take ``algorithm`` on ``world_size`` GPUs, by name or by choice; there may be none."""
    launched = algorithm if algorithm.row.layout else None

    def takes(op: _Op, size: Any) -> bool:
        if op.kernel:
            return algorithm is op.kernel(world_size, size)
        return algorithm.op == "allreduce" and algorithm.row.takes_codec == (op.variant == _QUANTIZED)

    pairs = [(op, size) for op in _OPS for size in op.sizes if takes(op, size)]
    return [SelfTestCall(op.name, partial(_make, op, size, algorithm), launched) for op, size in pairs]


def calls_on_cpu() -> list[SelfTestCall]:
    """Returns calls of every op; on the CPU all of them take the fallback, which compresses nothing without loss."""
    ops = [op for op in _OPS if op.variant not in (_LOSSLESS, _COPIED)]
    return [SelfTestCall(op.name, partial(_make, op, size, FALLBACK.algorithm)) for op in ops for size in op.sizes]


def _make(op: _Op, size: Any, algorithm: Algorithm, ranks: Communicator) -> Compared:
    """Makes a call of ``op`` over ``ranks``, by ``algorithm`` if calls of the op can name one."""
    operands, equal = op.tensors(ranks.world_size, size)
    named = {} if op.kernel else {"algorithm": algorithm.value}
    call = SpecifiedCall(op.function, operands, equal, **named, **op.options)
    make = call.over(ranks)
    found = _compressed(ranks, make) if op.variant == _LOSSLESS else make()
    return [pair for of_rank in zip(found, call.expected(), strict=True) for pair in zip(*of_rank, strict=True)]


def _compressed(ranks: Communicator, make: Callable[[], Results]) -> Results:
    """Makes a call under a tuning table by which parts of any size are compressed without loss."""
    engine, any_size = ranks.engine, dict.fromkeys(WORLD_SIZES, 1)
    ranks.explain([torch.empty(1, dtype=DTYPE, device=one) for one in ranks.devices or ()])  # finds the engine's table
    own = engine.table
    try:
        engine.use_table(replace(own, lossless=LosslessPolicy(any_size, any_size, any_size)))
        return make()
    finally:
        engine.use_table(own)


# ---- tensors: those of the ranks, and those that are equal on all ranks ---------------------------------------------

Tensors = tuple[list[OfRanks], list[torch.Tensor]]


def _normal(ranks: int, size: int | tuple[int, int]) -> Tensors:
    return [random(["cpu"] * ranks, size)], []


def _with_special(ranks: int, numel: int) -> Tensors:
    """Returns normal values with special ones among them; ranks have special values at the same places."""
    xs, special = random(["cpu"] * ranks, numel), torch.tensor(_SPECIAL, dtype=DTYPE)
    for rank, x in enumerate(xs):
        generator = torch.Generator().manual_seed(rank)
        x[::13] = special[torch.randint(len(special), x[::13].shape, generator=generator)]
    return [xs], []


def _with_special_for_each(ranks: int, numel: int) -> Tensors:
    """Returns the same, with ``numel`` elements for each rank."""
    return _with_special(ranks, ranks * numel)


def _factors(ranks: int, size: tuple[int, int]) -> Tensors:
    """Returns each rank's ``a`` and ``w``: small integers, whose products add up to the same bits in any order."""
    return [[_integers(rank, length, _K) for rank in range(ranks)] for length in size], []


def _integers(seed: int, *shape: int) -> torch.Tensor:
    """Returns integers from -4 to 4 without 0, so that no product is -0."""
    x = torch.randint(-4, 4, shape, generator=torch.Generator().manual_seed(seed))
    return torch.where(x < 0, x, x + 1).to(DTYPE)


def _norm(ranks: int, size: tuple[int, int], of: Callable[..., Tensors] = _normal) -> Tensors:
    """Returns the tensors of a sum, and the residual and the weight of its norm."""
    return of(ranks, size)[0], [*random(["cpu"], size, seed=1), *random(["cpu"], size[1], seed=2)]


def _norm_of_parts(ranks: int, size: tuple[int, int], of: Callable[..., Tensors] = _normal) -> Tensors:
    """Returns the same, with each rank's own rows of the residual."""
    operands, (residual, weight) = _norm(ranks, size, of)
    return [*operands, residual.tensor_split(ranks)], [weight]


# ---- ops ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Op:
    """How the calls of an op are made."""

    function: str  # the name of graphar's function
    tensors: Callable[[int, Any], Tensors]  # given the number of ranks and a size
    sizes: tuple  # the sizes of its calls
    # The algorithm that a call takes, given a world size and a size; None: the one that the call names.
    kernel: Callable[[int, Any], Algorithm] | None = None
    variant: str = ""  # _LOSSLESS: compressed without loss; _QUANTIZED: with a codec; _COPIED: by copy engines

    @property
    def name(self) -> str:
        return f"{self.variant}_{self.function}" if self.variant else self.function

    @property
    def options(self) -> dict[str, object]:
        if self.variant == _QUANTIZED:
            return {"codec": "int8"}
        if self.variant == _COPIED:
            return {"algorithm": COPYING[self.function].value}
        return {"partition": "tiles"} if self.function.startswith("fused") else {}


def _table() -> Table:
    return find_table(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else shipped_table(DEFAULT)


def _chosen(work: Work, world_size: int) -> Algorithm:
    table = _table()
    return select(Call(work, DTYPE, 0), Facts(world_size, table, table.chip)).config.algorithm


def _kernel_of_parts(op: str, world_size: int, size: int) -> Algorithm:
    return _chosen(Parts(op, (size if op == "allgather" else -(-size // world_size),) * world_size), world_size)


def _kernel_of_exchange(world_size: int, size: int) -> Algorithm:
    lengths = ((size,) * world_size,)
    return _chosen(Exchange(0, (1,), lengths, lengths), world_size)


def _norm_kernel(world_size: int, size: tuple[int, int]) -> Algorithm:
    rows, columns = size
    return _chosen(Norm("allreduce_residual_rmsnorm", (rows * columns,), columns), world_size)


def _matmul_kernel(op: str, world_size: int, size: tuple[int, int]) -> Algorithm:
    rows, columns = size
    return fused_algorithm(_table(), Product(op, (rows,), columns), world_size)


def _only_kernel(op: str, world_size: int, size: Any, codec: bool = False) -> Algorithm:
    (only,) = with_kernels(op, codec)
    return only


_SUMMED, _SCATTERED = (partial(_matmul_kernel, f"fused_matmul_{op}") for op in ("allreduce", "reducescatter"))
_OPS = (
    _Op("allreduce", _with_special, _NUMELS),
    _Op("reducescatter", _with_special, _NUMELS, partial(_kernel_of_parts, "reducescatter")),
    _Op("allgather", _with_special, _NUMELS, partial(_kernel_of_parts, "allgather")),
    _Op("alltoall", _with_special_for_each, _NUMELS, _kernel_of_exchange),
    _Op("reducescatter", _with_special, _NUMELS, lambda *_: COMPRESSING["reducescatter"], _LOSSLESS),
    _Op("allgather", _with_special, _NUMELS, lambda *_: COMPRESSING["allgather"], _LOSSLESS),
    _Op("reducescatter", _with_special, _NUMELS, lambda *_: COPYING["reducescatter"], _COPIED),
    _Op("allgather", _with_special, _NUMELS, lambda *_: COPYING["allgather"], _COPIED),
    _Op("allreduce", _normal, _QUANTIZED_NUMELS, variant=_QUANTIZED),
    _Op("reducescatter", _normal, _QUANTIZED_NUMELS, partial(_only_kernel, "reducescatter", codec=True), _QUANTIZED),
    _Op("allreduce_residual_rmsnorm", _norm, _ROWS, _norm_kernel),
    _Op("reducescatter_residual_rmsnorm", _norm_of_parts, _ROWS, partial(_only_kernel, REDUCESCATTER_NORM)),
    _Op("fused_matmul_allreduce", _factors, _RESULTS, _SUMMED),
    _Op("fused_matmul_allreduce_residual_rmsnorm", partial(_norm, of=_factors), _RESULTS, _SUMMED),
    _Op("fused_matmul_reducescatter", _factors, _PARTS, _SCATTERED),
    _Op("fused_allgather_matmul", _factors, _PARTS, partial(_only_kernel, "fused_allgather_matmul")),
    _Op("fused_matmul_reducescatter_residual_rmsnorm", partial(_norm_of_parts, of=_factors), _PARTS, _SCATTERED),
)

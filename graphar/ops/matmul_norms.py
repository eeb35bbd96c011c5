"""Functions for matmuls whose products are summed and normed: with an all-reduce, or with a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.partitions import TP_INVARIANT
from graphar.ops import matmul_operands, matmul_sums, norms, options
from graphar.ops.matmul_operands import Scaled, scaled_of
from graphar.ops.register import Op
from graphar.ops.repeats import Asked
from graphar.plan.call import Call, Operands
from graphar.plan.matmuls import owned_rows
from graphar.plan.work import Product
from graphar.runtime.checks import call_checks, tensor_checks
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group


@dataclass(eq=False)
class Arguments(options.Normed, options.Multiplied):
    """The arguments of matmuls whose products are summed and normed."""


@dataclass(eq=False)
class ArgumentsOfParts(Arguments, options.InParts):
    """Those of a reduce-scatter."""


NormPartition = Literal["auto", "tiles", "none", "batch_invariant", "tp_invariant"]
PARTITIONS = get_args(NormPartition)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check(
    op: str, a, w, residual, weight, eps: object, weight_offset: object, partition: object, timeout_s, scaled: Scaled
) -> tuple[list[tuple], tuple[float, float]]:
    """Checks a call, all but the shapes of its residuals; returns the tensors of each rank, and the norm's numbers."""
    call_checks.check_call(op, "auto", timeout_s)
    if partition not in PARTITIONS:
        raise ValueError(f"{op}: partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    if not scaled.scales:
        matmul_operands.check(op, a, w, None)
    ranks = [(a, w, residual, weight)]
    if isinstance(a, (list, tuple)):
        for name, given in (("w", w), ("residual", residual), ("weight", weight)):
            tensor_checks.check_one_each(op, name, given, a, "a")
        ranks = list(zip(a, w, residual, weight, strict=True))
    if scaled.scales:
        _check_scaled(op, ranks, scaled)
        matmul_operands.check(op, a, w, None, scaled, partition)
    for of_rank in ranks:
        _check_rank(op, *of_rank, bool(scaled.scales))
    return ranks, (norms.check_number(op, "eps", eps), norms.check_number(op, "weight_offset", weight_offset))


def _check_scaled(op: str, ranks: Sequence[tuple], scaled: Scaled) -> None:
    """Checks what goes with the operands of a call with scales, whose results have the dtype of the residuals."""
    for _, _, residual, weight in ranks:
        for name, x in (("residual", residual), ("weight", weight)):
            tensor_checks.check_tensor(op, name, x)
            matmul_operands.check_no_gradient(op, name, x)
        if residual.dtype != scaled.scaled_dtype or scaled.scaled_dtype not in matmul_operands.RESULT_DTYPES:
            raise ValueError(f"{op}: with scales residual must be bfloat16 or float16, got {residual.dtype}")


def _check_rank(op: str, a: torch.Tensor, w: object, residual: object, weight: object, has_scales: bool) -> None:
    if not has_scales and a.dtype not in TYPE_NAMES:
        raise ValueError(f"{op}: a must be bfloat16, float16 or float32, got {a.dtype}")
    if not w.shape[0]:
        raise ValueError(f"{op}: w must have rows, got the shape {list(w.shape)}")
    norms.check_beside(op, "weight", weight, (w.shape[0],), a, residual.dtype if has_scales else None)


def check_residuals(op: str, ranks: Sequence[tuple], lengths: Sequence[int] | None, dtype: torch.dtype | None) -> None:
    """Raises unless each rank's residual fits its product, or the part of it that has one of ``lengths``.

    Its dtype is that of ``a``, or ``dtype`` if that is not None.
    """
    for at, (a, w, residual, _) in enumerate(ranks):
        rows = a.shape[:-1] if lengths is None else (lengths[at], *a.shape[1:-1])
        norms.check_beside(op, "residual", residual, (*rows, w.shape[0]), a, dtype)


def check_leaves(op: str, engine: Engine, a, w, residual, weight, given) -> None:
    """Raises ValueError if a call is to be tensor-parallel invariant, and its ranks have no whole leaves of K."""
    matmul_sums.check_leaves(op, engine, a, w, given)


def check_parts(op: str, engine: Engine, *lists_and_given) -> None:
    """Checks the call of an op that splits rows."""
    norms.check_parts(op, engine, *lists_and_given)
    check_leaves(op, engine, *lists_and_given)


# ---- calls ----------------------------------------------------------------------------------------------------------


def scaled(op: str, a, a_scale: object, w_scale: object, residual: object) -> Scaled:
    """Returns the scales of a call that has some; its results have the dtype of the residual."""
    first = residual[0] if isinstance(residual, (list, tuple)) and residual else residual
    return scaled_of(op, a, a_scale, w_scale, None)._replace(scaled_dtype=getattr(first, "dtype", None))


def call(op: Op, asked: Asked, group: Group, scaled: Scaled, eps, weight_offset, partition, timeout_s) -> Any:
    """Makes a call as the user asked for it, and returns its results as users get them."""
    a, w, *_, residual, weight = asked[0]
    ranks, numbers = check(op.name, a, w, residual, weight, eps, weight_offset, partition, timeout_s, scaled)
    where, lengths = norms.place(op, "a", a, group, partition == TP_INVARIANT)
    check_residuals(op.name, ranks, lengths, scaled.scaled_dtype)
    norms.prepare_gradients(op.name, ranks)
    how = where | {"partition": partition, "timeout_s": timeout_s, "scales": list(scaled.scales)}
    return norms.make(op, (a, w, residual, weight), ranks, numbers, how, asked, group)


def saved(given: dict) -> tuple[str, ...]:
    """Returns the names of the tensors that the backward pass needs."""
    return "a", "w", "weight"


def fake(a, w, residual, weight, given) -> list[tuple[torch.Tensor, ...]]:
    """Returns uninitialised tensors for each rank's results: normed rows, and the new residual."""
    return [norms.empty("like_input", one) for one in residual]


def run(op: str, engine: Engine, a, w, residual, weight, outs, given):
    """Writes each rank's results: normed rows, and the new residual."""
    rows = a[0].shape[:-1].numel()
    counts = owned_rows(rows, engine.world_size)
    if isinstance(given, options.InParts):
        counts = [size * a[0].shape[1:-1].numel() for size in given.sizes]
    numbers = given.eps, given.weight_offset
    constant = getattr(given, "constant_weight", False)
    how = {"partition": given.partition, "norm": numbers, "constant_weight": constant}
    if given.scales:
        how["scales"] = matmul_operands.format_of(op, a, w, given.scales)
    work = Product(op, tuple(counts), w[0].shape[0], **how)
    ranks = []
    for rank, (x, matrix, *beside, results) in enumerate(zip(a, w, residual, weight, outs, strict=True)):
        ranks.append(Operands((x, matrix, *given.scales[2 * rank : 2 * rank + 2], *beside), results))
    return engine.run(Call.of(work, residual[0], timeout_s=given.timeout_s), ranks), ranks

"""Functions for matmuls whose products are summed and normed: with an all-reduce, or with a reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.matmul import operands
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.partitions import BATCH_INVARIANT, TP_INVARIANT
from graphar.ops import matmul_sums, norms
from graphar.ops.register import Asked, Op
from graphar.plan import call_checks, tensor_checks
from graphar.plan.call import Call, Operands
from graphar.plan.matmuls import owned_rows
from graphar.plan.work import Product
from graphar.runtime.engine import Engine
from graphar.runtime.registry import Group

PARTITIONS = ("auto", "tiles", "none", BATCH_INVARIANT, TP_INVARIANT)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check(
    op: str, a, w, residual, weight, eps: object, weight_offset: object, partition: object, timeout_s: object
) -> tuple[list[tuple], tuple[float, float]]:
    """Checks a call, all but the shapes of its residuals; returns the tensors of each rank, and the norm's numbers."""
    call_checks.check_call(op, "auto", timeout_s)
    if partition not in PARTITIONS:
        raise ValueError(f"{op}: partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    ranks = [(a, w, residual, weight)]
    if isinstance(a, (list, tuple)):
        operands.check_operand_lists(op, a, w, None)
        for name, given in (("residual", residual), ("weight", weight)):
            tensor_checks.check_one_each(op, name, given, a, "a")
        ranks = list(zip(a, w, residual, weight, strict=True))
    for of_rank in ranks:
        _check_rank(op, *of_rank)
    return ranks, (norms.check_number(op, "eps", eps), norms.check_number(op, "weight_offset", weight_offset))


def _check_rank(op: str, a: torch.Tensor, w: object, residual: object, weight: object) -> None:
    operands.check_operands(op, a, w, None)
    if a.dtype not in TYPE_NAMES:
        raise ValueError(f"{op}: a must be bfloat16, float16 or float32, got {a.dtype}")
    if not w.shape[0]:
        raise ValueError(f"{op}: w must have rows, got the shape {list(w.shape)}")
    norms.check_beside(op, "weight", weight, (w.shape[0],), a)


def check_residuals(op: str, ranks: Sequence[tuple], lengths: Sequence[int] | None = None) -> None:
    """Raises unless each rank's residual fits its product, or the part of it that has one of ``lengths``."""
    for at, (a, w, residual, _) in enumerate(ranks):
        rows = a.shape[:-1] if lengths is None else (lengths[at], *a.shape[1:-1])
        norms.check_beside(op, "residual", residual, (*rows, w.shape[0]), a)


def check_leaves(op: str, engine: Engine, a, w, residual, weight, given) -> None:
    """Raises ValueError if a call is to be tensor-parallel invariant, and its ranks have no whole leaves of K."""
    matmul_sums.check_leaves(op, engine, a, w, given)


def check_parts(op: str, engine: Engine, *lists_and_given) -> None:
    """Checks the call of an op that splits rows."""
    norms.check_parts(op, engine, *lists_and_given)
    check_leaves(op, engine, *lists_and_given)


# ---- calls ----------------------------------------------------------------------------------------------------------


def call(op: Op, asked: Asked, group: Group, **more):
    """Makes a call as the user asked for it, and returns its results as users get them.

    ``more`` are further arguments of the op.
    """
    (a, w, residual, weight), (eps, weight_offset, partition, timeout_s, *_), _ = asked
    ranks, numbers = check(op.name, a, w, residual, weight, eps, weight_offset, partition, timeout_s)
    where, lengths = norms.place(op, "a", a, group, partition == TP_INVARIANT)
    check_residuals(op.name, ranks, lengths)
    norms.prepare_gradients(op.name, ranks)
    how = where | {"partition": partition, "timeout_s": timeout_s} | more
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
    if hasattr(given, "sizes"):
        counts = [size * a[0].shape[1:-1].numel() for size in given.sizes]
    numbers = given.eps, given.weight_offset
    constant = getattr(given, "constant_weight", False)
    how = {"partition": given.partition, "norm": numbers, "constant_weight": constant}
    work = Product(op, tuple(counts), w[0].shape[0], **how)
    ranks = [
        Operands(of_rank, results)
        for of_rank, results in zip(zip(a, w, residual, weight, strict=True), outs, strict=True)
    ]
    return engine.run(Call.of(work, a[0], timeout_s=given.timeout_s), ranks), ranks

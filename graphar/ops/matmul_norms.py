"""Functions for matmuls whose products are summed and normed: with an all-reduce, or with a reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from graphar.matmul import fused, operands, overlap
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.partitions import BATCH_INVARIANT
from graphar.ops import norms
from graphar.ops.register import Op
from graphar.plan import call_checks, tensor_checks
from graphar.plan.select import has_norm_kernel
from graphar.runtime import residual_norm
from graphar.runtime.engine import Engine, as_taken

PARTITIONS = ("auto", "tiles", "none", BATCH_INVARIANT)
_SHARED = ("eps", "weight_offset", "communicator", "rank", "sizes", "timeout_s")  # arguments of the op that norms


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


# ---- runs -----------------------------------------------------------------------------------------------------------


def empty(residuals: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    """Returns uninitialised tensors for each rank's results: normed rows, and the new residual."""
    return [norms.empty("like_input", residual) for residual in residuals]


def run(
    engine: Engine,
    lists: tuple[list[torch.Tensor], ...],
    counts: Sequence[int],
    given,
    sum_in_tiles: Callable[..., None],
    norm: Op,
    scattered: bool = False,
) -> list[tuple[torch.Tensor, ...]]:
    """Returns each rank's results: normed rows, and the new residual.

    Args:
        lists: each rank's ``a``, ``w``, residual and weight.
        counts: the rows that each rank sums; together as many as ``a`` has.
        given: the op's arguments.
        sum_in_tiles: multiplies and sums by a fused kernel: ``sum_in_tiles(engine, members, counts, timeout_s)``.
        norm: the op that sums products and norms, for calls without a fused kernel.
        scattered: whether each rank has only its own rows of the sum.
    """
    a, w, residual, weight = lists
    results, columns = empty(residual), len(w[0])
    members = operands.members(a, w, [], [total for total, _ in results])
    has_kernel = sum(counts) and has_norm_kernel(columns * a[0].element_size())
    if has_kernel and fused.takes(engine, given.partition, "", members, counts, columns, scattered=scattered):
        for total, _ in results:
            # Load first: loading beside a kernel that waits for other ranks could hang.
            residual_norm.load(total.device.index, total.dtype)
        sum_in_tiles(engine, members, counts, given.timeout_s)
        for (total, summed), *rest in zip(results, residual, weight, strict=True):
            if total.numel():
                contiguous = [one.contiguous() for one in rest]
                residual_norm.norm(total, *contiguous, total, summed, given.eps, given.weight_offset)
        return results
    products = [x.new_empty((*x.shape[:-1], columns)) for x in a]
    if products[0].numel():
        made = overlap.products(engine, members, only_own=given.partition == BATCH_INVARIANT)
        products = [one.view(product.shape) for one, product in zip(made, products, strict=True)]
    shared = {name: getattr(given, name) for name in _SHARED if norm.takes(name)}
    flat = norm(*(as_taken(engine, ones) for ones in (products, residual, weight)), *norm.arguments(**shared))
    return list(zip(flat[::2], flat[1::2], strict=True))

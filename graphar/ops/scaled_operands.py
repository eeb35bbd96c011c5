"""Operands of ops in torch.float8_e4m3fn, with fp32 scales: their checks, and their form in a schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from graphar.numerics import fp8_products
from graphar.numerics.fp8_products import FP8
from graphar.numerics.partitions import BATCH_INVARIANT
from graphar.product import operands
from graphar.product.operands import flat, flat_scale
from graphar.runtime.checks.tensor_checks import check_devices, check_one_each, check_strided

RESULT_DTYPES = (torch.bfloat16, torch.float16)
PARTITIONS = ("auto", "tiles", "none", "split_m", "split_n", BATCH_INVARIANT)


class Scaled(NamedTuple):
    """The scales of a call's operands, in the form that schemas have."""

    scales: Sequence[torch.Tensor] = ()  # rank by rank: of a, and of w
    scaled_dtype: torch.dtype | None = None  # of products and results; None: that of ``a``


UNSCALED = Scaled()


def scaled_of(op: str, a: object, a_scale: object, w_scale: object, out_dtype: object) -> Scaled:
    """Returns the scales of a call that has scales or an ``out_dtype``; :func:`check` checks them.

    Raises:
        ValueError: a scale is missing, there is no such ``out_dtype``, or lists do not have one scale for each rank.
    """
    in_list = isinstance(a, (list, tuple))
    if a_scale is None and w_scale is None and out_dtype is not None:
        raise ValueError(f"{op}: out_dtype goes with a_scale and w_scale, of e4m3 operands")
    if a_scale is None or w_scale is None:
        raise ValueError(f"{op}: operands in {FP8} need both a_scale and w_scale")
    if out_dtype not in (None, *RESULT_DTYPES):
        raise ValueError(f"{op}: out_dtype must be bfloat16, float16 or None, got {out_dtype}")
    dtype = out_dtype or torch.bfloat16
    if not in_list:
        return Scaled((a_scale, w_scale), dtype)
    check_one_each(op, "a_scale", a_scale, a, "a")
    check_one_each(op, "w_scale", w_scale, a, "a")
    return Scaled([one for pair in zip(a_scale, w_scale, strict=True) for one in pair], dtype)


def check_not_needed(op: str, a: object) -> None:
    """Raises ValueError if the operands of a call without scales are in e4m3."""
    first = a[0] if isinstance(a, (list, tuple)) and a else a
    if getattr(first, "dtype", None) == FP8:
        raise ValueError(f"{op}: operands in {FP8} need both a_scale and w_scale")


def check(op: str, a, w, bias, scaled: Scaled, partition: object, rows_differ: bool = False) -> None:
    """Raises TypeError or ValueError unless e4m3 operands and their scales fit together.

    Ranks may differ in K only; if ``rows_differ``, in the rows of ``a`` and of ``w`` only.
    """
    if partition not in PARTITIONS:
        raise ValueError(f"{op}: with scales partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    in_list = isinstance(a, (list, tuple))
    if not in_list:
        a, w, bias = [a], [w], None if bias is None else [bias]
    check_one_each(op, "w", w, a, "a")
    if bias is not None:
        check_one_each(op, "bias", bias, a, "a")
    for rank, (x, weight) in enumerate(zip(a, w, strict=True)):
        _check_rank(op, x, weight, None if bias is None else bias[rank], scaled, rank)
        operands.check_alike(op, (a[0], w[0]), (x, weight), rank, rows_differ)
    if in_list:
        check_devices(op, [x.device for x in a])
    in_blocks = format_of(op, a, w, scaled.scales) == "blocks"
    if in_blocks and partition == "split_n":
        raise ValueError(f"{op}: partition 'split_n' would cut blocks of w; scales of blocks go with the others")


def _check_rank(op: str, a: object, w: object, bias: object, scaled: Scaled, rank: int) -> None:
    given = scaled.scales[2 * rank : 2 * rank + 2]
    for name, x in (("a", a), ("w", w), ("bias", bias), ("a_scale", given[0]), ("w_scale", given[1])):
        if x is None:
            continue
        check_strided(op, name, x)
        check_no_gradient(op, name, x)
    if a.ndim < 1:
        raise ValueError(f"{op}: a must have 1 or more dimensions, got []")
    fp8_products.check_operands(op, flat(a), w, bias, scaled.scaled_dtype)


def check_no_gradient(op: str, name: str, x: torch.Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: products of {FP8} have no gradients, but {name} requires one; use torch.no_grad()")


def format_of(op: str, a: Sequence[torch.Tensor], w: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> str:
    """Returns the format of the ranks' scales, "rows" or "blocks"; raises unless all have the same."""
    pairs = zip(a, w, scales[::2], scales[1::2], strict=True)
    found = [fp8_products.checked_scales(op, flat(x), weight, flat_scale(s), t).in_blocks for x, weight, s, t in pairs]
    if len(set(found)) > 1:
        raise ValueError(f"{op}: the scales of all ranks must be of rows, or all of blocks")
    return "blocks" if found[0] else "rows"

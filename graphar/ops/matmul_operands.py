"""Operands of ops with a matmul: their checks, and the form in a schema of the scales of those in e4m3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from graphar.numerics import fp8_products
from graphar.numerics.fp8_products import FP8
from graphar.numerics.partitions import BATCH_INVARIANT
from graphar.ops import options
from graphar.ops.options import Arguments
from graphar.ops.register import Op
from graphar.plan.matmuls import owned_rows
from graphar.product.operands import flat, flat_scale
from graphar.runtime.checks.tensor_checks import check_devices, check_same_kind, check_strided
from graphar.runtime.engine import Engine

RESULT_DTYPES = (torch.bfloat16, torch.float16)
_DTYPES = (*RESULT_DTYPES, torch.float32, torch.float64)  # of operands without scales
PARTITIONS = ("auto", "tiles", "none", "split_m", "split_n", BATCH_INVARIANT)


def check(
    op: str, a, w, bias, scales: tuple = (None, None, None), partition: object = "auto", rows_differ: bool = False
) -> dict[str, Any]:
    """Raises TypeError or ValueError unless one rank's operands fit together, or lists with each rank's.

    ``scales`` are a_scale, w_scale and out_dtype, as users give them. With scales, returns ``scales`` and
    ``scaled_dtype`` as schemas have them. Ranks may differ in K only; if ``rows_differ``, in the rows of ``a`` and of
    ``w`` only. Each rank's operands are on a device of its own, or all are on the CPU.
    """
    dtype = _result_dtype(op, *scales)
    if dtype and partition not in PARTITIONS:
        raise ValueError(f"{op}: with scales partition must be one of {', '.join(PARTITIONS)}, got {partition!r}")
    in_list = isinstance(a, (list, tuple))
    if in_list and not a:
        raise ValueError(f"{op}: needs at least one tensor, got an empty list")
    named = {"a_scale": scales[0], "w_scale": scales[1], "w": w, "bias": bias}
    named = {name: values for name, values in named.items() if values is not None or name == "w"}
    ranks = [dict(zip(("a", *named), values, strict=True)) for values in options.by_rank(op, a=a, **named)]
    first = ranks[0]
    for rank, of_rank in enumerate(ranks):
        if dtype:
            for name, x in of_rank.items():
                check_strided(op, name, x)
                check_no_gradient(op, name, x)
            if of_rank["a"].ndim < 1:
                raise ValueError(f"{op}: a must have 1 or more dimensions, got []")
            fp8_products.check_operands(op, flat(of_rank["a"]), of_rank["w"], of_rank.get("bias"), dtype)
        else:
            _check_plain(op, of_rank, f"[{rank}]" if in_list else "")
        _check_alike(op, first, of_rank, rank, rows_differ)
    if in_list:
        check_devices(op, [x.device for x in a])
    if not dtype:
        return {}
    of_operands = [of_rank[name] for of_rank in ranks for name in ("a_scale", "w_scale")]
    every_a, every_w = ([of_rank[name] for of_rank in ranks] for name in ("a", "w"))
    if format_of(op, every_a, every_w, of_operands) == "blocks" and partition == "split_n":
        raise ValueError(f"{op}: partition 'split_n' would cut blocks of w; scales of blocks go with the others")
    return {"scales": of_operands, "scaled_dtype": dtype}


def _result_dtype(op: str, a_scale: object, w_scale: object, out_dtype: torch.dtype | None) -> torch.dtype | None:
    """Returns the dtype of products with scales; None: there are no scales."""
    if a_scale is None and w_scale is None:
        if out_dtype is not None:
            raise ValueError(f"{op}: out_dtype goes with a_scale and w_scale, of e4m3 operands")
        return None
    if a_scale is None or w_scale is None:
        raise ValueError(f"{op}: operands in {FP8} need both a_scale and w_scale")
    if out_dtype not in (None, *RESULT_DTYPES):
        raise ValueError(f"{op}: out_dtype must be bfloat16, float16 or None, got {out_dtype}")
    return out_dtype or torch.bfloat16


def _check_plain(op: str, of_rank: dict[str, Any], where: str) -> None:
    """Checks a rank's operands without scales; ``where`` follows their names in errors."""
    a, w, bias = of_rank["a"], of_rank["w"], of_rank.get("bias")
    if getattr(a, "dtype", None) == FP8:
        raise ValueError(f"{op}: operands in {FP8} need both a_scale and w_scale")
    for name, x in of_rank.items():
        name, kind = f"{name}{where}", {"a": "1 or more", "w": "2", "bias": "1"}[name]
        check_strided(op, name, x)
        if x.dtype not in _DTYPES:
            raise TypeError(f"{op}: {name} must be bfloat16, float16, float32 or float64, got {x.dtype}")
        if x.dtype != a.dtype:
            raise ValueError(f"{op}: {name} must have the dtype of a, {a.dtype}, got {x.dtype}")
        if x.device != a.device:
            raise ValueError(f"{op}: {name} must be on the device of a, {a.device}, got {x.device}")
        if x.ndim != int(kind[0]) and (kind != "1 or more" or x.ndim < 1):
            raise ValueError(f"{op}: {name} must have {kind} dimension{'s' * (kind != '1')}, got {list(x.shape)}")
    if a.shape[-1] != w.shape[1]:
        raise ValueError(
            f"{op}: a{where} must have the last dimension of w{where}, which is [out, in] as in torch.nn.Linear, got "
            f"{list(a.shape)} and {list(w.shape)}"
        )
    if bias is not None and bias.shape[0] != w.shape[0]:
        raise ValueError(
            f"{op}: bias{where} must have shape [{w.shape[0]}], an element for each row of w, got {list(bias.shape)}"
        )


def _check_alike(op: str, first: dict[str, Any], mine: dict[str, Any], rank: int, rows_differ: bool) -> None:
    """Raises ValueError unless a rank's ``a`` and ``w`` have the shapes of the first rank's, but for K, or for rows."""
    check_same_kind(op, first["a"], mine["a"], rank)
    shapes = [(list(of_rank["a"].shape), list(of_rank["w"].shape)) for of_rank in (first, mine)]
    fixed = [(a[1:], w[1]) if rows_differ else (a[:-1], w[0]) for a, w in shapes]
    if fixed[0] != fixed[1]:
        free, ((a, w), (my_a, my_w)) = "the rows of a and w" if rows_differ else "K", shapes
        raise ValueError(
            f"{op}: the shapes of ranks may differ only in {free}, got {a} and {w} at 0, {my_a} and {my_w} at {rank}"
        )


def check_no_gradient(op: str, name: str, x: torch.Tensor) -> None:
    if x.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{op}: products of {FP8} have no gradients, but {name} requires one; use torch.no_grad()")


def format_of(op: str, a: Sequence[torch.Tensor], w: Sequence[torch.Tensor], scales: Sequence[torch.Tensor]) -> str:
    """Returns the format of the ranks' scales, "rows" or "blocks"; raises unless all have the same."""
    pairs = zip(a, w, scales[::2], scales[1::2], strict=True)
    checked = [fp8_products.checked_scales(op, flat(x), weight, flat_scale(s), t) for x, weight, s, t in pairs]
    if len({scales.format for scales in checked}) > 1:
        raise ValueError(f"{op}: the scales of all ranks must be of rows, or all of blocks")
    return checked[0].format


def multiplied(op: Op, a, w, arguments: Arguments) -> dict[str, Any]:
    """Returns what a Product has of the factors of a call."""
    of = {"format": format_of(op.name, a, w, arguments.scales)} if arguments.scales else {}
    is_constant = op.takes("constant_weight") and arguments.constant_weight
    return of | {"partition": arguments.partition, "constant_weight": is_constant}


def rows_of_ranks(op: Op, engine: Engine, a, arguments: Arguments) -> tuple[int, ...]:
    """Returns how many rows of matrices each rank has: its part's, or as many as it adds of an all-reduce."""
    if op.takes("sizes"):
        in_one = a[0].shape[1:-1].numel()
        return tuple([size * in_one for size in arguments.sizes])
    return tuple(owned_rows(a[0].shape[:-1].numel(), engine.world_size))


def lists(a, w, scales: Sequence[torch.Tensor], bias: Sequence[torch.Tensor] = ()) -> list[Sequence[torch.Tensor]]:
    """Returns the lists of the ranks' factors: a, w, perhaps their scales, and perhaps a bias."""
    of_operands = [scales[::2], scales[1::2]] if scales else []
    # Kernels read the raw memory of a bias.
    return [a, w, *of_operands, *([[x.resolve_neg().contiguous() for x in bias]] if bias else [])]


def added(
    op: str, a, bias, epilogue, shape: Sequence[int], dtype: torch.dtype | None, whole: int | None = None
) -> dict[str, Any]:
    """Returns the arguments in a schema of what is added to products of this shape: a bias, or an epilogue with it.

    ``dtype`` is the dtype of products with scales. ``whole`` is as options.epilogue_option takes it.
    """
    in_list = isinstance(a, (list, tuple))
    if epilogue is None:
        return {"bias": [] if bias is None else list(bias) if in_list else [bias]}
    like = torch.empty(shape, dtype=dtype or (a[0] if in_list else a).dtype, device="meta")
    return options.epilogue_option(op, epilogue, like, len(a) if in_list else None, whole, bias)

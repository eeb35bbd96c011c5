"""What the operands of a matmul that is summed over ranks must be; see checks.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graphar.plan.checks import check_apart, check_devices, check_strided

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_operands(op: str, a: object, w: object, bias: object, where: str = "") -> None:
    """One rank's operands; ``where`` follows their names in errors."""
    for name, x, kind in ((f"a{where}", a, "1 or more"), (f"w{where}", w, "2"), (f"bias{where}", bias, "1")):
        if x is None and x is bias:
            continue
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
            f"{op}: a{where} must have as many elements in its last dimension as w in a row, which is [out, in] as in "
            f"torch.nn.Linear, got {list(a.shape)} and {list(w.shape)}"
        )
    if bias is not None and bias.shape[0] != w.shape[0]:
        raise ValueError(f"{op}: bias{where} must be [{w.shape[0]}], as w has rows, got {list(bias.shape)}")


def check_operand_lists(op: str, a: Sequence, w: object, bias: object) -> None:
    """Operands of ranks of one process: alike but for K, each rank's on a device of its own, or all on the CPU."""
    if not a:
        raise ValueError(f"{op}: needs at least one tensor, got an empty list")
    for name, xs in (("w", w), ("bias", bias)):
        if xs is None and name == "bias":
            continue
        if not isinstance(xs, (list, tuple)) or len(xs) != len(a):
            what = f"a list of {len(xs)}" if isinstance(xs, (list, tuple)) else type(xs).__name__
            raise ValueError(f"{op}: {name} must be a list of {len(a)} tensors, one for each of a, got {what}")
    for rank, (x, weight) in enumerate(zip(a, w, strict=True)):
        check_operands(op, x, weight, bias[rank] if bias is not None else None, f"[{rank}]")
        if x.shape[:-1] != a[0].shape[:-1] or weight.shape[0] != w[0].shape[0]:
            raise ValueError(
                f"{op}: ranks may differ in K alone, got {list(a[0].shape)} and {list(w[0].shape)}, and, at {rank}, "
                f"{list(x.shape)} and {list(weight.shape)}"
            )
        if x.dtype != a[0].dtype:
            raise ValueError(f"{op}: tensors must have equal dtypes, got {a[0].dtype} and, at {rank}, {x.dtype}")
        if x.device.type != a[0].device.type:
            raise ValueError(f"{op}: tensors must be all on the CPU or all on GPUs, got {a[0].device} and {x.device}")
    check_devices(op, [x.device for x in a])


def check_result(op: str, a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: object) -> None:
    """A destination for a rank's result, apart from its operands' memory."""
    check_strided(op, "out", out)
    expected = {"shape": [*a.shape[:-1], w.shape[0]], "dtype": a.dtype, "device": a.device}
    for what, wanted in expected.items():
        found = getattr(out, what)
        if (list(found) if what == "shape" else found) != wanted:
            found = list(found) if what == "shape" else found
            raise ValueError(f"{op}: out must have the result's {what} {wanted}, got {found}")
    if not torch.compiler.is_compiling() and out.is_neg():  # a compiler cannot ask, and makes none
        raise ValueError(f"{op}: out must hold its values as they are, got a negated view")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, w, bias, out)):
        raise ValueError(f"{op}: out= cannot be differentiated through; leave it away, or call under torch.no_grad()")


def check_has_rows(op: str, a: torch.Tensor) -> None:
    if a.ndim < 2:
        raise ValueError(f"{op}: a must have 2 dimensions or more, the first of which is split, got {list(a.shape)}")


def check_results(op: str, a: Sequence, w: Sequence, bias: Sequence | None, outs: object) -> None:
    """As :func:`check_result`, one for each rank of a list."""
    if not isinstance(outs, (list, tuple)) or len(outs) != len(a):
        what = f"a list of {len(outs)}" if isinstance(outs, (list, tuple)) else type(outs).__name__
        raise ValueError(f"{op}: out must be a list of {len(a)} tensors, one for each of a, got {what}")
    for rank, out in enumerate(outs):
        check_result(op, a[rank], w[rank], bias[rank] if bias else None, out)


def check_result_memory(
    op: str, a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """What a compiler cannot ask: ``out`` has memory of its own, which no operand has."""
    check_apart(op, out, **{"a": a, "w": w} | ({} if bias is None else {"bias": bias}))

"""The operands of a matmul whose products are summed over ranks, or whose rows are gathered; and their checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.numerics.epilogues.epilogue import Pointwise
from graphar.numerics.fp8_products import Scales, checked_scales
from graphar.plan.call import Call, Operands
from graphar.plan.work import Product
from graphar.runtime.checks.tensor_checks import (
    check_apart,
    check_destination,
    check_devices,
    check_one_each,
    check_strided,
)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class MatmulOperands:
    """One rank's operands and results, of two dimensions, of a matmul whose products are summed or rows gathered."""

    a: torch.Tensor  # [M, K]; this rank's rows, if rows are gathered
    w: torch.Tensor  # [N, K]
    bias: torch.Tensor | None  # [N], added to the sum or product; or None
    out: torch.Tensor  # takes the result; contiguous
    gathered: torch.Tensor | None = None  # takes the rows of all ranks; None: they are not wanted, or none are gathered
    gathered_scales: torch.Tensor | None = None  # takes the scales of these rows, if they have scales
    tensors: tuple[torch.Tensor, ...] = ()  # of the epilogue, bound for the tensor that ``out`` is; or of the norm
    numbers: tuple[float, ...] = ()  # of the epilogue
    constant_weight: bool = False  # whether ``w`` may be loaded while the kernel before still runs
    given_k: int | None = None  # the K of the caller's operands, if ``a`` and ``w`` are copies with zeros in between
    scales: Scales | None = None  # of e4m3 operands; None: they are as they are

    def is_copy_of(self, own: Operands) -> bool:
        """Whether these are copies of the tensors ``own``, since they have more dimensions and gaps."""
        flattened = [self.a, *([self.scales.a] if self.scales else [])]
        pairs = zip(flattened, own.inputs[::2], strict=False)
        return any(x.data_ptr() != one.data_ptr() for x, one in pairs)


def operands_of(work: Product, own: Operands) -> MatmulOperands:
    """Returns one rank's operands as matrices: leading dimensions are flattened."""
    a, w, *rest = own.inputs
    a = flat(a)
    scales = checked_scales(work.op, a, w, flat_scale(rest.pop(0)), rest.pop(0)) if work.scales else None
    bias = rest.pop(0) if work.bias else None
    # The gathered rows, and their scales if they have some.
    gathered = [flat(one) for one in own.outputs[1:]] if work.gathered else []
    more = tuple(rest), own.numbers, work.constant_weight
    return MatmulOperands(a, w, bias, flat(own.outputs[0]), *[*gathered, None, None][:2], *more, scales=scales)


def with_bias_in_epilogue(call: Call[Product]) -> Call[Product]:
    """Returns the call with its bias as an epilogue of the sum, where sums take one.

    It has the same bits, half the bytes on the wire, since products stay rounded there, and one kernel.
    """
    work = call.work
    if not work.bias or work.codec or call.dtype not in TYPE_NAMES:
        return call
    epilogue = Pointwise("v + bias[col]", (call.dtype,), work.columns)
    return call._replace(work=work._replace(bias=False, epilogue=epilogue))


def flat(x: torch.Tensor) -> torch.Tensor:
    """Returns the tensor as a matrix whose rows are its last dimension."""
    return x if x.ndim == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def flat_scale(scale: torch.Tensor) -> torch.Tensor:
    """Returns the scale of an ``a`` of more dimensions as that of a matrix."""
    return flat(scale) if scale.ndim > 2 else scale


def check_operands(op: str, a: object, w: object, bias: object, where: str = "") -> None:
    """Checks one rank's operands; ``where`` follows their names in errors."""
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
            f"{op}: a{where} must have the last dimension of w{where}, which is [out, in] as in torch.nn.Linear, got "
            f"{list(a.shape)} and {list(w.shape)}"
        )
    if bias is not None and bias.shape[0] != w.shape[0]:
        raise ValueError(
            f"{op}: bias{where} must have shape [{w.shape[0]}], an element for each row of w, got {list(bias.shape)}"
        )


def check_operand_lists(op: str, a: Sequence, w: object, bias: object, rows_differ: bool = False) -> None:
    """Checks the operands of one process's ranks. They may differ in K only; if ``rows_differ``, in their rows only.

    Each rank's operands are on a device of its own, or all are on the CPU.
    """
    if not a:
        raise ValueError(f"{op}: needs at least one tensor, got an empty list")
    check_one_each(op, "w", w, a, "a")
    if bias is not None:
        check_one_each(op, "bias", bias, a, "a")
    for rank, (x, weight) in enumerate(zip(a, w, strict=True)):
        check_operands(op, x, weight, bias[rank] if bias is not None else None, f"[{rank}]")
        check_alike(op, (a[0], w[0]), (x, weight), rank, rows_differ)
        if x.dtype != a[0].dtype:
            raise ValueError(f"{op}: tensors must have equal dtypes, got {a[0].dtype} and, at {rank}, {x.dtype}")
        if x.device.type != a[0].device.type:
            raise ValueError(f"{op}: tensors must be all on the CPU or all on GPUs, got {a[0].device} and {x.device}")
    check_devices(op, [x.device for x in a])


def check_alike(op: str, first: Sequence[torch.Tensor], own: Sequence[torch.Tensor], rank: int, rows_differ: bool):
    """Raises ValueError unless a rank's ``a`` and ``w`` have the shapes of the first rank's, but for K, or for rows."""
    fixed = [(a.shape[1:], w.shape[1]) if rows_differ else (a.shape[:-1], len(w)) for a, w in (first, own)]
    if fixed[0] != fixed[1]:
        free, shapes = "the rows of a and w" if rows_differ else "K", [list(one.shape) for one in (*first, *own)]
        raise ValueError(
            f"{op}: the shapes of ranks may differ only in {free}, got {shapes[0]} and {shapes[1]} at 0, {shapes[2]} "
            f"and {shapes[3]} at {rank}"
        )


def check_result(
    op: str,
    a: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    out: object,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Checks a destination for one rank's result; :func:`check_result_memory` checks its memory.

    ``out_dtype`` is the dtype of the result; None: that of ``a``.
    """
    check_strided(op, "out", out)
    wanted = {"shape": torch.Size([*a.shape[:-1], w.shape[0]]), "dtype": out_dtype or a.dtype, "device": a.device}
    check_destination(op, "out", out, wanted, "result", (a, w, bias))


def check_has_rows(op: str, a: torch.Tensor) -> None:
    if a.ndim < 2:
        raise ValueError(f"{op}: a must have 2 dimensions or more, since its rows are split, got {list(a.shape)}")


def check_given(op: str, a: object, w: object, bias: object) -> None:
    """Checks the operands of a call: one rank's, or lists with one for each rank."""
    if isinstance(a, (list, tuple)):
        check_operand_lists(op, a, w, bias)
    else:
        check_operands(op, a, w, bias)


def check_results(op: str, a, w, bias, outs: object, out_dtype: torch.dtype | None = None) -> None:
    """Checks the destination of a call: one rank's, or a list with one for each rank."""
    if not isinstance(a, (list, tuple)):
        check_result(op, a, w, bias, outs, out_dtype)
        return
    check_one_each(op, "out", outs, a, "a")
    for rank, out in enumerate(outs):
        check_result(op, a[rank], w[rank], bias[rank] if bias else None, out, out_dtype)


def check_result_memory(
    op: str, a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """Checks that ``out`` shares no memory with an operand. torch.compile cannot trace this check."""
    check_apart(op, out, **{"a": a, "w": w} | ({} if bias is None else {"bias": bias}))

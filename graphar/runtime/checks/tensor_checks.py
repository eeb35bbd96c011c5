"""Checks of the tensors of a call: inputs, outputs, residuals, and the memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from graphar.numerics.dtypes import ACCUMULATION_DTYPES
from graphar.ranks.groups import check_devices
from graphar.runtime.checks.call_checks import check_axis


def check_strided(op: str, name: str, x: object) -> None:
    """Raises TypeError unless ``x`` is this rank's own dense tensor, of any dtype.

    NotImplementedError if it has a forward-mode tangent, which the op would drop silently.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    check_local(op, name, x)
    if x.layout != torch.strided or x.is_nested:
        got = "a nested tensor; pass its values()" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got {got}")
    if x.is_quantized:
        raise TypeError(f"{op}: {name} must not be a quantized tensor, got {x.dtype}; pass its int_repr()")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{op}: has no forward-mode derivative; use reverse mode, or detach the input")


def check_local(op: str, name: str, x: torch.Tensor) -> None:
    """Raises TypeError if ``x`` is a DTensor, which stands for the tensors of all ranks."""
    if type(x) is not torch.Tensor and hasattr(x, "to_local"):  # importing DTensor is slow
        raise TypeError(
            f"{op}: {name} must be a tensor of this rank's own, got a {type(x).__name__}; pass its to_local(), or give "
            "parallelize_module a graphar.nn.RowwiseParallel, which sums"
        )


def check_tensor(op: str, name: str, x: Any) -> None:
    """Raises as :func:`check_strided` does, or TypeError if graphar does not sum the dtype."""
    check_strided(op, name, x)
    if x.dtype not in ACCUMULATION_DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in ACCUMULATION_DTYPES)
        raise TypeError(f"{op}: {name} must be one of {dtypes}, got {x.dtype}")


def check_list(op: str, xs: Sequence[torch.Tensor]) -> None:
    """Raises unless ``xs`` can be the ranks of one process: equal shapes and dtypes, on distinct GPUs or on the CPU."""
    for i, x in enumerate(xs):
        check_tensor(op, f"tensor {i}", x)
        _check_alike(op, xs, i, "equal shapes", x.shape == xs[0].shape)
    check_devices(op, [x.device for x in xs])


def check_list_to_join(op: str, xs: Sequence[torch.Tensor], axis: Any) -> int:
    """As :func:`check_list`, but shapes may differ in ``axis``, and any dtype will do; returns it from the front."""
    for i, x in enumerate(xs):
        check_strided(op, f"tensor {i}", x)
        axis = check_axis(op, xs[0], axis)
        fits = x.ndim == xs[0].ndim and all(at == axis or x.shape[at] == size for at, size in enumerate(xs[0].shape))
        _check_alike(op, xs, i, f"equal shapes but for axis {axis}", fits)
    check_devices(op, [x.device for x in xs])
    return axis


def _check_alike(op: str, xs: Sequence[torch.Tensor], i: int, shapes: str, fits: bool) -> None:
    """Raises ValueError unless tensor ``i`` is like the first one; ``shapes`` is the rule that its shape ``fits``."""
    first, x = xs[0], xs[i]
    if not fits:
        raise ValueError(f"{op}: tensors must have {shapes}, got {list(first.shape)} and, at {i}, {list(x.shape)}")
    check_same_kind(op, first, x, i)


def check_same_kind(op: str, first: torch.Tensor, x: torch.Tensor, i: int) -> None:
    """Raises ValueError unless tensor ``i`` has the dtype of the first one, and both are on the CPU or on GPUs."""
    if x.dtype != first.dtype:
        raise ValueError(f"{op}: tensors must have equal dtypes, got {first.dtype} and, at {i}, {x.dtype}")
    if x.device.type != first.device.type:
        raise ValueError(f"{op}: tensors must be all on the CPU or all on GPUs, got {first.device} and {x.device}")


def check_one_each(op: str, name: str, values: object, xs: Sequence, xs_name: str = "x") -> None:
    """Raises ValueError unless ``values``, an argument of a call, is a list as long as ``xs``."""
    if not isinstance(values, (list, tuple)) or len(values) != len(xs):
        what = f"a list of {len(values)}" if isinstance(values, (list, tuple)) else type(values).__name__
        raise ValueError(f"{op}: {name} must be a list of {len(xs)} tensors, one for each of {xs_name}, got {what}")


def check_out(op: str, x: torch.Tensor, out: Any, name: str = "out") -> None:
    """Raises unless ``out`` can take a result like ``x``: see :func:`check_tensor` and :func:`check_destination`."""
    check_tensor(op, name, out)
    check_destination(op, name, out, {"shape": x.shape, "dtype": x.dtype, "device": x.device}, "input", (x,))


def check_destination(op: str, name: str, out: torch.Tensor, wanted: dict, of: str, sources: Sequence) -> None:
    """Raises ValueError unless ``out`` has the ``wanted`` shape, dtype and device and holds its values as they are.

    ``of`` names what has them. The result of ``sources``, which are tensors or None, must need no gradient.
    """
    for what, mine in wanted.items():
        theirs = getattr(out, what)
        if mine != theirs:
            raise ValueError(f"{op}: {name} must have the {of}'s {what} {_show(mine)}, got {_show(theirs)}")
    if not torch.compiler.is_compiling() and out.is_neg():  # torch.compile cannot trace is_neg, and makes no such views
        raise ValueError(f"{op}: {name} must hold its values as they are, got a negated view")
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (*sources, out)):
        raise ValueError(f"{op}: {name}= cannot be differentiated through; omit it, or call under torch.no_grad()")


def check_memory(op: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Raises ValueError if ``out`` overlaps ``x`` partially.

    Tensors that are not contiguous are copied, so only two contiguous tensors can be in conflict.
    """
    if x.is_contiguous() and out.is_contiguous() and 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes:
        raise ValueError(f"{op}: out must be the input itself or share no memory with it, got a partial overlap")


def check_residuals(op: str, residuals: Sequence[torch.Tensor], **others: Sequence[torch.Tensor]) -> None:
    """Raises ValueError unless the ranks' ``residuals`` are contiguous, and share no memory with any rank's others."""
    for residual in residuals:
        if not residual.is_contiguous():
            raise ValueError(f"{op}: residual must be contiguous, got strides {list(residual.stride())}")
    _check_apart(op, "residual", residuals, others)


def check_apart(op: str, outs: Sequence[torch.Tensor], **others: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if elements of a rank's output share memory, or if it shares memory with any rank's others.

    Of two outputs only those that begin at the same address are found.
    """
    for out in outs:
        check_own_memory(op, out)
    _check_apart(op, "out", outs, others)


def check_own_memory(op: str, out: torch.Tensor, name: str = "out") -> None:
    """Raises ValueError if elements of ``out``, which has this ``name``, share memory by a stride of 0."""
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"{op}: {name} must have memory of its own for each element, got strides {list(out.stride())}")


def _check_apart(op: str, name: str, written: Sequence[torch.Tensor], others: dict[str, Sequence]) -> None:
    pointers = [x.data_ptr() for x in written if x.numel()]
    if len(set(pointers)) < len(pointers):
        raise ValueError(f"{op}: {name} must be a tensor of its own for each rank, got one twice")
    read = [(what, *span(other)) for what, tensors in others.items() for other in tensors if other.numel()]
    for begin, end in [span(x) for x in written if x.numel()]:
        for what, its_begin, its_end in read:
            if begin < its_end and its_begin < end:
                raise ValueError(f"{op}: {name} must share no memory with {what}")


def span(x: torch.Tensor) -> tuple[int, int]:
    """Returns the addresses at which the memory of a non-empty tensor begins and ends."""
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def blueprint(op: str, size: tuple, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns a meta tensor, without memory, for the arguments of torch.empty; ValueError if torch refuses them."""
    try:
        return torch.empty(*size, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise ValueError(f"{op}: {error}") from None


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value)

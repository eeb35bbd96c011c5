"""What the arguments of an op must be. Each check names the argument, the rule, and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from graphar.algorithms import Algorithm
from graphar.errors import CommunicatorError
from graphar.reference import ACCUMULATION_DTYPES


def check_tensor(op: str, name: str, x: object) -> None:
    """A strided tensor of a dtype that has a sum graphar defines."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {x.layout}")
    if x.dtype not in ACCUMULATION_DTYPES:
        raise TypeError(f"{op}: {name} must be a real floating-point or integer tensor, got {x.dtype}")
    check_no_tangent(op, x)


def check_list(op: str, xs: Sequence[torch.Tensor]) -> None:
    """Tensors that can stand for the ranks of one process: alike, each on a device of its own or all on the CPU."""
    if not xs:
        raise ValueError(f"{op}: needs at least one tensor, got an empty list")
    for i, x in enumerate(xs):
        check_tensor(op, f"tensor {i}", x)
        if x.shape != xs[0].shape:
            raise ValueError(
                f"{op}: tensors must have equal shapes, got {list(xs[0].shape)} and, at {i}, {list(x.shape)}"
            )
        if x.dtype != xs[0].dtype:
            raise ValueError(f"{op}: tensors must have equal dtypes, got {xs[0].dtype} and, at {i}, {x.dtype}")
        if x.device.type != xs[0].device.type:
            raise ValueError(f"{op}: tensors must be all on the CPU or all on GPUs, got {xs[0].device} and {x.device}")
    check_devices(op, [x.device for x in xs])


def check_devices(op: str, devices: Sequence[torch.device]) -> None:
    for i, device in enumerate(devices):
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{op}: tensors must be on the CPU or on CUDA devices, got {device}")
        if device.type == "cuda" and device in devices[:i]:
            raise ValueError(f"{op}: tensors must be on distinct devices, got {device} twice")


def check_out(op: str, x: torch.Tensor, out: object) -> None:
    """A destination like ``x``: the same tensor, or one that shares no memory with it."""
    check_tensor(op, "out", out)
    for what in ("shape", "dtype", "device"):
        mine, theirs = getattr(x, what), getattr(out, what)
        if mine != theirs:
            raise ValueError(f"{op}: out must have the input's {what} {_show(mine)}, got {_show(theirs)}")
    if not torch.compiler.is_compiling() and out.is_neg():  # a compiler cannot ask, and makes none
        raise ValueError(f"{op}: out must hold its values as they are, got a negated view")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError(f"{op}: out= cannot be differentiated through; leave it away, or call under torch.no_grad()")


def check_memory(op: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """What is written has memory of its own: each element, and the whole, which is the input's or apart from it.

    Tensors with gaps go through copies, so only two without gaps can get in each other's way.
    """
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"{op}: out must have memory of its own for each element, got strides {list(out.stride())}")
    if x.is_contiguous() and out.is_contiguous() and 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes:
        raise ValueError(f"{op}: out must be the input itself or share no memory with it, got a partial overlap")


def check_no_tangent(op: str, x: torch.Tensor) -> None:
    """Not part of a forward-mode derivative, which would be lost without a word."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{op}: has no forward-mode derivative; use reverse mode, or detach the input")


def blueprint(op: str, size: tuple, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor without memory, of a size, in torch.empty's forms, and a dtype; an error where torch has none such."""
    try:
        return torch.empty(*size, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise ValueError(f"{op}: {error}") from None


def check_not_capturing(op: str, devices: Sequence[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda" and is_capturing(device):
            raise CommunicatorError(f"{op}: allocates, which cannot be captured into a graph; call it before")


def is_capturing(device: torch.device | int) -> bool:
    """Whether torch's current stream on a CUDA device is being captured into a graph."""
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


_ALGORITHMS = ("auto", *(member.value for member in Algorithm))


def check_call(op: str, algorithm: object, timeout_s: object) -> None:
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"{op}: algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if timeout_s is not None:
        check_timeout(op, timeout_s)


def check_timeout(op: str, timeout_s: object) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"{op}: timeout_s must be a number of seconds, got {type(timeout_s).__name__}")
    if not 0 < timeout_s <= 1e6:
        raise ValueError(f"{op}: timeout_s must be above 0 and at most 1e6 seconds, got {timeout_s!r}")


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value)

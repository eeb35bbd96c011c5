"""What the arguments of an op must be. Each check names the argument, the rule, and what came."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from graphar.errors import CommunicatorError
from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.norms import OPS as NORM_OPS
from graphar.plan.algorithms import Algorithm
from graphar.reference import ACCUMULATION_DTYPES


def check_strided(op: str, name: str, x: object) -> None:
    """A strided tensor of any dtype that is all there is to its values."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    check_local(op, name, x)
    if x.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {x.layout}")
    if x.is_quantized:
        raise TypeError(f"{op}: {name} must not be a quantized tensor, got {x.dtype}; pass its int_repr()")
    check_no_tangent(op, x)


def check_local(op: str, name: str, x: torch.Tensor) -> None:
    """What this rank itself has of a tensor, not a DTensor, which stands for what all ranks have."""
    if type(x) is not torch.Tensor and hasattr(x, "to_local"):  # its class is not imported, which takes long
        raise TypeError(
            f"{op}: {name} must be a tensor of this rank's own, got a {type(x).__name__}; pass its to_local(), or give "
            "parallelize_module a graphar.nn.RowwiseParallel, which sums"
        )


def check_tensor(op: str, name: str, x: object) -> None:
    """A strided tensor of a dtype that has a sum graphar defines."""
    check_strided(op, name, x)
    if x.dtype not in ACCUMULATION_DTYPES:
        raise TypeError(f"{op}: {name} must be a real floating-point or integer tensor, got {x.dtype}")


def check_list(op: str, xs: Sequence[torch.Tensor]) -> None:
    """Tensors that can stand for the ranks of one process: alike, each on a device of its own or all on the CPU."""
    _check_not_empty(op, xs)
    for i, x in enumerate(xs):
        check_tensor(op, f"tensor {i}", x)
        if x.shape != xs[0].shape:
            raise ValueError(
                f"{op}: tensors must have equal shapes, got {list(xs[0].shape)} and, at {i}, {list(x.shape)}"
            )
        _check_alike(op, xs, i)
    check_devices(op, [x.device for x in xs])


def check_list_to_join(op: str, xs: Sequence[torch.Tensor], axis: object) -> int:
    """As :func:`check_list`, with any dtype and any lengths along ``axis``; returns it, counted from the front."""
    _check_not_empty(op, xs)
    for i, x in enumerate(xs):
        check_strided(op, f"tensor {i}", x)
        axis = check_axis(op, xs[0], axis)
        if x.ndim != xs[0].ndim or _beside(axis, x) != _beside(axis, xs[0]):
            raise ValueError(
                f"{op}: tensors must have equal shapes but for axis {axis}, got {list(xs[0].shape)} and, at {i}, "
                f"{list(x.shape)}"
            )
        _check_alike(op, xs, i)
    check_devices(op, [x.device for x in xs])
    return axis


def _check_not_empty(op: str, xs: Sequence[torch.Tensor]) -> None:
    if not xs:
        raise ValueError(f"{op}: needs at least one tensor, got an empty list")


def _check_alike(op: str, xs: Sequence[torch.Tensor], i: int) -> None:
    x = xs[i]
    if x.dtype != xs[0].dtype:
        raise ValueError(f"{op}: tensors must have equal dtypes, got {xs[0].dtype} and, at {i}, {x.dtype}")
    if x.device.type != xs[0].device.type:
        raise ValueError(f"{op}: tensors must be all on the CPU or all on GPUs, got {xs[0].device} and {x.device}")


def _beside(axis: int, x: torch.Tensor) -> list[int]:
    return [*x.shape[:axis], *x.shape[axis + 1 :]]


def check_devices(op: str, devices: Sequence[torch.device]) -> None:
    for i, device in enumerate(devices):
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{op}: tensors must be on the CPU or on CUDA devices, got {device}")
        if device.type == "cuda" and device in devices[:i]:
            raise ValueError(f"{op}: tensors must be on distinct devices, got {device} twice")


def check_out(op: str, x: torch.Tensor, out: object, name: str = "out") -> None:
    """A destination like ``x``: the same tensor, or one that shares no memory with it."""
    check_tensor(op, name, out)
    for what in ("shape", "dtype", "device"):
        mine, theirs = getattr(x, what), getattr(out, what)
        if mine != theirs:
            raise ValueError(f"{op}: {name} must have the input's {what} {_show(mine)}, got {_show(theirs)}")
    if not torch.compiler.is_compiling() and out.is_neg():  # a compiler cannot ask, and makes none
        raise ValueError(f"{op}: {name} must hold its values as they are, got a negated view")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError(
            f"{op}: {name}= cannot be differentiated through; leave it away, or call under torch.no_grad()"
        )


def check_memory(op: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """What is written has memory of its own: each element, and the whole, which is the input's or apart from it.

    Tensors with gaps go through copies, so only two without gaps can get in each other's way.
    """
    _check_own_memory(op, out)
    if x.is_contiguous() and out.is_contiguous() and 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes:
        raise ValueError(f"{op}: out must be the input itself or share no memory with it, got a partial overlap")


def check_residual(op: str, residual: torch.Tensor, **others: torch.Tensor) -> None:
    """It is without gaps, and apart from what the call reads and writes besides."""
    if not residual.is_contiguous():
        raise ValueError(f"{op}: residual must be contiguous, got strides {list(residual.stride())}")
    _check_apart(op, "residual", residual, others)


def check_apart(op: str, out: torch.Tensor, **others: torch.Tensor) -> None:
    """What is written has memory of its own, each element, and is apart from what the call reads."""
    _check_own_memory(op, out)
    _check_apart(op, "out", out, others)


def check_distinct(op: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """What is written for each rank has memory of its own: not one tensor as often as there are ranks."""
    pointers = [one.data_ptr() for one in tensors if one.numel()]
    if len(set(pointers)) < len(pointers):
        raise ValueError(f"{op}: {name} must be a tensor of its own for each rank, got one twice")


def _check_own_memory(op: str, out: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"{op}: out must have memory of its own for each element, got strides {list(out.stride())}")


def _check_apart(op: str, name: str, written: torch.Tensor, others: dict[str, torch.Tensor]) -> None:
    begin, end = span(written)
    for what, other in others.items():
        if written.numel() and other.numel() and begin < span(other)[1] and span(other)[0] < end:
            raise ValueError(f"{op}: {name} must share no memory with {what}")


def span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses where the memory of a tensor that has elements begins and ends."""
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def check_axis(op: str, x: torch.Tensor, axis: object) -> int:
    """``axis`` counted from the front; negative ones count from the end."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"{op}: axis must be an int, got {type(axis).__name__}")
    if x.ndim == 0:
        raise ValueError(f"{op}: tensors must have at least one dimension, got a 0-d tensor")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{op}: axis must be from {-x.ndim} to {x.ndim - 1} for a tensor of shape {_show(x.shape)}, got {axis}"
        )
    return axis % x.ndim


def check_sizes(op: str, sizes: object, world_size: int, rank: int, length: int) -> list[int]:
    """Every rank's length, this one's being ``length``; as a list."""
    if not isinstance(sizes, Sequence) or not all(isinstance(size, (int, torch.SymInt)) for size in sizes):
        raise TypeError(f"{op}: sizes must be a sequence of ints, got {sizes!r}")
    if len(sizes) != world_size:
        raise ValueError(f"{op}: sizes must have a length for each of {world_size} ranks, got {len(sizes)}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"{op}: sizes must not be negative, got {list(sizes)}")
    if sizes[rank] != length:
        raise ValueError(
            f"{op}: sizes must have x's length {length} for rank {rank}, which is this one, got {list(sizes)}"
        )
    return list(sizes)


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


def is_capturing(device: torch.device | int, stream: torch.cuda.Stream | None = None) -> bool:
    """Whether a stream of a CUDA device, by default torch's current one, is being captured into a graph."""
    with torch.cuda.device(device), torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


_ALLREDUCES = ("allreduce", "hierarchical_allreduce")
_ALGORITHMS = ("auto", *(member.value for member in Algorithm if member.op in _ALLREDUCES))


def check_call(op: str, algorithm: object, timeout_s: object) -> None:
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"{op}: algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if timeout_s is not None:
        check_timeout(op, timeout_s)


_WITH_ANY_CODEC = (Algorithm.FALLBACK.value, Algorithm.HIERARCHICAL.value)
_QUANTIZED = ("auto", *(one.value for one in Algorithm if one.op == "quantized_allreduce"), *_WITH_ANY_CODEC)
_CODEC_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_codec(op: str, codec: object) -> Codec:
    """A codec, or the text of one."""
    if isinstance(codec, Codec):
        return codec
    if not isinstance(codec, str):
        raise TypeError(f"{op}: codec must be a graphar.Codec or the name of one, got {type(codec).__name__}")
    try:
        return codec_of_text(codec)
    except ValueError as error:
        raise ValueError(f"{op}: {error}") from None


def check_quantized_call(op: str, codec: object, algorithm: object, x: torch.Tensor) -> Codec:
    """A codec that can round ``x``, and may do so now."""
    found = check_codec(op, codec)
    if x.dtype not in _CODEC_DTYPES:
        raise ValueError(f"{op}: a codec rounds bfloat16, float16 and float32, got a tensor of {x.dtype}")
    if algorithm not in _QUANTIZED:
        raise ValueError(f"{op}: algorithm must be one of {', '.join(_QUANTIZED)} with a codec, got {algorithm!r}")
    if found.rounding == "stochastic" and found.seed is None and torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            f"{op}: stochastic rounding without a seed is not deterministic, which torch.use_deterministic_algorithms "
            "asks for; give the codec a seed"
        )
    return found


def check_ops(op: str, ops: object) -> list[str]:
    """Names of ops that have kernels, as a list."""
    # Those with codecs, which are named beside them, count as the ops without; a matmul's kernel depends on its size.
    kernels = [one for one in Algorithm if not one.of_matmul and one is not Algorithm.HIERARCHICAL]
    known = list(dict.fromkeys([*(one.op.removeprefix("quantized_") for one in kernels), *NORM_OPS.values()]))
    wanted = list(ops)
    if isinstance(ops, str) or any(one not in known for one in wanted):
        raise ValueError(f"{op}: ops must be a list with any of {', '.join(known)}, got {ops!r}")
    return wanted


def check_timeout(op: str, timeout_s: object) -> None:
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"{op}: timeout_s must be a number of seconds, got {type(timeout_s).__name__}")
    if not 0 < timeout_s <= 1e6:
        raise ValueError(f"{op}: timeout_s must be above 0 and at most 1e6 seconds, got {timeout_s!r}")


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value)

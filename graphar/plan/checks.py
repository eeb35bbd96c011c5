"""Checks of the arguments of ops. An error names the argument, the rule, and the value that it got."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import forward_ad

from graphar.errors import CommunicatorError
from graphar.numerics.codecs import Codec, as_codec
from graphar.numerics.dtypes import ACCUMULATION_DTYPES, TYPE_NAMES
from graphar.numerics.norms import PREPARED as NORMS
from graphar.plan.algorithms import Algorithm, kernels_that, with_kernels
from graphar.plan.tensor_tuple import PREPARED_TUPLE


def check_strided(op: str, name: str, x: object) -> None:
    """Raises unless ``x`` is this rank's own dense tensor, of any dtype, without a forward-mode tangent.

    Raises:
        TypeError: it is no tensor, a DTensor, not strided, or quantized.
        NotImplementedError: it is part of a forward-mode derivative.
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{op}: {name} must be a torch.Tensor, got {type(x).__name__}")
    check_local(op, name, x)
    if x.layout != torch.strided:
        raise TypeError(f"{op}: {name} must be a dense (strided) tensor, got layout {x.layout}")
    if x.is_quantized:
        raise TypeError(f"{op}: {name} must not be a quantized tensor, got {x.dtype}; pass its int_repr()")
    check_no_tangent(op, x)


def check_local(op: str, name: str, x: torch.Tensor) -> None:
    """Raises TypeError if ``x`` is a DTensor, which stands for the tensors of all ranks."""
    if type(x) is not torch.Tensor and hasattr(x, "to_local"):  # importing DTensor is slow
        raise TypeError(
            f"{op}: {name} must be a tensor of this rank's own, got a {type(x).__name__}; pass its to_local(), or give "
            "parallelize_module a graphar.nn.RowwiseParallel, which sums"
        )


def check_tensor(op: str, name: str, x: object) -> None:
    """Raises unless ``x`` is this rank's own dense tensor, of a dtype that graphar sums.

    Raises:
        TypeError: it is no tensor, a DTensor, not strided, quantized, or of another dtype.
        NotImplementedError: it is part of a forward-mode derivative.
    """
    check_strided(op, name, x)
    if x.dtype not in ACCUMULATION_DTYPES:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in ACCUMULATION_DTYPES)
        raise TypeError(f"{op}: {name} must be one of {dtypes}, got {x.dtype}")


def check_list(op: str, xs: Sequence[torch.Tensor]) -> None:
    """Raises unless ``xs`` can be the ranks of one process: equal shapes and dtypes, on distinct GPUs or on the CPU."""
    _check_not_empty(op, xs)
    for i, x in enumerate(xs):
        check_tensor(op, f"tensor {i}", x)
        _check_alike(op, xs, i, "equal shapes", x.shape == xs[0].shape)
    check_devices(op, [x.device for x in xs])


def check_list_to_join(op: str, xs: Sequence[torch.Tensor], axis: object) -> int:
    """Returns ``axis``, counted from the front, of tensors that can be gathered along it.

    Raises unless ``xs`` can be the ranks of one process: equal shapes but for ``axis``, equal dtypes of any kind, on
    distinct GPUs or on the CPU.
    """
    _check_not_empty(op, xs)
    for i, x in enumerate(xs):
        check_strided(op, f"tensor {i}", x)
        axis = check_axis(op, xs[0], axis)
        fits = x.ndim == xs[0].ndim and _beside(axis, x) == _beside(axis, xs[0])
        _check_alike(op, xs, i, f"equal shapes but for axis {axis}", fits)
    check_devices(op, [x.device for x in xs])
    return axis


def _check_not_empty(op: str, xs: Sequence[torch.Tensor]) -> None:
    if not xs:
        raise ValueError(f"{op}: needs at least one tensor, got an empty list")


def _check_alike(op: str, xs: Sequence[torch.Tensor], i: int, shapes: str, fits: bool) -> None:
    """Raises ValueError unless tensor ``i`` is like the first one; ``shapes`` is the rule that its shape ``fits``."""
    first, x = xs[0], xs[i]
    if not fits:
        raise ValueError(f"{op}: tensors must have {shapes}, got {list(first.shape)} and, at {i}, {list(x.shape)}")
    if x.dtype != first.dtype:
        raise ValueError(f"{op}: tensors must have equal dtypes, got {first.dtype} and, at {i}, {x.dtype}")
    if x.device.type != first.device.type:
        raise ValueError(f"{op}: tensors must be all on the CPU or all on GPUs, got {first.device} and {x.device}")


def _beside(axis: int, x: torch.Tensor) -> list[int]:
    return [*x.shape[:axis], *x.shape[axis + 1 :]]


def check_one_each(op: str, name: str, given: object, xs: Sequence, xs_name: str = "x") -> None:
    """Raises ValueError unless ``given`` is a list as long as ``xs``, one of a call's arguments."""
    if not isinstance(given, (list, tuple)) or len(given) != len(xs):
        what = f"a list of {len(given)}" if isinstance(given, (list, tuple)) else type(given).__name__
        raise ValueError(f"{op}: {name} must be a list of {len(xs)} tensors, one for each of {xs_name}, got {what}")


def check_devices(op: str, devices: Sequence[torch.device]) -> None:
    """Raises ValueError for devices that are neither CPU nor CUDA, and for a CUDA device that occurs twice."""
    for i, device in enumerate(devices):
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{op}: tensors must be on the CPU or on CUDA devices, got {device}")
        if device.type == "cuda" and device in devices[:i]:
            raise ValueError(f"{op}: tensors must be on distinct devices, got {device} twice")


def check_out(op: str, x: torch.Tensor, out: object, name: str = "out") -> None:
    """Raises unless ``out`` can take a result like ``x``.

    Raises:
        TypeError: it is no dense tensor of a dtype that graphar sums.
        ValueError: its shape, dtype or device differs, it is a negated view, or the result needs a gradient.
    """
    check_tensor(op, name, out)
    for what in ("shape", "dtype", "device"):
        mine, theirs = getattr(x, what), getattr(out, what)
        if mine != theirs:
            raise ValueError(f"{op}: {name} must have the input's {what} {_show(mine)}, got {_show(theirs)}")
    if not torch.compiler.is_compiling() and out.is_neg():  # a compiler cannot trace is_neg
        raise ValueError(f"{op}: {name} must hold its values as they are, got a negated view")
    if torch.is_grad_enabled() and (x.requires_grad or out.requires_grad):
        raise ValueError(f"{op}: {name}= cannot be differentiated through; omit it, or call under torch.no_grad()")


def check_memory(op: str, x: torch.Tensor, out: torch.Tensor) -> None:
    """Raises ValueError if elements of ``out`` share memory, or if ``out`` overlaps ``x`` partially.

    Tensors that are not contiguous are copied, so only two contiguous ones can be in conflict.
    """
    _check_own_memory(op, out)
    if x.is_contiguous() and out.is_contiguous() and 0 < abs(x.data_ptr() - out.data_ptr()) < x.nbytes:
        raise ValueError(f"{op}: out must be the input itself or share no memory with it, got a partial overlap")


def check_residual(op: str, residual: torch.Tensor, **others: torch.Tensor) -> None:
    """Raises ValueError unless ``residual`` is contiguous and shares no memory with ``others``."""
    if not residual.is_contiguous():
        raise ValueError(f"{op}: residual must be contiguous, got strides {list(residual.stride())}")
    _check_apart(op, "residual", residual, others)


def check_apart(op: str, out: torch.Tensor, **others: torch.Tensor) -> None:
    """Raises ValueError if elements of ``out`` share memory, or if ``out`` shares memory with ``others``."""
    _check_own_memory(op, out)
    _check_apart(op, "out", out, others)


def check_distinct(op: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raises ValueError if two of the ranks' ``tensors`` begin at the same address."""
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
    """Returns the addresses at which the memory of a non-empty tensor begins and ends."""
    last = sum(stride * (size - 1) for stride, size in zip(x.stride(), x.shape, strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def check_axis(op: str, x: torch.Tensor, axis: object) -> int:
    """Returns ``axis`` counted from the front. A negative axis counts from the end.

    Raises:
        TypeError: it is not an int.
        ValueError: ``x`` has no such dimension.
    """
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"{op}: axis must be an int, got {type(axis).__name__}")
    if x.ndim == 0:
        raise ValueError(f"{op}: tensors must have at least one dimension, got a 0-d tensor")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{op}: axis must be from {-x.ndim} to {x.ndim - 1} for a tensor of shape {_show(x.shape)}, got {axis}"
        )
    return axis % x.ndim


def check_sizes(op: str, sizes: object, world_size: int, rank: int, length: int, name: str = "x") -> list[int]:
    """Returns the length of each rank's part as a list; ``length`` is this rank's, of the tensor ``name``.

    Raises:
        TypeError: ``sizes`` is not a sequence of ints.
        ValueError: there is not one size a rank, one is negative, or this rank's differs from ``length``.
    """
    if not isinstance(sizes, Sequence) or not all(isinstance(size, (int, torch.SymInt)) for size in sizes):
        raise TypeError(f"{op}: sizes must be a sequence of ints, got {sizes!r}")
    if len(sizes) != world_size:
        raise ValueError(f"{op}: sizes must have a length for each of {world_size} ranks, got {len(sizes)}")
    if any(size < 0 for size in sizes):
        raise ValueError(f"{op}: sizes must not be negative, got {list(sizes)}")
    if sizes[rank] != length:
        raise ValueError(
            f"{op}: sizes must have {name}'s length {length} for rank {rank}, which is this one, got {list(sizes)}"
        )
    return list(sizes)


def check_no_tangent(op: str, x: torch.Tensor) -> None:
    """Raises NotImplementedError if ``x`` has a forward-mode tangent, which the op would drop silently."""
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError(f"{op}: has no forward-mode derivative; use reverse mode, or detach the input")


def blueprint(op: str, size: tuple, dtype: torch.dtype | None) -> torch.Tensor:
    """Returns a meta tensor, without memory, for the arguments of torch.empty; ValueError if torch refuses them."""
    try:
        return torch.empty(*size, dtype=dtype, device="meta")
    except RuntimeError as error:
        raise ValueError(f"{op}: {error}") from None


def check_not_capturing(op: str, devices: Sequence[torch.device]) -> None:
    """Raises CommunicatorError if the current stream of a CUDA device is being captured into a graph."""
    for device in devices:
        if device.type == "cuda" and is_capturing(device):
            raise CommunicatorError(f"{op}: allocates, which cannot be captured into a graph; call it before")


def is_capturing(device: torch.device | int, stream: torch.cuda.Stream | None = None) -> bool:
    """Returns whether a stream of a CUDA device is being captured into a graph. None: torch's current stream."""
    with torch.cuda.device(device), torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


_ALGORITHMS = ("auto", *(one.value for one in Algorithm if one.op == "allreduce" and not one.row.takes_codec))


def check_call(op: str, algorithm: object, timeout_s: object) -> None:
    """Raises unless ``algorithm`` names an all-reduce without a codec, and ``timeout_s`` is valid or None."""
    if algorithm not in _ALGORITHMS:
        raise ValueError(f"{op}: algorithm must be one of {', '.join(_ALGORITHMS)}, got {algorithm!r}")
    if timeout_s is not None:
        check_timeout(op, timeout_s)


_WITH_ANY_CODEC = (Algorithm.FALLBACK.value, Algorithm.HIERARCHICAL.value)
_QUANTIZED = ("auto", *(one.value for one in with_kernels("allreduce", codec=True)), *_WITH_ANY_CODEC)


def check_quantized_call(op: str, codec: object, algorithm: object, x: torch.Tensor) -> Codec:
    """Returns the codec of a call, which can round ``x``.

    Raises:
        TypeError: ``codec`` is neither a Codec nor a string.
        ValueError: there is no such codec, the dtype of ``x`` is not bf16, fp16 or fp32, ``algorithm`` takes no codec,
            or stochastic rounding has no seed while torch.use_deterministic_algorithms is on.
    """
    found = as_codec(op, codec)
    if x.dtype not in TYPE_NAMES:
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
    """Returns ``ops`` as a list; ValueError unless all have kernels that can be prepared."""
    # The kernel of a matmul depends on its size, and cannot be prepared.
    kernels = kernels_that(lambda row: row.folder != "matmul")
    known = list(dict.fromkeys([*(one.op for one in kernels), PREPARED_TUPLE, *NORMS]))
    wanted = list(ops)
    if isinstance(ops, str) or any(one not in known for one in wanted):
        raise ValueError(f"{op}: ops must be a list with any of {', '.join(known)}, got {ops!r}")
    return wanted


def check_timeout(op: str, timeout_s: object) -> None:
    """Raises unless ``timeout_s`` is a number of seconds above 0 and at most 1e6."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"{op}: timeout_s must be a number of seconds, got {type(timeout_s).__name__}")
    if not 0 < timeout_s <= 1e6:
        raise ValueError(f"{op}: timeout_s must be above 0 and at most 1e6 seconds, got {timeout_s!r}")


def _show(value: object) -> str:
    return str(list(value)) if isinstance(value, torch.Size) else str(value)

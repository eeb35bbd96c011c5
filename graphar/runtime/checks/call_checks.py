"""Checks of the other arguments of a call: algorithm, codec, deadline, axis, sizes of parts, ops to prepare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from graphar.numerics.codecs import Codec, as_codec
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import NAMED, WITHOUT_KERNEL, is_from_outside, with_kernels
from graphar.plan.select import PREPARED


def check_call(op: str, algorithm: object, timeout_s: object, of: str = "allreduce") -> None:
    """Raises unless ``algorithm`` names an algorithm of ``of`` without a codec, and ``timeout_s`` is valid or None."""
    if algorithm != "auto" and algorithm not in NAMED[of]:
        if is_from_outside(algorithm):
            raise ValueError(f"{op}: this process has loaded no algorithm {str(algorithm)!r} of {of}")
        raise ValueError(f"{op}: algorithm must be one of {', '.join(('auto', *NAMED[of]))}, got {algorithm!r}")
    if timeout_s is not None:
        check_timeout(op, timeout_s)


_QUANTIZED = ("auto", *(taker.value for taker in (*with_kernels("allreduce", codec=True), *WITHOUT_KERNEL.values())))


def check_quantized_call(op: str, codec: object, algorithm: object, x: torch.Tensor) -> Codec:
    """Returns the codec of a call by ``algorithm``, which can round ``x``; raises TypeError or ValueError."""
    checked = as_codec(op, codec)
    if x.dtype not in TYPE_NAMES:
        raise ValueError(f"{op}: a codec rounds bfloat16, float16 and float32, got a tensor of {x.dtype}")
    if algorithm not in _QUANTIZED:
        raise ValueError(f"{op}: algorithm must be one of {', '.join(_QUANTIZED)} with a codec, got {algorithm!r}")
    if checked.rounding == "stochastic" and checked.seed is None and torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            f"{op}: stochastic rounding without a seed is not deterministic, which torch.use_deterministic_algorithms "
            "asks for; give the codec a seed"
        )
    return checked


LONGEST_S = 1e6  # the longest deadline, in seconds


def check_timeout(op: str, timeout_s: object) -> None:
    """Raises unless ``timeout_s`` is a number of seconds above 0 and at most LONGEST_S."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)):
        raise TypeError(f"{op}: timeout_s must be a number of seconds, got {type(timeout_s).__name__}")
    if not 0 < timeout_s <= LONGEST_S:
        raise ValueError(f"{op}: timeout_s must be above 0 and at most 1e6 seconds, got {timeout_s!r}")


def check_ops(op: str, ops: Iterable[str]) -> list[str]:
    """Returns ``ops`` as a list of names; ValueError unless all have kernels that can be prepared."""
    wanted, known = list(ops), [*PREPARED, *(key for named in NAMED.values() for key in named if is_from_outside(key))]
    if isinstance(ops, str) or any(name not in known for name in wanted):
        raise ValueError(f"{op}: ops must be a list with any of {', '.join(known)}, got {ops!r}")
    return [str(name) for name in wanted]


def check_prepared(op: str, dtypes: object, max_nbytes: object, codecs: object, epilogues: object) -> list[torch.dtype]:
    """Returns ``dtypes`` as a list; TypeError unless it has torch's dtypes, and others are lists and no text."""
    for name, example, given in (("codecs", "int8", codecs), ("epilogues", "gelu(v)", epilogues)):
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise TypeError(f"{op}: {name} must be a list, such as [{example!r}], got {given!r}")
    wanted: list[Any] = list(dtypes) if isinstance(dtypes, Iterable) else [None]
    if not all(isinstance(dtype, torch.dtype) for dtype in wanted):
        raise TypeError(f"{op}: dtypes must be a list of torch.dtype, such as [torch.bfloat16], got {dtypes!r}")
    if isinstance(max_nbytes, str):
        raise TypeError(f"{op}: max_nbytes must be a number of bytes or None, got {max_nbytes!r}")
    return wanted


def check_axis(op: str, x: torch.Tensor, axis: object, name: str = "axis") -> int:
    """Returns ``axis``, an argument of this ``name``, counted from the front; raises TypeError or ValueError."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"{op}: {name} must be an int, got {type(axis).__name__}")
    if x.ndim == 0:
        raise ValueError(f"{op}: tensors must have at least one dimension, got a 0-d tensor")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{op}: {name} must be from {-x.ndim} to {x.ndim - 1} for a tensor of shape {list(x.shape)}, got {axis}"
        )
    return axis % x.ndim


def check_sizes(op: str, sizes: object, world_size: int, rank: int, length: int, name: str = "x") -> list[int]:
    """Returns the length of each rank's part, if ``name`` has ``length`` in all; raises TypeError or ValueError."""
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

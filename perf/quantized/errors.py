"""How far a result is from the exact sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graphar import reference
from graphar.numerics.codecs import Codec
from perf.quantized.data import KINDS


@dataclass(frozen=True)
class ErrorRow:
    """Attributes:
    codec: its text; "exact" for the all-reduce without one, which rounds its sum to bfloat16 once.
    data: the kind of data.
    bits: of an element on the wire.
    relative_l2: the error's length over the exact sum's.
    relative_max: the largest error over the largest exact magnitude.
    cosine: of the angle between result and exact sum.
    """

    codec: str
    data: str
    world_size: int
    bits: float
    relative_l2: float
    relative_max: float
    cosine: float


def rows(codecs: Sequence[Codec], world_size: int, device: torch.device) -> Iterator[ErrorRow]:
    """Of every codec and kind of data; by the specification, whose bits are the kernels'."""
    for name, make in KINDS.items():
        parts = make(world_size, device)
        exact = torch.stack(parts).double().sum(0)
        yield ErrorRow("exact", name, world_size, 8.0 * parts[0].itemsize, *errors(reference.allreduce(parts), exact))
        for codec in codecs:
            result = reference.quantized_allreduce(parts, codec)
            yield ErrorRow(codec.text, name, world_size, codec.bits_per_element, *errors(result, exact))


def errors(result: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Relative L2, relative maximum, cosine."""
    result = result.double()
    error, length = result - exact, exact.norm()
    return (
        (error.norm() / length).item(),
        (error.abs().max() / exact.abs().max()).item(),
        (result.flatten() @ exact.flatten() / (result.norm() * length)).item(),
    )

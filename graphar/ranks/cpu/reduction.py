"""The arithmetic of a call without kernels: what a rank sends of its tensor, and the sum of what it received.

The sums have the bits of every exact algorithm, or of a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from graphar import reference
from graphar.errors import UnsupportedError
from graphar.numerics import codec_reference, cpu_codec
from graphar.numerics.codec_reference import SUM, Noise, rounding_error
from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.numerics.dtypes import ACCUMULATION_DTYPES, with_canonical_nan
from graphar.numerics.epilogues.epilogue import EpilogueInputs
from graphar.plan.call import Call, Operands
from graphar.plan.work import Parts, Sum

Tensors = Sequence[torch.Tensor]

_PIECE = 1 << 17  # elements that are summed at a time, in fp32
_SEED_NBYTES = 16  # with padding: what follows is aligned for kernels


def reduction_of(
    call: Call[Sum | Parts], calls: Iterator[int], tells_seed: bool, coder: Coder | None = None
) -> Callable[[], Reduction]:
    """Returns a function that begins a call, and returns its reduction. The arguments are as in fallback.bind.

    With ``tells_seed`` ranks send the seed of stochastic rounding, since all encode the sum with the seed of rank 0.
    """
    work, codec = call.work, call.wire
    known = work._replace(codec="") if codec else work._replace(epilogue=None, order="rank", out_dtype=None)
    if not known.is_plain:
        raise UnsupportedError(f"{call.op}: no kernel serves this call, and without kernels there is no {known}")
    if codec:
        scatters = work.op == "reducescatter"
        tells = tells_seed and not scatters and codec.rounding == "stochastic"
        return lambda: CodedSum(codec, coder or TorchCoder(codec), next(calls), scatters, tells)
    exact = ExactSum(work, work.is_plain)
    return lambda: exact


@dataclass(frozen=True)
class ExactSum:
    """The sum of elements as they are, in the order and with the epilogue of a work."""

    work: Sum | Parts
    is_plain: bool

    @property
    def is_own(self) -> bool:
        """Whether a rank's sum depends on operands of its own besides the tensors."""
        return self.work.epilogue is not None

    def encode(self, part: torch.Tensor, rank: int, first: int) -> torch.Tensor:
        """Returns what a rank sends of elements of its tensor; ``first`` is the index of the first one."""
        return part

    def into(self, target: torch.Tensor, parts: Tensors, operands: Operands, first: int) -> torch.Tensor:
        """Writes the sum of what all ranks sent, and returns it as it travels: the target itself, or its codes.

        ``first`` is the index of the first element in this rank's result.
        """
        if self.is_plain and target.device.type == "cpu":
            sum_into(target, parts)
            return target
        form, order = self.work.epilogue, "tree" if self.work.order == "tree" else "rank"
        total = reference.allreduce(parts, order=order, out_dtype=torch.float32 if form else target.dtype)
        if form:
            inputs = EpilogueInputs(list(operands.inputs[1:]), list(operands.numbers), operands.corner)
            values = form.apply(total, inputs, first, operands.outputs[0].numel())
            total = with_canonical_nan(values.to(target.dtype))
        return target.copy_(total)

    def room(self, target: torch.Tensor) -> torch.Tensor:
        """Returns a tensor for a rank's sum as it travels."""
        return target

    def arrived(self, target: torch.Tensor, travelled: torch.Tensor) -> None:
        """Writes another rank's sum, which may have come in its room."""
        if travelled is not target:
            target.copy_(travelled)


@dataclass(frozen=True)
class CodedSum:
    """The sum of codes, with the bits of the kernels. A scattered sum is not encoded again."""

    codec: Codec
    coder: Coder
    call: int  # its number, which random numbers depend on
    scatters: bool
    tells_seed: bool
    is_own = False

    def encode(self, part: torch.Tensor, rank: int, first: int) -> torch.Tensor:
        """A codec with feedback overwrites the part with its rounding errors."""
        if not part.numel():
            return part
        seed = self.codec.seed or 0
        wire = self.coder.encode(part, Noise(seed, self.call, rank, first))
        if not self.tells_seed:
            return wire
        said = torch.tensor(list(seed.to_bytes(_SEED_NBYTES, "little")), dtype=torch.uint8, device=part.device)
        return torch.cat([said, wire])

    def into(self, target: torch.Tensor, parts: Tensors, operands: Operands, first: int) -> torch.Tensor:
        if self.scatters:
            self.coder.decode(parts, target)
            return target
        seed = self.codec.seed or 0
        if self.tells_seed:
            seed = int.from_bytes(bytes(parts[0][:_SEED_NBYTES].tolist()), "little")
            parts = [part[_SEED_NBYTES:] for part in parts]
        return self.coder.recode(parts, target, Noise(seed, self.call, SUM, first))

    def room(self, target: torch.Tensor) -> torch.Tensor:
        return target.new_empty(self.codec.wire_nbytes(target.numel()), dtype=torch.uint8)

    def arrived(self, target: torch.Tensor, travelled: torch.Tensor) -> None:
        self.coder.decode([travelled], target)


Reduction = ExactSum | CodedSum  # the arithmetic of one call


class Coder(Protocol):
    """Encodes and decodes with one codec, on the device of the tensors. Tensors are 1-D and contiguous."""

    @property
    def codec(self) -> Codec: ...

    def encode(self, part: torch.Tensor, noise: Noise) -> torch.Tensor:
        """Returns the bytes of a tensor on the wire. A codec with feedback replaces it by its rounding errors."""
        ...

    def decode(self, wires: Tensors, target: torch.Tensor) -> None:
        """Writes the fp32 sum of what is encoded, in the order of ranks and rounded once, with canonical NaNs."""
        ...

    def recode(self, wires: Tensors, target: torch.Tensor, noise: Noise) -> torch.Tensor:
        """Encodes that sum, writes what this decodes to, and returns its bytes on the wire."""
        ...


@dataclass(frozen=True)
class TorchCoder:
    """A codec by torch's functions: on the CPU at memory speed, on others as the specification has them."""

    codec: Codec

    def encode(self, part: torch.Tensor, noise: Noise) -> torch.Tensor:
        wire = self._encode(part, noise)
        if self.codec.feedback:
            decoded = part.new_empty(part.numel(), dtype=torch.float32)
            self.decode([wire], decoded)
            part.copy_(rounding_error(part, decoded))
        return wire

    def decode(self, wires: Tensors, target: torch.Tensor) -> None:
        if len(wires) == 1 and target.device.type == "cpu":
            cpu_codec.decode(wires[0], self.codec, target)
        else:
            target.copy_(with_canonical_nan(self._total(wires, target.numel()).to(target.dtype)))

    def recode(self, wires: Tensors, target: torch.Tensor, noise: Noise) -> torch.Tensor:
        wire = self._encode(self._total(wires, self.codec.tiles(target.numel()) * TILE_NUMEL), noise)
        self.decode([wire], target)
        return wire

    def _encode(self, x: torch.Tensor, noise: Noise) -> torch.Tensor:
        return (cpu_codec if x.device.type == "cpu" else codec_reference).encode(x, self.codec, noise)

    def _total(self, wires: Tensors, numel: int) -> torch.Tensor:
        if wires[0].device.type != "cpu":
            return codec_reference.total_of(wires, self.codec)[:numel]
        total = torch.empty(numel)
        for rank, wire in enumerate(wires):
            cpu_codec.decode(wire, self.codec, total, adds=rank > 0)
        return total


def sum_into(target: torch.Tensor, parts: Tensors) -> None:
    """Writes the bits of reference.allreduce of at least two parts into ``target``, in fewer passes over memory.

    ``target`` may be one of the parts, and shares no memory with others.
    """
    wide = ACCUMULATION_DTYPES[target.dtype]
    if target.dtype is wide:
        _sum_as_they_are(target, parts)
    else:
        _sum_in_pieces(target, parts, wide)
    if wide.is_floating_point and target.sum().isnan():  # it is, if an element is; few tensors have one
        target.copy_(with_canonical_nan(target))


def _sum_as_they_are(target: torch.Tensor, parts: Tensors) -> None:
    first, second, *rest = parts
    in_place = target.data_ptr() not in [part.data_ptr() for part in rest]
    total = torch.add(first, second, out=target) if in_place else first + second
    for part in rest:
        total.add_(part)
    if not in_place:
        target.copy_(total)


def _sum_in_pieces(target: torch.Tensor, parts: Tensors, wide: torch.dtype) -> None:
    """Sums in memory that stays in the cache. torch's sums of two dtypes take up to ten times as long (2 M bf16)."""
    room = torch.empty((2, min(target.numel(), _PIECE)), dtype=wide, device=target.device)
    first, *rest = (part.split(_PIECE) for part in parts)
    for piece, begin, *others in zip(target.split(_PIECE), first, *rest, strict=True):
        total, wider = (memory[: piece.numel()] for memory in room)
        total.copy_(begin)
        for other in others:
            total.add_(wider.copy_(other))
        piece.copy_(total)

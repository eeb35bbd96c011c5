"""Call: the immutable description of a collective call, and the key of its plan."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.plan.tensor_tuple import TensorTuple

if TYPE_CHECKING:
    from graphar.numerics.epilogues.form import Form

_SEED = re.compile(", seed=[0-9]+")


def without_seeds(text: str) -> str:
    """Returns a text without the seeds of the codecs in it, which may differ between ranks."""
    return _SEED.sub("", text)


class Call(NamedTuple):
    """Everything that the plan of a collective depends on. Equal calls share a plan.

    A Call is a tuple: warm calls look up their plan by a plain tuple of the same fields.
    """

    op: str  # "allreduce", "reducescatter", "allgather", a norm's op, or a fused matmul's algorithm
    # Elements of the tensor. For an op with parts: the elements of each rank's part, in rank order. For a fused matmul:
    # the rows that each rank sums.
    counts: int | tuple[int, ...]
    dtype: torch.dtype  # the dtype of the tensors
    device: int  # the CUDA device index of the first tensor; -1 on the CPU
    algorithm: str = "auto"  # the algorithm that the user names; "auto" goes by the tuning table
    timeout_s: float | None = None  # the deadline of each wait on another rank, in seconds; None: the communicator's
    codec: str = ""  # the text of the codec on the wire, or an empty string
    epilogue: Form | None = None  # also the tensors of an all-gather of several, of which ``counts`` are the bytes
    symmetric: tuple[str, ...] = ()  # which of "input" and "output" lie in symmetric memory
    # The most thread blocks that a kernel may have while other work runs beside it; None: no limit.
    blocks: int | None = None
    prefetches: bool = False  # whether the call has memory to bring into L2 while it waits
    axis: int = 0  # the dimension of the user's tensor that is the first dimension of the call's tensors
    followed_by: str = ""  # what every rank does with its result, in words that ranks must agree on; or an empty string

    @classmethod
    def of(cls, op: str, x: torch.Tensor, counts: tuple[int, ...] | None = None, **more) -> Call:
        """Returns the call of ``op`` with a first tensor like ``x``. ``counts`` defaults to the elements of ``x``."""
        return cls(op, x.numel() if counts is None else counts, x.dtype, x.get_device(), **more)

    @property
    def agreed(self) -> str:
        """A text of what must be equal on all ranks: not the deadline, and not the codec's seed."""
        if isinstance(self.epilogue, TensorTuple):
            return f"{self.op} of {self.epilogue.text}"
        counts = f"parts of {list(self.counts)}" if isinstance(self.counts, tuple) else f"{self.counts}"
        codec = f", codec {without_seeds(self.codec)}" if self.codec else ""
        epilogue = f", epilogue {self.epilogue.text}" if self.epilogue else ""
        followed_by = f", followed by {self.followed_by}" if self.followed_by else ""
        return f"{self.op} of {counts} elements of {self.dtype}{codec}{epilogue}{followed_by}"

    @property
    def parts(self) -> tuple[int, ...]:
        """The elements of each rank's part; for an op without parts, the elements of the tensor."""
        return self.counts if isinstance(self.counts, tuple) else (self.counts,)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, or of the largest part."""
        return max(self.parts) * self.dtype.itemsize

    @property
    def wire(self) -> Codec | None:
        """The codec on the wire, or None."""
        return codec_of_text(self.codec) if self.codec else None


# The fields behind ``timeout_s`` of a call that uses none of them: the end of a warm call's plain tuple.
NO_OPTIONS = tuple(Call._field_defaults.values())[2:]

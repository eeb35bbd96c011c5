"""Call: what is computed, where and how, which is the key of a plan. Operands: the tensors of one rank in a call."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch

from graphar.numerics.codecs import Codec
from graphar.numerics.codecs import codec as codec_of_text
from graphar.numerics.epilogues.code import Corner
from graphar.plan.work import Product, Work

W = TypeVar("W", bound=Work)


class Call(NamedTuple, Generic[W]):
    """Everything that the plan of a call depends on. Equal calls share a plan. ``Call[Norm]`` has a Norm as work."""

    work: W  # what is computed
    dtype: torch.dtype  # the dtype of the tensors; BYTE for a TensorTuple
    device: int  # the CUDA device index of the first tensor; -1 on the CPU
    algorithm: str = "auto"  # the algorithm that the user names; "auto" goes by the tuning table
    timeout_s: float | None = None  # the deadline of each wait on another rank, in seconds; None: the communicator's
    # The most thread blocks that a kernel may have while other work runs beside it; None: no limit.
    blocks: int | None = None
    symmetric: bool = False  # whether the output lies in symmetric memory

    @staticmethod
    def of(work: W, x: torch.Tensor, **how) -> Call[W]:
        """Returns the call that does ``work`` with a first tensor like ``x``."""
        return Call(work, x.dtype, x.get_device(), **how)

    @property
    def op(self) -> str:
        """The public op."""
        return self.work.op

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor, or of the largest part."""
        return max(self.work.parts) * self.unit_nbytes

    @property
    def unit_nbytes(self) -> int:
        """Bytes of what the work's parts count."""
        if isinstance(self.work, Product):
            return self.work.columns * self.dtype.itemsize
        return 1 if self.work.unit == "bytes" else self.dtype.itemsize

    @property
    def wire(self) -> Codec | None:
        """The codec on the wire, or None."""
        return codec_of_text(self.work.codec) if self.work.codec else None

    @property
    def feeds_back(self) -> bool:
        """Whether the second input has the codec's rounding errors of earlier calls, and gets this call's."""
        return bool(self.wire and self.wire.feedback)


class Operands(NamedTuple):
    """The tensors of one rank in a call, in the order of the op. They are contiguous unless the op takes others.

    Sum, Parts   x, and the epilogue's tensors or the rounding errors | the result
    Norm         x, residual, weight, and perhaps a scale            | normed rows, the new residual, perhaps scales
    TensorTuple  a tensor of each kind                               | a result of each kind
    Product      a, w, perhaps a bias, and the epilogue's or the norm's tensors | the results
    """

    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    # Of the epilogue, sorted by name; of a sum by copies, perhaps the factor of its rounded sums.
    numbers: tuple[float, ...] = ()
    corner: Corner | None = None  # for a panel of a larger tensor: the epilogue's row, col and index are places there

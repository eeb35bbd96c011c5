"""The form of an all-gather of several tensors, which one kernel gathers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphar.plan.scratch import PACK_NBYTES

MAX_TENSORS = 4  # of one launch: `max_tensors` in cuda_src/device/arguments.cuh
PREPARED_TUPLE = "allgather_tuple"  # the name under which its kernels are prepared
TupleInputs = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]  # a rank's inputs and outputs


@dataclass(frozen=True)
class TensorTuple:
    """The :class:`graphar.numerics.epilogues.form.Form` of an all-gather of several tensors of equal length."""

    dtypes: tuple[torch.dtype, ...]  # of each tensor
    rows: tuple[tuple[int, ...], ...]  # the shape of a row of each tensor
    sizes: tuple[int, ...]  # the rows of each rank
    columns, cluster, generated = 1, 1, None
    kernel = variant = "TupleArguments"

    @functools.cached_property
    def row_nbytes(self) -> tuple[int, ...]:
        """The bytes of a row of each tensor."""
        return tuple([math.prod(row) * one.itemsize for row, one in zip(self.rows, self.dtypes, strict=True)])

    @functools.cached_property
    def part_nbytes(self) -> tuple[int, ...]:
        """The bytes of each rank's part: of each tensor whole packs."""
        each = self.row_nbytes
        return tuple([sum(-(-size * row // PACK_NBYTES) for row in each) * PACK_NBYTES for size in self.sizes])

    @functools.cached_property
    def text(self) -> str:
        pairs = zip(self.dtypes, self.rows, strict=True)
        tensors = [f"{dtype} [{', '.join(map(str, ('*', *row)))}]" for dtype, row in pairs]
        return f"({', '.join(tensors)}), sizes {list(self.sizes)}"


@functools.lru_cache(maxsize=1024)
def tensor_tuple(kinds: tuple[tuple[torch.dtype, tuple[int, ...]], ...], sizes: tuple[int, ...]) -> TensorTuple:
    """Returns the form for tensors of these dtypes and row shapes, and these rows of each rank."""
    return TensorTuple(tuple([dtype for dtype, _ in kinds]), tuple([row for _, row in kinds]), sizes)

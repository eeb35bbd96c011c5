"""Row: the properties of one algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.scratch import MAX_BLOCKS, Layout, Scratch

FLOATS = tuple(TYPE_NAMES)
Limit = Callable[[int], "int | None"]  # by world size, the largest tensor in bytes; None: any size


class Slicing(Enum):
    """How a call is split into kernel launches."""

    WHOLE = auto()  # one launch for the whole tensor
    PARTS = auto()  # one launch, which gets the begin and size of each rank's part in elements
    BYTES = auto()  # one launch, which gets the begin and size of each rank's part in bytes
    CAPACITY = auto()  # a launch for each slot that the largest part fills
    ROWS = auto()  # launches by rows of a matmul's result: as many as the boxes of the largest part fill slots


@dataclass(frozen=True)
class Row:
    """The properties of one algorithm.

    Attributes:
        op: the op that it computes.
        folder: the folder of its kernel's file in cuda_src; an empty string without a kernel.
        layout: a function from world size to its scratch; None without a kernel.
        limit: a function from world size to the bytes of the largest tensor that its scratch takes; None is any size.
        dtypes: the dtypes of its tensors; BYTE if it only moves data.
        minimum_arch: the oldest architecture that has the kernel's instructions; 90 is sm_90.
        only_arch: the single architecture that has the kernel's instructions; None if later ones have them too.
        exact: whether it adds in rank order and rounds once.
        max_threads: the most threads of a block, by the kernel's launch bounds.
        max_blocks: the most blocks of a grid, by the size of the signal pad and the slots.
        chunked: whether its shape has a chunk.
        slicing: how a call is split into launches.
        direct: the operand, "input" or "output", that the kernel's direct variant accesses in symmetric memory on every
            rank; an empty string without such a variant.
        prefetches: whether it can bring memory into L2 while it waits.
        takes_epilogue: whether it has kernels with an epilogue.
        takes_codec: whether it has a codec on the wire. It then has no kernel without one.
        spares_a_word: whether its codecs must leave one 32-bit word unused, as the sentinel for data not yet arrived.
        variants: the kernel's last template argument if there are several kernels, the usual one first.
        choosable: whether a tuning table may name it.
    """

    op: str
    folder: str = ""
    layout: Layout | None = None
    limit: Limit = lambda world_size: None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    minimum_arch: int = 80
    only_arch: str | None = None
    exact: bool = True
    max_threads: int = 512
    max_blocks: int = MAX_BLOCKS
    chunked: bool = False
    slicing: Slicing = Slicing.WHOLE
    direct: str = ""
    prefetches: bool = False
    takes_epilogue: bool = False
    takes_codec: bool = False
    spares_a_word: bool = False
    variants: tuple[str | None, ...] = (None,)
    choosable: bool = False

    def scratch(self, world_size: int) -> Scratch:
        """Returns the scratch that the algorithm needs on every rank; ValueError without a kernel."""
        if self.layout is None:
            raise ValueError(f"{self.op}: without a kernel there is no scratch")
        return self.layout(world_size)

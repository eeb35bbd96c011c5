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
    CAPACITY_IN_ROWS = auto()  # the same, but no launch splits a row of the epilogue
    ROWS = auto()  # launches by rows of a matmul: as many as fill the slots with the largest part


@dataclass(frozen=True)
class Row:
    """The properties of one algorithm."""

    op: str  # the op that it computes
    folder: str = ""  # the folder of its kernel's file in cuda_src; an empty string without a kernel
    layout: Layout | None = None  # a function from world size to its scratch; None without a kernel
    # A function from world size to the bytes of the largest tensor that its scratch takes; None is any size.
    limit: Limit = lambda world_size: None
    dtypes: tuple[torch.dtype, ...] = FLOATS  # the dtypes of its tensors; BYTE if it only moves data
    minimum_arch: int = 80  # the oldest architecture that has the kernel's instructions; 90 is sm_90
    # The single architecture that has the kernel's instructions; None if later ones have them too.
    only_arch: str | None = None
    exact: bool = True  # whether it adds in rank order and rounds once
    max_threads: int = 512  # the most threads of a block, by the kernel's launch bounds
    max_blocks: int = MAX_BLOCKS  # the most blocks of a grid, by the size of the signal pad and the slots
    chunked: bool = False  # whether its shape has a chunk
    slicing: Slicing = Slicing.WHOLE  # how a call is split into launches
    # The operand, "input" or "output", that the kernel's direct variant accesses in symmetric memory on every rank; an
    # empty string without such a variant.
    direct: str = ""
    prefetches: bool = False  # whether it can bring memory into L2 while it waits
    takes_epilogue: bool = False  # whether it has kernels with an epilogue
    takes_codec: bool = False  # whether it has a codec on the wire; it then has no kernel without one
    compresses: bool = False  # whether it compresses elements without loss, in tiles
    # Whether its codecs must leave one 32-bit word unused, as the sentinel for data not yet arrived.
    spares_a_word: bool = False
    # The kernel's last template argument if there are several kernels, the usual one first.
    variants: tuple[str | None, ...] = (None,)
    choosable: bool = False  # whether a tuning table may name it

    def scratch(self, world_size: int) -> Scratch:
        """Returns the scratch that the algorithm needs on every rank; ValueError without a kernel."""
        if self.layout is None:
            raise ValueError(f"{self.op}: without a kernel there is no scratch")
        return self.layout(world_size)

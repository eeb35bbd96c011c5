"""Row: the properties of one algorithm, how "auto" chooses it, and with which grid it is launched."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.call import Call
from graphar.plan.policy import Chip, Policies
from graphar.plan.scratch import MAX_BLOCKS, WORLD_SIZES, Layout, Scratch
from graphar.plan.tiles import MatmulTile, SkinnyTile
from graphar.plan.work import ALLGATHER_MATMUL

FLOATS = tuple(TYPE_NAMES)
MAX_THREADS = 512  # the most threads of a block, by the launch bounds of most kernels


class Grid(NamedTuple):
    """How a kernel is launched."""

    blocks: int  # thread blocks in the grid
    threads: int  # threads in a block
    chunk: int = 0  # packs, or tiles, that a block sends to one peer in one step; 0 for algorithms without chunks
    cluster: int = 1  # the blocks of a thread block cluster


Limit = Callable[[int], "int | None"]  # by world size, the largest tensor in bytes; None: any size
# A function from world size and bytes to the pairs (threads of a block, packs of a chunk) that tuning tries.
Candidates = Callable[[int, int], Iterable[tuple[int, int]]]
# A function from row, call and world size to the grid, by the policies of a tuning table.
PolicyGrid = Callable[["Row", Call, int, Policies, Chip], Grid]
# From the ranks' tensors to the result, or of a reduce-scatter to all ranks' results, as in graphar.reference.
Specification = Callable[[list[torch.Tensor]], "torch.Tensor | Sequence[torch.Tensor]"]


@dataclass(frozen=True)
class Row:
    """The properties of one algorithm."""

    op: str  # the op that it computes
    # The folder of its kernel's file in cuda_src, or an absolute path; an empty string without a kernel of its own.
    folder: str = ""
    # A function from world size to the algorithm's scratch; None if torch.distributed makes the call.
    layout: Layout | None = None
    # A function from world size to the bytes of the largest tensor that its scratch takes; None is any size.
    limit: Limit = lambda world_size: None
    dtypes: tuple[torch.dtype, ...] = FLOATS  # the dtypes of its tensors; BYTE if it only moves data
    digest: str = ""  # of a kernel from outside cuda_src, the hash of its file and of those that it includes
    world_sizes: Collection[int] = WORLD_SIZES  # the numbers of ranks that it serves
    minimum_arch: int = 80  # the oldest architecture that has the kernel's instructions; 90 is sm_90
    # The single architecture that has the kernel's instructions; None if later ones have them too.
    only_arch: str | None = None
    multimem: bool = False  # whether the NVSwitch adds, by multimem instructions, in an unspecified order
    # A specification of the result, if it differs from the op's; None: the op's specification, or multimem's.
    specification: Specification | None = None
    max_threads: int = MAX_THREADS  # the most threads of a block, by the kernel's launch bounds
    # The most threads of a block that takes half an SM at most; 0 if every block may take a whole one.
    half_sm_threads: int = 0
    only_threads: int | None = None  # the threads of a block, if its warps have fixed roles
    max_blocks: int = MAX_BLOCKS  # the most blocks of a grid, by the size of the signal pad and the slots
    fills_slots: bool = False  # whether a call has a launch for each slot that the largest part fills; else one
    direct: bool = False  # whether it can write a symmetric output on every rank, in a direct variant of its kernel
    takes_epilogue: bool = False  # whether it has kernels with an epilogue
    adds_tree: bool = False  # whether it has kernels that add fp32 as a binary tree over 2, 4 or 8 ranks
    takes_codec: bool = False  # whether it has a codec on the wire; it then has no kernel without one
    compresses: bool = False  # whether it compresses elements without loss, in tiles
    # Whether its codecs must leave one 32-bit word unused, as the sentinel for data not yet arrived.
    spares_a_word: bool = False
    copies: bool = False  # whether parts travel by copy engines; if it is ``direct``, straight into a symmetric output
    across_hosts: bool = False  # whether it adds host by host, for ranks on several hosts
    # The kernel's last template argument if there are several kernels, the usual one first.
    variants: tuple[str | None, ...] = (None,)
    tiles: tuple[MatmulTile | SkinnyTile, ...] = ()  # of a matmul, the tiles that its kernels can have

    # How it is chosen: by the entries of a tuning table, or as the first one of its op that ``suits``.
    candidates: Candidates | None = None  # what tuning tries; None: a tuning table has no entries for it
    smallest_nbytes: int = 0  # the smallest tensor for which tuning tries it
    # A function from a table's policies, world size and bytes to whether it is faster than the algorithms after it.
    suits: Callable[[Policies, int, int], bool] = lambda policies, world_size, nbytes: True

    # Its grid: a policy's, or a table entry's with as many blocks as have work.
    policy_grid: PolicyGrid | None = None  # None: an entry of a tuning table has the grid
    # A function from world size and bytes to the largest grid that it has without an entry.
    default_grid: Callable[[int, int], Grid] = lambda world_size, nbytes: Grid(128, 256)
    # From world size, threads and chunk to the packs of the tensor or the largest part that a block handles at a time.
    packs_a_block: Callable[[int, int, int], int] = lambda world_size, threads, chunk: threads
    in_groups: bool = False  # whether a block has a group of whole warps for each rank
    # Whether a further block is launched, if there is room: it tells other ranks the call (device/sync/record.cuh).
    tells: bool = False

    def scratch(self, world_size: int) -> Scratch:
        """Returns the scratch that the algorithm needs on every rank; ValueError without a kernel."""
        if self.layout is None:
            raise ValueError(f"{self.op}: without a kernel there is no scratch")
        return self.layout(world_size)

    def scratch_nbytes(self, world_size: int) -> int:
        """Returns the bytes of the scratch; 0 without a kernel."""
        return self.scratch(world_size).nbytes if self.layout else 0

    def fits(self, world_size: int, nbytes: int) -> bool:
        """Returns whether its scratch takes tensors of ``nbytes``."""
        limit = self.limit(world_size)
        return limit is None or nbytes <= limit

    def takes_half(self, threads: int) -> bool:
        """Returns whether a block of ``threads`` takes half an SM at most, so that two of them fit on one."""
        return threads <= self.half_sm_threads

    @property
    def chunked(self) -> bool:
        """Whether its grid has a chunk, where a tuning table may name it."""
        return self.default_grid(2, 1 << 20).chunk > 0

    @property
    def exact(self) -> bool:
        """Whether it adds in rank order and rounds once, or moves bits unchanged."""
        return not self.multimem and self.specification is None

    @property
    def takes_copies(self) -> bool:
        """Whether copy engines write its scratch. They do so in an all-gather and matmul in chunks, too."""
        return self.copies or self.op == ALLGATHER_MATMUL

    @property
    def is_skinny(self) -> bool:
        """Whether it is a matmul for results of few rows."""
        return any(isinstance(tile, SkinnyTile) for tile in self.tiles)

    @property
    def sends_tiles(self) -> bool:
        """Whether it is a matmul that sends finished tiles to other ranks; it may have a codec on the wire."""
        return any(isinstance(tile, MatmulTile) and tile.whole for tile in self.tiles)

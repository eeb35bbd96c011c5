"""Thresholds and sizes that were measured on a chip.

A tuning table holds one instance of each class below, with the field names as keys of its JSON file
(graphar/plan/tables). No other module contains a measured number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from graphar.plan.tiles import NAMED_TILES, MatmulTile

ByWorldSize = dict[int, int]

_SMS_OF_A_SHARE = 9  # the fewest SMs of one communicator's share: more than a GPU has GPCs, and than a host has ranks


@dataclass(frozen=True)
class Chip:
    """The kind of GPU that a table is for, or what the GPUs of a call's ranks have in common."""

    sms: int  # streaming multiprocessors; of several GPUs the fewest
    # The architecture as the compiler names it, such as "sm_90a". Of different architectures the oldest, without its
    # architecture-specific suffix, such as "sm_90".
    arch: str
    # How many communicators of a rank may have kernels on its GPU at the same time. It is declared: no part of tables.
    communicators: int = field(default=2, metadata={"measured": False})

    @classmethod
    def in_common(cls, chips: Iterable[Chip]) -> Chip:
        """Returns what several GPUs have in common."""
        sms, archs, communicators = zip(*((chip.sms, chip.arch, chip.communicators) for chip in chips), strict=True)
        arch = archs[0] if len(set(archs)) == 1 else f"sm_{min(map(_number, archs))}"
        return cls(min(sms), arch, max(communicators))

    @property
    def most_communicators(self) -> int:
        """The most communicators whose kernels find room at the same time."""
        return max(2, self.sms // _SMS_OF_A_SHARE)

    def shared_blocks(self, halves: bool = False, cluster: int = 1) -> int:
        """Returns the most blocks of a grid that leaves room for the kernels of the other communicators.

        They need it: (18) in cuda_src/device/sync/kernel_order.cuh. Of two communicators, each leaves an SM free, and
        with clusters of whole SMs two clusters' SMs: of 65 clusters of 2 blocks on an H200, the last SMs were not
        always a pair that takes another cluster. Of more, each takes an equal share of the GPU. With ``halves`` two
        blocks fit on an SM.
        """
        if self.communicators == 2:
            return max(1, self.sms - 1) if halves or cluster == 1 else max(1, self.sms // cluster - 2) * cluster
        if halves and cluster == 1:
            return max(1, 2 * self.sms // self.communicators)
        return max(1, self.sms // self.communicators // cluster) * cluster

    def may_overlap(self, blocks: int, halves: bool) -> bool:
        """Returns whether a grid may be launched while the kernel before it in the stream still waits for other ranks.

        Both are then on the GPU. All communicators but one must leave half an SM free: (18), as above. Of two, kernels
        of whole SMs do so anyway, beside the blocks of the kernel before.
        """
        if self.communicators == 2 and not halves:
            return True
        held = (2 * self.sms - 1) // (self.communicators - 1)  # the most halves of SMs that one communicator may hold
        return blocks * (1 if halves else 2) <= held - self.shared_blocks(halves=True)

    def is_at_least(self, arch: int) -> bool:
        """Whether it has the instructions of an architecture: 90 is sm_90."""
        return _number(self.arch) >= arch

    @property
    def has_clusters(self) -> bool:
        """Whether thread blocks can be launched in clusters."""
        return self.is_at_least(90)


def _number(arch: str) -> int:
    return int("".join(filter(str.isdecimal, arch)))


@dataclass(frozen=True)
class QuantizedPolicy:
    """The grids of all-reduces with a codec on the wire."""

    # With at most so many tiles for each of its warps, a block takes half an SM, and the next call is launched early.
    half_sm_tiles: int
    pipelined_tiles: int  # tiles in a chunk: smaller chunks wait more often, and larger ones fill the links no better
    many_tiles: int  # with more tiles for one owner, two small blocks on an SM are faster than one large block


@dataclass(frozen=True)
class LargeCallsPolicy:
    """An algorithm that "auto" takes for large calls alone."""

    # By world size, the bytes of the tensor or the largest part from which on "auto" takes it; no entry: it never does.
    allreduce_from_nbytes: ByWorldSize
    allgather_from_nbytes: ByWorldSize

    def least(self, op: str, world_size: int) -> int | None:
        """Returns the bytes from which on "auto" takes the algorithm for calls of ``op``; None: it never does."""
        return getattr(self, f"{op}_from_nbytes", {}).get(world_size)


@dataclass(frozen=True)
class CopiesPolicy(LargeCallsPolicy):
    """Collectives by copy engines."""

    reducescatter_from_nbytes: ByWorldSize
    beside_from_nbytes: ByWorldSize  # the same for gathers and reduce-scatters beside matmuls, of the largest part
    sum_blocks: int  # thread blocks of a local sum
    chunk_nbytes: int  # the smallest chunk; larger tensors travel in larger ones, up to a place of the scratch
    chunks: int  # how many chunks of a part are enough: more meet more often, and fewer fill the links less
    # As allgather_from_nbytes, where outputs are symmetric. Older tables lack it.
    alltoall_from_nbytes: ByWorldSize = field(default_factory=dict)


@dataclass(frozen=True)
class NormPolicy:
    """All-reduces with residual and RMSNorm. Reduce-scatters have no choice."""

    one_shot_sent_nbytes: int  # the most bytes that a rank sends in a one-shot; beyond, a two-shot is faster


@dataclass(frozen=True)
class BesidePolicy:
    """Collectives that run beside other work, and leave it most SMs."""

    blocks: int  # thread blocks of the collective's grid
    pipelined_from_nbytes: int  # from this size on, all-reduces in few blocks use two_shot_pipelined


@dataclass(frozen=True)
class TrainingPolicy:
    """Collectives beside the forward and backward passes of FSDP2 and DDP, which are not compressed.

    With fewer blocks calls take longer, and not only they: on 2 H200s the largest matmuls of a Llama's step took 1.5
    times as long beside 24 blocks, and as long as alone beside 96. Steps were fastest with 48 to 96 blocks between 2
    ranks, and with 32 between 4 (`python -m perf fsdp --blocks`).
    """

    blocks: ByWorldSize  # by world size, the most thread blocks of a call: at most half as many as an H200 has SMs
    blocks_beyond: int  # the most blocks for other world sizes

    def most_blocks(self, world_size: int) -> int:
        """Returns the most thread blocks of a call."""
        return self.blocks.get(world_size, self.blocks_beyond)


@dataclass(frozen=True)
class TileCost:
    """The measured costs behind the estimate of ``plan.matmuls.clocks``, most in clocks for 64 of K."""

    clocks_a_product: float  # clocks of the tensor cores for one element of the tile
    clocks_a_line: float  # clocks of L2 for one line: a row of an operand's tile, 128 bytes
    clustered: float  # the factor for tiles of a cluster, whose blocks wait for each other
    wait_a_line: float  # clocks that the tensor cores wait for one line that the block loads itself
    clocks_a_result: float  # clocks of storing one element of a tile, for all of K
    # The factor for a tile with leaves and one consumer: nothing is multiplied while it adds them (H200).
    alone_with_leaves: float
    # Clocks, for all of K, in which blocks that split the leaves of a tile exchange their sums: 3 to 5 us (H100).
    clocks_an_exchange: float
    clocks_a_tail: float  # clocks, for all of K, until the kernel of the last round computes (H100)
    # Clocks of memory for one line of a weight, which all SMs load together: what 128 blocks with 64 rows took.
    clocks_a_line_of_memory: float
    clocks_a_line_of_l2: float  # clocks of L2 for one line of an operand, which all SMs load together (H100)


class MeasuredMatmul(NamedTuple):
    """A matmul of bf16 operands [m, k] and [n, k] that was timed with graphar's kernel and with torch's."""

    m: int
    n: int
    k: int
    ratio: float  # the time of graphar's / the time of torch's


@dataclass(frozen=True)
class MatmulPolicy:
    """Matmuls: when to use graphar's instead of torch's, which tile, and when to fuse matmul and sum in one kernel."""

    own_from_rows: int  # with fewer rows torch's matmul multiplies
    # What was measured of results with fewer tiles of 128 x 128 than the GPU has SMs. torch's matmul divides K between
    # SMs there, for some shapes. Each shape is there once.
    against_torch: tuple[MeasuredMatmul, ...]
    cost: TileCost  # the cost of a tile, for the estimate
    # By world size, the elements of the result from which on "auto" chooses ``partition="tiles"``.
    tiles_from_numel: ByWorldSize
    # By world size, the elements from which on "auto" does so with a codec on the wire.
    codec_tiles_from_numel: ByWorldSize
    # By world size, the columns of the result from which on "auto" takes the skinny kernels, for at most 64 rows.
    skinny_from_columns: ByWorldSize
    skinny_least_busy: float  # the least share of the SMs that one of several waves of blocks must keep busy
    one_shot_nbytes: ByWorldSize  # by world size, the largest skinny result that is summed in a one-shot
    one_shot_nbytes_beyond: int  # the largest such result for other world sizes
    estimated_below_numel: int  # below so many elements of the result, an estimate chooses the tile of a fused kernel
    large_from_numel: int  # from so many elements on, the large tile is faster than the small one
    alternating_below_k: int  # below this K, the alternating tile is faster
    small_tile: MatmulTile  # the measured tile for results below large_from_numel
    large_tile: MatmulTile  # the measured tile for results from large_from_numel on
    alternating_tile: MatmulTile  # the measured tile in which two consumer warpgroups alternate

    def __post_init__(self) -> None:
        if len({measured[:3] for measured in self.against_torch}) < len(self.against_torch):
            raise ValueError("against_torch must have each [m, n, k] once")
        for name in ("small_tile", "large_tile", "alternating_tile"):
            fitting = [tile for tile in NAMED_TILES if tile.alternating == (name == "alternating_tile")]
            if getattr(self, name) not in fitting:
                raise ValueError(f"{name} must be {' or '.join(map(str, fitting))}, got {getattr(self, name)}")

    def tiles_from(self, world_size: int, codec: bool) -> float:
        """Returns the elements of the result from which on "auto" chooses "tiles"; infinity if not measured."""
        known = self.codec_tiles_from_numel if codec else self.tiles_from_numel
        return known.get(world_size, math.inf)


@dataclass(frozen=True)
class AllgatherMatmulPolicy:
    """All-gathers followed by a matmul."""

    # By world size, the rows of all ranks together from which on "auto" chooses ``partition="chunks"``.
    chunks_from_rows: ByWorldSize
    # By world size, the rows from which on "auto" chooses ``partition="tiles"``, if there are too few for chunks.
    tiles_from_rows: ByWorldSize

    def faster(self, world_size: int, rows: int, chip: Chip, is_plain: bool) -> str:
        """Returns the partition that "auto" chooses. It is "none" where nothing was measured.

        Tiles were not measured where more than two communicators share a GPU: they have only a share of its SMs. Only
        ``is_plain`` products have chunks, since torch multiplies these.
        """
        if is_plain and rows >= self.chunks_from_rows.get(world_size, math.inf):
            return "chunks"
        has_tiles = chip.communicators == 2 and rows >= self.tiles_from_rows.get(world_size, math.inf)
        return "tiles" if has_tiles else "none"


@dataclass(frozen=True, kw_only=True)
class Policies:
    """The policies of a tuning table, and the kind of GPU that they are for."""

    chip: Chip
    quantized: QuantizedPolicy
    lossless: LargeCallsPolicy
    copies: CopiesPolicy
    norm: NormPolicy
    beside: BesidePolicy
    training: TrainingPolicy
    matmul: MatmulPolicy
    allgather_matmul: AllgatherMatmulPolicy

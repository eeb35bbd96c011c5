"""The algorithms, and what each needs and can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate
from typing import TYPE_CHECKING

from graphar.numerics.codecs import TILE_NUMEL, Codec
from graphar.runtime.arguments import MAX_BLOCKS
from graphar.runtime.catalogue import MATMUL_KERNELS, MAX_RANKS, MULTIMEM_KERNELS, ONE_SHOT_DEPTH

if TYPE_CHECKING:
    from graphar.numerics.epilogues.epilogue import Form

PACK_NBYTES = 16
PACKS_A_LINE = 8
WARP = 32
MIB = 1 << 20


class Algorithm(StrEnum):
    """How a collective is done. All exact ones of one op give the same bits; only the multimem ones are not exact.

    Those with a codec on the wire are exact in that sense, too: they give the bits of the op that rounds. So is the
    hierarchical one, as an op of its own, which adds host by host.
    """

    ONE_SHOT_PUSH = "one_shot_push"
    ONE_SHOT = "one_shot"
    ONE_SHOT_UNSTAGED = "one_shot_unstaged"
    TWO_SHOT_PUSH = "two_shot_push"
    TWO_SHOT_PIPELINED = "two_shot_pipelined"
    TWO_SHOT_TMA = "two_shot_tma"
    TWO_SHOT_LOSSLESS = "two_shot_lossless"
    MULTIMEM_ONE_SHOT = "multimem_one_shot"
    MULTIMEM_TWO_SHOT = "multimem_two_shot"
    REDUCESCATTER_PUSH = "reducescatter_push"
    ALLGATHER_FLAGGED = "allgather_flagged"
    ALLGATHER_PUSH = "allgather_push"
    QUANTIZED_TWO_SHOT_PUSH = "quantized_two_shot_push"
    QUANTIZED_TWO_SHOT_PIPELINED = "quantized_two_shot_pipelined"
    QUANTIZED_REDUCESCATTER = "quantized_reducescatter"
    MATMUL_REDUCESCATTER = "matmul_reducescatter"
    MATMUL_ALLREDUCE = "matmul_allreduce"
    MATMUL_ONE_SHOT = "matmul_one_shot"
    MATMUL_TWO_SHOT = "matmul_two_shot"
    ALLREDUCE_RMSNORM_ONE_SHOT = "allreduce_rmsnorm_one_shot"
    ALLREDUCE_RMSNORM_TWO_SHOT = "allreduce_rmsnorm_two_shot"
    FALLBACK = "fallback"
    HIERARCHICAL = "hierarchical"

    @property
    def index(self) -> int:
        """The number a kernel writes into its record."""
        return list(Algorithm).index(self)

    @property
    def op(self) -> str:
        """Which op it does; the fallback does all of them, and all-reduce is where it can be asked for."""
        match self:
            case Algorithm.REDUCESCATTER_PUSH:
                return "reducescatter"
            case Algorithm.ALLGATHER_FLAGGED | Algorithm.ALLGATHER_PUSH:
                return "allgather"
            case Algorithm.QUANTIZED_TWO_SHOT_PUSH | Algorithm.QUANTIZED_TWO_SHOT_PIPELINED:
                return "quantized_allreduce"
            case Algorithm.QUANTIZED_REDUCESCATTER:
                return "quantized_reducescatter"
            case one if one.of_matmul:
                return one.value
            case Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT | Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT:
                return "allreduce_residual_rmsnorm"
            case Algorithm.HIERARCHICAL:  # which adds in an order of its own
                return "hierarchical_allreduce"
            case _:
                return "allreduce"

    @property
    def of_matmul(self) -> bool:
        """Whether it computes what it adds up."""
        return self.value in MATMUL_KERNELS

    @property
    def exact(self) -> bool:
        """Whether it adds in rank order and rounds once. Otherwise the NVSwitch adds, in an order of its own."""
        return self.value not in MULTIMEM_KERNELS


@dataclass(frozen=True)
class Shape:
    """How a kernel is launched.

    Attributes:
        algorithm: which kernel.
        blocks: thread blocks in the grid.
        threads: threads in a block.
        chunk: packs, or with a codec tiles, that a block, or a channel of two_shot_tma, sends one peer in one step; 0
            where there are no chunks.
        direct: whether it is the kernel's direct variant, for symmetric tensors.
        codec: what is on the wire, where that is not the elements themselves.
        epilogue: what is done to the sums, if anything.
        prefetches: whether calls have something to bring into L2 meanwhile.
    """

    algorithm: Algorithm
    blocks: int
    threads: int
    chunk: int = 0
    direct: bool = False
    codec: Codec | None = None
    epilogue: Form | None = None
    prefetches: bool = False


@dataclass(frozen=True)
class Scratch:
    """What an algorithm needs on every rank.

    Attributes:
        capacity: packs in one slot; for matmuls boxes.
        nbytes: the size of all slots, and of the signal pad before them.
        fill: the byte the slots hold before the first call.
        shared_nbytes: dynamic shared memory of each thread block.
    """

    capacity: int
    nbytes: int
    fill: int
    shared_nbytes: int = 0


@dataclass(frozen=True)
class Slice:
    """What one launch of a call handles.

    Attributes:
        numel: elements of the whole tensor.
        begin: where each rank's part of it begins, in elements; empty where the op has no parts.
        count: how many elements of each part this launch handles.
        offset: how many elements of each part the launches before this one handle.
    """

    numel: int
    begin: tuple[int, ...] = ()
    count: tuple[int, ...] = ()
    offset: int = 0


SIGNAL_PAD_NBYTES = MAX_BLOCKS * MAX_RANKS * 4
PIPELINE_DEPTH = 3  # `depth` in two_shot_pipelined.cu
PIPELINE_CHUNK = 2048
PIPELINE_BLOCKS = 132
ONE_SHOT_THREADS = 256  # at most; `max_threads` in one_shot.cu
TMA_CHANNELS = 4  # `channels`, `depth` and `reduce_warps` in two_shot_tma.cu, whose blocks have this many threads
TMA_DEPTH = 3
TMA_REDUCE_WARPS = 2
TMA_THREADS = 32 * TMA_CHANNELS * (3 + TMA_REDUCE_WARPS)
TMA_BLOCKS = MAX_BLOCKS // 2 // TMA_CHANNELS  # each channel has two rows of the signal pad
TMA_CHANNEL_NBYTES = 48 << 10  # shared memory of a channel: one piece for each rank
NORM_SHARED_NBYTES = 2 * 32 * 4  # NumbersOfWarps in cuda_src/device/rms_norm.cuh
NORM_ROW_PACKS = 4096  # of the longest row that allreduce_rmsnorm_two_shot takes
REDUCESCATTER_NBYTES = 16 * MIB  # of an input that one launch takes, where its parts are equal
ALLGATHER_FLAGGED_NBYTES = 256 << 10  # of the largest part that allgather_flagged has room for
ALLGATHER_DEPTH = 4  # `depth` in allgather_push.cu
ALLGATHER_CHUNK = 2048
ALLGATHER_BLOCKS = 132
QUANTIZED_SCATTER_DEPTH = 4  # `depth` in quantized_reducescatter.cu
QUANTIZED_CHUNK_NBYTES = 16 << 10  # of a slot of quantized_two_shot_pipelined and quantized_reducescatter
QUANTIZED_BLOCKS = MAX_BLOCKS
LOSSLESS_CHUNK = 16  # tiles of a slot of two_shot_lossless
LOSSLESS_TILE_NBYTES = 2 * TILE_NUMEL + 32  # as it is, and its header
MATMUL_BOX_ROWS = MATMUL_BOX_COLUMNS = 64  # of a result, in what travels: boxes of cuda_src/device/strips.cuh
MATMUL_BOX_NBYTES = 8192
MATMUL_PARTS_NBYTES = 128 * MIB  # of a result that one launch has scratch for
TILE_LARGEST_NBYTES = 1280  # on the wire: of 8 bits, with two fp32 numbers for each 32 elements
TILE_LARGEST_SPARING_NBYTES = 1152  # likewise with one, as the codecs have that spare a word


# All-reduces whose shape has a chunk.
CHUNKED = (Algorithm.TWO_SHOT_PIPELINED, Algorithm.TWO_SHOT_TMA, Algorithm.TWO_SHOT_LOSSLESS)

# All-reduces that can bring something into L2 while they wait (cuda_src/device/prefetch.cuh).
PREFETCHING = (Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PUSH)

# The kernels' launch bounds, and what their signal pads and slots have rows for.
_MOST_THREADS = {
    Algorithm.ONE_SHOT_PUSH: 1024,
    Algorithm.ONE_SHOT: ONE_SHOT_THREADS,
    Algorithm.TWO_SHOT_PUSH: 1024,
    Algorithm.TWO_SHOT_TMA: TMA_THREADS,
    Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT: 1024,
    Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT: 1024,
    Algorithm.REDUCESCATTER_PUSH: 1024,
    Algorithm.ALLGATHER_PUSH: 1024,
}
_MOST_BLOCKS = {
    Algorithm.TWO_SHOT_PIPELINED: PIPELINE_BLOCKS,
    Algorithm.TWO_SHOT_TMA: TMA_BLOCKS,
    Algorithm.TWO_SHOT_LOSSLESS: PIPELINE_BLOCKS,
    Algorithm.ALLGATHER_PUSH: ALLGATHER_BLOCKS,
    Algorithm.QUANTIZED_TWO_SHOT_PIPELINED: QUANTIZED_BLOCKS,
    Algorithm.QUANTIZED_REDUCESCATTER: QUANTIZED_BLOCKS,
}


def most_threads(algorithm: Algorithm) -> int:
    """The most threads a block of the algorithm's kernel can have."""
    return _MOST_THREADS.get(algorithm, 512)


def most_blocks(algorithm: Algorithm) -> int:
    """The most blocks the algorithm's kernel can have."""
    return _MOST_BLOCKS.get(algorithm, MAX_BLOCKS)


def packs_a_part(packs: int, parts: int) -> int:
    """``packs`` cut into ``parts`` equal parts of whole lines, as cuda_src/device/pack.cuh does."""
    return -(-packs // (parts * PACKS_A_LINE)) * PACKS_A_LINE


def largest_nbytes(algorithm: Algorithm, world_size: int) -> int | None:
    """The largest tensor an algorithm's scratch can take, in bytes; None: any."""
    match algorithm:
        case Algorithm.ONE_SHOT_PUSH | Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT:
            return 4 * MIB if world_size == 2 else 1 * MIB
        case Algorithm.MATMUL_ONE_SHOT | Algorithm.MATMUL_TWO_SHOT:
            return 2 * MIB
        case Algorithm.ONE_SHOT | Algorithm.ONE_SHOT_UNSTAGED:
            return 8 * MIB
        case Algorithm.TWO_SHOT_PUSH | Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT:
            return 64 * MIB
        case Algorithm.QUANTIZED_TWO_SHOT_PUSH:
            return 64 * MIB
        case Algorithm.MULTIMEM_ONE_SHOT:
            return 8 * MIB
        case Algorithm.MULTIMEM_TWO_SHOT:
            return 64 * MIB
        case _:
            return None


def scratch(algorithm: Algorithm, world_size: int) -> Scratch:
    """What ``algorithm`` needs on every rank; the layouts are drawn in the kernels' files."""
    largest = largest_nbytes(algorithm, world_size)
    packs = -(-largest // PACK_NBYTES) if largest else 0
    match algorithm:
        case Algorithm.ONE_SHOT_PUSH | Algorithm.MATMUL_ONE_SHOT | Algorithm.MATMUL_TWO_SHOT:
            return Scratch(packs, 2 * world_size * packs * PACK_NBYTES, fill=0xFF)
        case Algorithm.ALLREDUCE_RMSNORM_ONE_SHOT:
            return Scratch(packs, 2 * world_size * packs * PACK_NBYTES, 0xFF, NORM_SHARED_NBYTES)
        case Algorithm.ONE_SHOT | Algorithm.ONE_SHOT_UNSTAGED | Algorithm.MULTIMEM_ONE_SHOT:
            in_flight = ONE_SHOT_DEPTH * world_size * ONE_SHOT_THREADS if algorithm is Algorithm.ONE_SHOT else 0
            return Scratch(packs, SIGNAL_PAD_NBYTES + 2 * packs * PACK_NBYTES, 0, in_flight * PACK_NBYTES)
        case Algorithm.TWO_SHOT_PUSH:
            shard = packs_a_part(packs, world_size)
            return Scratch(shard, 4 * world_size * shard * PACK_NBYTES, fill=0xFF)
        case Algorithm.ALLREDUCE_RMSNORM_TWO_SHOT:
            shard = packs // world_size + NORM_ROW_PACKS  # whole rows
            return Scratch(shard, 4 * world_size * shard * PACK_NBYTES, 0xFF, NORM_SHARED_NBYTES)
        case Algorithm.TWO_SHOT_PIPELINED:
            slots = 2 * PIPELINE_DEPTH * PIPELINE_BLOCKS * world_size
            return Scratch(PIPELINE_CHUNK, SIGNAL_PAD_NBYTES + slots * PIPELINE_CHUNK * PACK_NBYTES, fill=0)
        case Algorithm.TWO_SHOT_TMA:
            piece = TMA_CHANNEL_NBYTES // PACK_NBYTES // world_size // 32 * 32  # whole lines of the L2 cache
            slots = TMA_DEPTH * MAX_BLOCKS * world_size  # as the rows of the pad: two for each channel
            in_shared = TMA_CHANNELS * world_size * piece * PACK_NBYTES
            return Scratch(piece, SIGNAL_PAD_NBYTES + slots * piece * PACK_NBYTES, 0, in_shared)
        case Algorithm.TWO_SHOT_LOSSLESS:
            slots = 2 * PIPELINE_DEPTH * PIPELINE_BLOCKS * world_size
            slot = LOSSLESS_CHUNK * LOSSLESS_TILE_NBYTES // PACK_NBYTES
            return Scratch(slot, SIGNAL_PAD_NBYTES + slots * slot * PACK_NBYTES, fill=0)
        case Algorithm.MULTIMEM_TWO_SHOT:
            return Scratch(packs, SIGNAL_PAD_NBYTES + packs * PACK_NBYTES, fill=0)
        case Algorithm.REDUCESCATTER_PUSH:
            part = packs_a_part(REDUCESCATTER_NBYTES // PACK_NBYTES, world_size)
            return Scratch(part, 2 * world_size * part * PACK_NBYTES, fill=0xFF)
        case Algorithm.ALLGATHER_FLAGGED:
            pairs = 2 * ALLGATHER_FLAGGED_NBYTES // PACK_NBYTES
            return Scratch(pairs, 2 * world_size * pairs * PACK_NBYTES, fill=0)
        case Algorithm.ALLGATHER_PUSH:
            slots = ALLGATHER_BLOCKS * ALLGATHER_DEPTH * world_size
            return Scratch(ALLGATHER_CHUNK, SIGNAL_PAD_NBYTES + slots * ALLGATHER_CHUNK * PACK_NBYTES, fill=0)
        case Algorithm.QUANTIZED_TWO_SHOT_PUSH:
            shard = -(-largest // (2 * TILE_NUMEL * world_size))  # tiles of the smallest elements
            slot = shard * TILE_LARGEST_SPARING_NBYTES // PACK_NBYTES
            return Scratch(slot, 4 * world_size * slot * PACK_NBYTES, fill=0xFF)
        case Algorithm.QUANTIZED_TWO_SHOT_PIPELINED:
            slots = 2 * PIPELINE_DEPTH * QUANTIZED_BLOCKS * world_size
            slot = QUANTIZED_CHUNK_NBYTES // PACK_NBYTES
            return Scratch(slot, SIGNAL_PAD_NBYTES + slots * slot * PACK_NBYTES, fill=0)
        case Algorithm.QUANTIZED_REDUCESCATTER:
            slots = QUANTIZED_SCATTER_DEPTH * QUANTIZED_BLOCKS * world_size
            slot = QUANTIZED_CHUNK_NBYTES // PACK_NBYTES
            return Scratch(slot, SIGNAL_PAD_NBYTES + slots * slot * PACK_NBYTES, fill=0)
        case Algorithm.MATMUL_REDUCESCATTER | Algorithm.MATMUL_ALLREDUCE:
            boxes = boxes_a_slot(world_size)
            area = (world_size - 1) * boxes * (4 + MATMUL_BOX_NBYTES)
            areas = 2 if algorithm is Algorithm.MATMUL_ALLREDUCE else 1
            return Scratch(boxes, SIGNAL_PAD_NBYTES + areas * area, fill=0)
    raise AssertionError(algorithm)


def boxes_a_slot(world_size: int) -> int:
    """Boxes of each rank's part of a result that one launch of a matmul has scratch for."""
    return -(-MATMUL_PARTS_NBYTES // (MATMUL_BOX_NBYTES * world_size) // 256) * 256


def rows_a_launch(world_size: int, columns: int) -> int:
    """Rows of each rank's part, where the result has so many columns."""
    return boxes_a_slot(world_size) // -(-columns // MATMUL_BOX_COLUMNS) * MATMUL_BOX_ROWS


def row_slices(counts: Sequence[int], step: int) -> list[Slice]:
    """The launches of a matmul whose ranks own ``counts`` rows of the result, ``step`` of each at a time."""
    return [
        Slice(
            0,
            tuple(begin + offset for begin in accumulate((0, *counts[:-1]))),
            tuple(min(max(count - offset, 0), step) for count in counts),
            offset,
        )
        for offset in range(0, max(counts), step)
    ]


def slices(algorithm: Algorithm, world_size: int, counts: Sequence[int], itemsize: int) -> list[Slice]:
    """The launches of a call.

    Args:
        algorithm: what runs.
        world_size: ranks, 2 to 8.
        counts: elements of each rank's part, not all zero; of the whole tensor alone where the op has no parts.
        itemsize: the bytes of an element.
    """
    match algorithm:
        case Algorithm.REDUCESCATTER_PUSH:
            step = scratch(algorithm, world_size).capacity * PACK_NBYTES // itemsize
        case Algorithm.ALLGATHER_FLAGGED | Algorithm.ALLGATHER_PUSH:
            counts = [count * itemsize for count in counts]  # it counts in bytes
            step = max(counts)
        case Algorithm.QUANTIZED_REDUCESCATTER:
            step = max(counts)  # any, in scratch of a fixed size
        case _:
            (numel,) = counts
            return [Slice(numel)]
    begin = tuple(accumulate(counts, initial=0))[:-1]
    return [
        Slice(sum(counts), begin, tuple(min(max(count - offset, 0), step) for count in counts), offset)
        for offset in range(0, max(counts), step)
    ]

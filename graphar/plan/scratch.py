"""The scratch memory that each algorithm needs on every rank. The kernels' files draw its layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graphar.numerics.codecs import TILE_NUMEL

MAX_RANKS = 8
MAX_BLOCKS = 256
WORLD_SIZES = range(2, MAX_RANKS + 1)
PACK_NBYTES = 16
PACKS_A_LINE = 8
WARP = 32
MIB = 1 << 20
SHARED_NBYTES = 227 << 10  # the most dynamic shared memory of a block, from sm_90 on

SIGNAL_PAD_NBYTES = MAX_BLOCKS * MAX_RANKS * 8
SENTINEL = 0xFF  # the byte of the sentinel: a word of all ones has not arrived (cuda_src/device/sync/sentinel.cuh)

# A constant must equal the kernel's constant that its comment names; tests compare them.
ONE_SHOT_DEPTH = 3  # packs of each rank that a thread of one_shot has in flight
ONE_SHOT_THREADS = 256  # `max_threads` in allreduce/one_shot.cu
PIPELINE_DEPTH = 3  # chunks in flight: `pipeline_depth` in device/sync/two_shot_pipeline.cuh
TMA_CHANNELS = 4  # this and the next two: `channels`, `tma_depth` and `reduce_warps` in allreduce/two_shot_tma.cu
TMA_DEPTH = 3
TMA_REDUCE_WARPS = 2
TMA_THREADS = WARP * TMA_CHANNELS * (3 + TMA_REDUCE_WARPS)
TMA_BLOCKS = MAX_BLOCKS // 2 // TMA_CHANNELS  # each channel has two rows of the signal pad
NORM_SHARED_NBYTES = 2 * 32 * 4  # NumbersOfWarps in device/rms_norm.cuh
NORM_ROW_PACKS = 4096  # packs of the longest row that a norm kernel takes
PUSH_DEPTH = 4  # steps in flight of a reduce-scatter or an all-gather: `push_depth` in device/sync/push_pipeline.cuh
LOSSLESS_TILE_NBYTES = 2 * TILE_NUMEL + 32  # uncompressed elements and a header
MATMUL_BOX_ROWS = MATMUL_BOX_COLUMNS = 64  # a box is the unit that a fused matmul sends
MATMUL_BOX_NBYTES = 8192
MATMUL_PARTIAL_PLACES = 2  # of a box in fp32: `fp32_places` in device/matmul/tile_travel.cuh
MATMUL_PARTS_NBYTES = 128 * MIB  # the largest result that one launch has scratch for
GATHERED_UNIT_PACKS = 1024  # of an all-gather + matmul: `unit_packs` in device/matmul/gathered_rows.cuh
FLAGGED_PACKS = 2 * WARP  # of a slot, for 32 packs and their flags: `place` in device/sync/flagged.cuh
GATHERED_NBYTES = 128 * MIB  # the rows of all ranks that one launch has scratch for
COPY_PLACES = 3  # chunks of a peer that copy engines may bring: two travel while one is taken
COPY_UNIT_NBYTES = 4096  # chunks that travel by copy engines are multiples of it, but for the last one
TILE_LARGEST_SPARING_NBYTES = 1152  # of codecs with a sentinel: 8-bit codes, and one fp32 number for every 32


@dataclass(frozen=True)
class Sizes:
    """The sizes that scratch is computed from. The simulator uses smaller ones."""

    # The largest tensor of one_shot_push and allreduce_rmsnorm_one_shot, for 3 or more ranks.
    pushed_nbytes: int = 1 * MIB
    pushed_nbytes_of_two: int = 4 * MIB  # the largest tensor of these algorithms for 2 ranks
    one_shot_nbytes: int = 8 * MIB  # the largest tensor of the other one-shots
    two_shot_nbytes: int = 64 * MIB  # the largest tensor of the two-shots without chunks
    quantized_nbytes: int = 64 * MIB  # the largest tensor of quantized_two_shot_push
    skinny_nbytes: int = 2 * MIB  # the largest result of a skinny matmul
    pipeline_chunk: int = 2048  # packs in a slot of two_shot_pipelined
    pipeline_blocks: int = 132  # blocks that have slots
    # Channels of a block of two_shot_tma. tests/host also changes the kernel's constant.
    tma_channels: int = TMA_CHANNELS
    tma_channel_nbytes: int = 48 << 10  # shared memory of a channel, which holds a piece of each rank
    lossless_chunk: int = 16  # tiles in a slot of an algorithm that compresses
    reducescatter_nbytes: int = 16 * MIB  # the input that one launch takes, if its parts are equal
    allgather_flagged_nbytes: int = 256 << 10  # the largest part that allgather_flagged takes
    allgather_chunk: int = 2048  # packs in a slot of allgather_push
    allgather_blocks: int = 132  # blocks that have slots
    quantized_chunk_nbytes: int = 16 << 10  # a slot of quantized_two_shot_pipelined and quantized_reducescatter
    quantized_blocks: int = MAX_BLOCKS
    norm_row_packs: int = NORM_ROW_PACKS
    copied_nbytes: int = 64 * MIB  # all places of a reduce-scatter or an all-gather by copy engines
    # The same of an all-reduce: a copy costs 3 us beside its bytes, so chunks are large (reports/h200x2/notes.md).
    copied_sum_nbytes: int = 192 * MIB


@dataclass(frozen=True)
class Scratch:
    """The memory that an algorithm needs on every rank. :meth:`of_slots` makes one.

    Attributes:
        capacity: packs of 16 bytes in one slot, as kernels read it; boxes for matmuls that send tiles.
        nbytes: bytes of the signal pad, if there is one, and of all slots.
        fill: the byte that fills the scratch before the first call.
        shared_nbytes: dynamic shared memory of each thread block, in bytes.
    """

    capacity: int
    nbytes: int
    fill: int
    shared_nbytes: int = 0

    @classmethod
    def of_slots(
        cls, slots: int, slot_nbytes: int, *, fill: int = 0, signal_pad: bool = False, shared_nbytes: int = 0
    ) -> Scratch:
        """Returns the scratch of so many equal slots, behind a signal pad if there is one.

        Args:
            slots: how many slots each rank has.
            slot_nbytes: the bytes of a slot, a multiple of 16. With ``device/sync/flagged.cuh`` it is twice the bytes
                of the data, rounded up to a multiple of 1,024.
            fill: the byte that fills the scratch before the first call: 0xFF where a sentinel says that data has not
                arrived (``device/sync/sentinel.cuh``), and 0 elsewhere.
            signal_pad: whether the scratch begins with a signal pad (``device/sync/signal_pad.cuh``), which needs a
                ``fill`` of 0.
            shared_nbytes: dynamic shared memory of each thread block, in bytes.

        Raises:
            ValueError: a number is out of range.
        """
        if slots < 1 or slot_nbytes < PACK_NBYTES or slot_nbytes % PACK_NBYTES:
            raise ValueError(f"Scratch: needs slots of a multiple of {PACK_NBYTES} bytes, got {slots} of {slot_nbytes}")
        if not 0 <= fill <= 255 or (signal_pad and fill):
            raise ValueError(f"Scratch: fill must be a byte, and 0 with a signal pad, got {fill}")
        if not 0 <= shared_nbytes <= SHARED_NBYTES:
            raise ValueError(f"Scratch: shared_nbytes must be from 0 to {SHARED_NBYTES}, got {shared_nbytes}")
        pad_nbytes = SIGNAL_PAD_NBYTES if signal_pad else 0
        return cls(slot_nbytes // PACK_NBYTES, pad_nbytes + slots * slot_nbytes, fill, shared_nbytes)


Layout = Callable[[int], Scratch]  # by world size


def packs_a_part(packs: int, parts: int) -> int:
    """Returns the packs of each of ``parts`` equal parts in whole 128-byte lines, as cuda_src/device/pack.cuh does."""
    return -(-packs // (parts * PACKS_A_LINE)) * PACKS_A_LINE


# Layouts: a row has one of these functions with all arguments but the world size.
def rotating(nbytes: Callable[[int], int], copies: int, world_size: int, shared_nbytes: int = 0) -> Scratch:
    """Returns ``copies`` slots of ``nbytes`` for every rank, without a signal pad.

    A call never writes slots that the previous call may still read. A sentinel says that data has not arrived.
    """
    slot_nbytes = -(-nbytes(world_size) // PACK_NBYTES) * PACK_NBYTES
    return Scratch.of_slots(copies * world_size, slot_nbytes, fill=SENTINEL, shared_nbytes=shared_nbytes)


def flagged(nbytes: int, world_size: int) -> Scratch:
    """Returns two slots for every rank, each with room for ``nbytes`` of data and their flags."""
    slot_nbytes = -(-nbytes // (WARP * PACK_NBYTES)) * FLAGGED_PACKS * PACK_NBYTES
    return Scratch.of_slots(2 * world_size, slot_nbytes)


def signalled(packs: int, copies: int, world_size: int, packs_of_rank: int = 0) -> Scratch:
    """Returns a signal pad and ``copies`` slots of ``packs``; blocks share memory with packs of every rank."""
    shared_nbytes = packs_of_rank * world_size * PACK_NBYTES
    return Scratch.of_slots(copies, packs * PACK_NBYTES, signal_pad=True, shared_nbytes=shared_nbytes)


def pipelined(slot_packs: int, slots_a_rank: int, world_size: int) -> Scratch:
    """Returns a signal pad and ``slots_a_rank`` slots for every rank, whatever the size of the tensor."""
    return Scratch.of_slots(world_size * slots_a_rank, slot_packs * PACK_NBYTES, signal_pad=True)


def copied(nbytes: int, areas: int, world_size: int) -> Scratch:
    """Returns ``areas``, each with COPY_PLACES places for every peer; ``nbytes`` are of all areas."""
    places = areas * COPY_PLACES * (world_size - 1)
    return Scratch.of_slots(places, nbytes // places // COPY_UNIT_NBYTES * COPY_UNIT_NBYTES)


def bulk_copied(channels: int, channel_nbytes: int, world_size: int) -> Scratch:
    """Returns the scratch of two_shot_tma: a signal pad and slots of a piece each, in whole L2 lines."""
    piece = channel_nbytes // PACK_NBYTES // world_size // 32 * 32
    slots = TMA_DEPTH * MAX_BLOCKS * world_size  # a row of the signal pad for each shot of a channel
    shared_nbytes = channels * world_size * piece * PACK_NBYTES  # a piece for every rank in each channel
    return Scratch.of_slots(slots, piece * PACK_NBYTES, signal_pad=True, shared_nbytes=shared_nbytes)


def matmul_boxes(areas: int, world_size: int) -> Scratch:
    """Returns the scratch of fused matmuls that send tiles: a signal pad and ``areas``, each with all peers' boxes."""
    boxes = boxes_a_slot(world_size)
    area = (world_size - 1) * boxes * (4 + MATMUL_BOX_NBYTES)  # a flag for each box
    return Scratch(boxes, SIGNAL_PAD_NBYTES + areas * area, fill=0)


def gathered_rows(nbytes: int, world_size: int) -> Scratch:
    """Returns the scratch of an all-gather + matmul: a signal pad, a line of counts, flags and rows of every peer."""
    slot = packs_a_part(-(-nbytes // PACK_NBYTES), world_size)
    return Scratch(slot, gathered_slot_offset(world_size, slot, world_size), fill=0)


def gathered_flags(capacity: int, unit_packs: int = GATHERED_UNIT_PACKS) -> int:
    """Returns the flags beside a slot of ``capacity`` packs: `stride` in device/matmul/gathered_rows.cuh."""
    return (capacity // (unit_packs // 2) + WARP) // WARP * WARP


def gathered_slot_offset(world_size: int, capacity: int, hops: int) -> int:
    """Returns the bytes before the slot, on any rank, of the rank ``hops`` places after it.

    It is `slot` in device/matmul/gathered_rows.cuh. With ``hops`` of ``world_size``: the bytes up to the end.
    """
    flags = WARP + (world_size - 1) * gathered_flags(capacity)
    return SIGNAL_PAD_NBYTES + 4 * flags + (hops - 1) * capacity * PACK_NBYTES


def boxes_a_slot(world_size: int) -> int:
    """Returns how many boxes of each rank's part of a result one launch of a fused matmul has scratch for."""
    return -(-MATMUL_PARTS_NBYTES // (MATMUL_BOX_NBYTES * world_size) // 256) * 256

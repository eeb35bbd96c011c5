"""How the ranks' data reach each other without kernels: inside this process, or over a process group of torch's.

A transport serves the ranks of this process, all of them or one. The messages between processes on the CPU are a third
one: graphar.ranks.cpu.messages. Only bytes travel, so a backend need not support the dtype. Tensors are contiguous.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from graphar.errors import UnsupportedError
from graphar.ranks.cpu.reduction import Chunk

ROW_UNIT = 64  # bytes: a multiple of every dtype's size


class GroupFailed(Exception):
    """A rank of the process group failed, or did not take part in time. The message is torch's.

    The ranks ``absent`` are known not to have made the call; None: nothing is known. The wait that failed began at
    ``begin``, by time.monotonic(); None: with the call.
    """

    def __init__(self, message: str, absent: Collection[int] | None = None, begin: float | None = None) -> None:
        super().__init__(message)
        self.absent, self.waited_s = absent, None if begin is None else time.monotonic() - begin


class Transport(Protocol):
    """Moves data between ranks. On the CPU each method raises GroupFailed if a rank fails, or is late."""

    world_size: int
    small_nbytes: int  # an all-reduce of so many bytes sends whole tensors: one message, not two
    chunk_nbytes: int  # the most bytes of a rank in a message
    two_shot_nbytes: int  # the most bytes of a rank in a chunk

    @property
    def ranks(self) -> Sequence[int]: ...  # those of this process

    def collect(
        self, sent: Sequence[torch.Tensor], lengths: Sequence[int], timeout_s: float
    ) -> Sequence[Sequence[torch.Tensor]]:
        """All-gather: returns for each rank of this process what all ranks have sent, which is read only.

        ``lengths`` are the elements that each rank sends. The result stays until the next call.
        """
        ...

    def exchange(
        self, sent: Sequence[Sequence[torch.Tensor]], received: Sequence[Sequence[torch.Tensor]], timeout_s: float
    ) -> None:
        """All-to-all: each rank of this process sends a tensor to each rank, and receives one from each."""
        ...

    def two_shot(self, chunks: Iterable[Sequence[Chunk]], timeout_s: float) -> None:
        """Reduce-scatter, and all-gather if chunks gather: each rank adds its shard of all inputs.

        There is a chunk for each rank of this process. The next chunk is encoded while the last one travels.
        """
        ...


class InProcess:
    """All ranks are in this process, on the devices of their tensors. Nothing is copied between equal devices."""

    small_nbytes = chunk_nbytes = two_shot_nbytes = sys.maxsize

    def __init__(self, world_size: int) -> None:
        self.world_size, self.ranks = world_size, range(world_size)

    def collect(
        self, sent: Sequence[torch.Tensor], lengths: Sequence[int], timeout_s: float
    ) -> Sequence[Sequence[torch.Tensor]]:
        by_device = {device: [one.to(device) for one in sent] for device in dict.fromkeys(one.device for one in sent)}
        return [by_device[one.device] for one in sent]

    def exchange(
        self, sent: Sequence[Sequence[torch.Tensor]], received: Sequence[Sequence[torch.Tensor]], timeout_s: float
    ) -> None:
        for rank, rooms in enumerate(received):
            for room, of_peer in zip(rooms, sent, strict=True):
                room.copy_(of_peer[rank])

    def two_shot(self, chunks: Iterable[Sequence[Chunk]], timeout_s: float) -> None:
        for of_ranks in chunks:  # which do not gather: each rank has all tensors at hand
            sent = [chunk.sent() for chunk in of_ranks]
            for rank, chunk in enumerate(of_ranks):
                chunk.add([one[rank].to(sent[rank][rank].device) for one in sent])


class Group:
    """A process group of torch's. Its methods raise UnsupportedError if it has no backend for the tensors' device."""

    small_nbytes = 32 << 10  # messages of so many bytes take no longer than empty ones
    chunk_nbytes = two_shot_nbytes = 64 << 20

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.world_size, self._rank = group, group.size(), group.rank()
        self.ranks = (self._rank,)

    def collect(
        self, sent: Sequence[torch.Tensor], lengths: Sequence[int], timeout_s: float
    ) -> Sequence[Sequence[torch.Tensor]]:
        (mine,), longest = sent, max(lengths)
        if mine.numel() < longest:
            mine = torch.nn.functional.pad(mine, (0, longest - mine.numel()))
        received = mine.new_empty(self.world_size, longest)
        options = self._options(AllgatherOptions(), mine.device, timeout_s)
        to = list(bytes_of(received).chunk(self.world_size))
        self._wait(self._group.allgather([to], [bytes_of(mine)], options), mine.device, timeout_s)
        return [[row[:length] for row, length in zip(received.unbind(), lengths, strict=True)]]

    def exchange(
        self, sent: Sequence[Sequence[torch.Tensor]], received: Sequence[Sequence[torch.Tensor]], timeout_s: float
    ) -> None:
        (own,), (rooms,) = sent, received
        flat = torch.cat([bytes_of(one) for one in own])
        sends, receives = ([one.nbytes for one in ones] for ones in (own, rooms))
        room = flat.new_empty(sum(receives))
        options = self._options(dist.distributed_c10d.AllToAllOptions(), flat.device, timeout_s)
        self._wait(self._group.alltoall_base(room, flat, receives, sends, options), flat.device, timeout_s)
        for target, one in zip(rooms, room.split(receives), strict=True):
            bytes_of(target).copy_(one)

    def two_shot(self, chunks: Iterable[Sequence[Chunk]], timeout_s: float) -> None:
        pipelined(self._sum_chunk(chunk, timeout_s) for (chunk,) in chunks)

    def _sum_chunk(self, chunk: Chunk, timeout_s: float) -> Iterator[None]:
        parts = chunk.sent()
        mine, device = parts[self._rank], parts[self._rank].device
        sent = _rows(parts)
        received = torch.empty_like(sent)
        options = self._options(dist.distributed_c10d.AllToAllOptions(), device, timeout_s)
        scattering = self._group.alltoall_base(received, sent, [], [], options)
        yield
        self._wait(scattering, device, timeout_s)
        shards = [row[: mine.nbytes].view(mine.dtype) for row in received]
        total = chunk.add(shards) if mine.numel() else mine
        if not chunk.gathers:
            return
        rooms = chunk.rooms()
        gathered = _rows(rooms)
        own = bytes_of(total)
        gathered[self._rank, : own.numel()].copy_(own)
        options = self._options(AllgatherOptions(), device, timeout_s)
        gathering = self._group.allgather([list(gathered)], [gathered[self._rank].clone()], options)
        yield
        self._wait(gathering, device, timeout_s)
        for room, row in zip(rooms, gathered, strict=True):
            bytes_of(room).copy_(row[: room.nbytes])
        chunk.arrived(rooms)

    def _options(self, options, device: torch.device, timeout_s: float):
        check_backend(device, self._group)
        options.asyncOp = True
        if device.type == "cpu":  # else gloo's threads outlive the deadline, and delay the process's exit
            options.timeout = deadline(timeout_s)
        return options

    def _wait(self, work: dist.Work, device: torch.device, timeout_s: float) -> None:
        if device.type == "cpu":
            wait([work], timeout_s)
        else:
            work.wait()  # only orders the stream; the group's own time-out applies


def check_backend(device: torch.device, group: dist.ProcessGroup) -> None:
    """Raises UnsupportedError if the group has no backend for a device."""
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise UnsupportedError(f"the group has no backend for {device.type} tensors: {error}") from None


def pipelined(runs: Iterable[Iterator[None]]) -> None:
    """Runs iterators to their ends. A step of one comes after an earlier step of the next, which begins meanwhile."""
    under_way: list[Iterator[None]] = []
    for run in runs:
        under_way = [one for one in (run, *under_way) if not next(one, True)]
    while under_way:
        under_way = [one for one in under_way if not next(one, True)]


def _rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Returns the bytes of tensors as equally long rows, which are padded and aligned for every dtype."""
    most = max(part.nbytes for part in parts)
    rows = parts[0].new_empty(len(parts), -(-most // ROW_UNIT) * ROW_UNIT, dtype=torch.uint8)
    for row, part in zip(rows, parts, strict=True):
        row[: part.nbytes].copy_(bytes_of(part))
    return rows


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a contiguous tensor, in one dimension."""
    # A contiguous tensor of at most one element may have any stride, and view(dtype) rejects some.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def wait(works: Sequence[dist.Work], timeout_s: float) -> None:
    """Waits for work on the CPU; GroupFailed if a rank failed, or did not take part within ``timeout_s`` seconds."""
    begin = time.monotonic()
    try:
        for work in works:
            work.wait(deadline(begin + timeout_s - time.monotonic()))
    except RuntimeError as error:
        raise GroupFailed(str(error), begin=begin) from error


def deadline(seconds: float) -> timedelta:
    """Returns a deadline for gloo, which counts whole milliseconds, and takes 0 for none: not before ``seconds``."""
    return timedelta(milliseconds=max(1, math.ceil(seconds * 1e3)))

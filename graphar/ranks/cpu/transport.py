"""How the ranks' data reach each other without kernels: inside this process, or over a process group of torch's.

A transport serves the ranks of this process, all of them or one. The messages between processes on the CPU are a third
one: graphar.ranks.cpu.messages. Only bytes travel, so a backend need not support the dtype. Tensors are contiguous.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from graphar.errors import UnsupportedError
from graphar.ranks.cpu.reduction import Tensors

ROW_UNIT = 64  # bytes: a multiple of every dtype's size, and of kernels' packs

Rooms = Sequence[Tensors] | None  # for each rank of this process, memory in which each rank's part may come
Arriving = Callable[[], Sequence[Tensors]]  # waits for what each rank of this process receives, and returns it


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
    def ranks(self) -> Sequence[int]: ...  # of this process

    def gather(self, sent: Tensors, lengths: Sequence[int], rooms: Rooms = None) -> Arriving:
        """Begins an all-gather: each rank of this process sends a tensor, and receives all ranks' tensors.

        ``lengths`` are the elements that each rank sends. What comes is read only, and stays until the next call.
        """
        ...

    def exchange(self, sent: Sequence[Tensors], rooms: Rooms = None) -> Arriving:
        """Begins an all-to-all: each rank of this process sends bytes to each rank, and receives some from each.

        Without ``rooms`` what comes is like what a rank sends itself, and stays until the exchange after the next.
        """
        ...


class InProcess:
    """All ranks are in this process, on the devices of their tensors. Nothing is copied between equal devices."""

    small_nbytes = chunk_nbytes = two_shot_nbytes = sys.maxsize

    def __init__(self, world_size: int) -> None:
        self.world_size, self.ranks = world_size, range(world_size)

    def gather(self, sent: Tensors, lengths: Sequence[int], rooms: Rooms = None) -> Arriving:
        by_device = {device: [x.to(device) for x in sent] for device in dict.fromkeys(x.device for x in sent)}
        return lambda: [by_device[x.device] for x in sent]

    def exchange(self, sent: Sequence[Tensors], rooms: Rooms = None) -> Arriving:
        return lambda: [[parts[rank].to(sent[rank][rank].device) for parts in sent] for rank in self.ranks]


class Group:
    """A process group of torch's. Its methods raise UnsupportedError if it has no backend for the tensors' device.

    ``timeout_s`` is the deadline of each wait on another rank, in seconds.
    """

    small_nbytes = 32 << 10  # messages of so many bytes take no longer than empty ones
    chunk_nbytes = two_shot_nbytes = 64 << 20

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        self._group, self.world_size, self._rank = group, group.size(), group.rank()
        self.ranks, self.timeout_s = (self._rank,), timeout_s

    def gather(self, sent: Tensors, lengths: Sequence[int], rooms: Rooms = None) -> Arriving:
        (mine,) = sent
        nbytes = [length * mine.itemsize for length in lengths]
        row = mine.new_empty(-(-max(nbytes) // ROW_UNIT) * ROW_UNIT, dtype=torch.uint8)
        row[: mine.nbytes].copy_(bytes_of(mine))
        rows = row.new_empty(self.world_size, row.numel())
        options = self._options(AllgatherOptions(), mine.device)
        work = self._group.allgather([list(rows)], [row], options)
        received = [row[:n].view(mine.dtype) for row, n in zip(rows, nbytes, strict=True)]
        return arriving(partial(self._wait, work, mine.device), received)

    def exchange(self, sent: Sequence[Tensors], rooms: Rooms = None) -> Arriving:
        (mine,) = sent
        nbytes = [room.nbytes for room in rooms[0]] if rooms else [mine[self._rank].nbytes] * self.world_size
        flat = torch.cat(list(mine))
        received = flat.new_empty(sum(nbytes))
        options = self._options(dist.distributed_c10d.AllToAllOptions(), flat.device)
        work = self._group.alltoall_base(received, flat, nbytes, [part.nbytes for part in mine], options)
        return arriving(partial(self._wait, work, flat.device), received.split(nbytes))

    def _options(self, options, device: torch.device):
        check_backend(device, self._group)
        options.asyncOp = True
        if device.type == "cpu":  # else gloo's threads outlive the deadline, and delay the process's exit
            options.timeout = deadline(self.timeout_s)
        return options

    def _wait(self, work: dist.Work, device: torch.device) -> None:
        if device.type == "cpu":
            wait([work], self.timeout_s)
        else:
            work.wait()  # only orders the stream; the group's own time-out applies


def arriving(end: Callable[[], None], received: Tensors) -> Arriving:
    """Returns a function that waits for the ``end``, and then returns what this process's only rank receives."""

    def arrived() -> Sequence[Tensors]:
        end()
        return [received]

    return arrived


def check_backend(device: torch.device, group: dist.ProcessGroup) -> None:
    """Raises UnsupportedError if the group has no backend for a device."""
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise UnsupportedError(f"the group has no backend for {device.type} tensors: {error}") from None


def pipelined(runs: Iterable[Iterator[None]]) -> None:
    """Runs iterators to their ends. An iterator's second step comes after the first step of the next one, and so on."""
    under_way: list[Iterator[None]] = []
    for run in runs:
        under_way = [begun for begun in (run, *under_way) if not next(begun, True)]
    while under_way:
        under_way = [begun for begun in under_way if not next(begun, True)]


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

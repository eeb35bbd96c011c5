"""How the ranks' data reach each other without kernels: inside this process, or over a process group of torch's.

A transport serves the ranks of this process, all of them or one. The messages between processes on the CPU are a third
one: graphar.ranks.cpu.messages. Only bytes travel, so a backend need not support the dtype. Tensors are contiguous.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from graphar.errors import UnsupportedError

# Writes the sum of parts into a tensor. Takes the parts, and the index of their first element in the whole tensor.
Add = Callable[[torch.Tensor, Sequence[torch.Tensor], int], None]


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

    @property
    def ranks(self) -> Sequence[int]: ...  # those of this process
    @property
    def world_size(self) -> int: ...
    @property
    def small_nbytes(self) -> float: ...  # an all-reduce of so many bytes sends whole tensors: one message, not two
    @property
    def chunk_nbytes(self) -> int: ...  # the most bytes of a rank that travel at a time

    def collect(
        self, sent: Sequence[torch.Tensor], lengths: Sequence[int], timeout_s: float
    ) -> Sequence[Sequence[torch.Tensor]]:
        """All-gather: returns for each rank of this process what all ranks have sent, which is read only.

        ``lengths`` are the elements that each rank sends. The result stays until the next call.
        """
        ...

    def exchange(self, sent: Sequence[Sequence[torch.Tensor]], timeout_s: float) -> Sequence[Sequence[torch.Tensor]]:
        """All-to-all: returns for each rank of this process what each rank has sent to it.

        A rank sends a tensor to each rank, and all ranks send tensors of equal lengths to one.
        """
        ...

    def two_shot(self, source: torch.Tensor, target: torch.Tensor, add: Add, timeout_s: float) -> None:
        """All-reduce of a large tensor of the only rank of this process: each rank adds its shard of all inputs."""


class InProcess:
    """All ranks are in this process, on the devices of their tensors. Nothing is copied between equal devices."""

    small_nbytes, chunk_nbytes = math.inf, sys.maxsize

    def __init__(self, world_size: int) -> None:
        self.world_size, self.ranks = world_size, range(world_size)

    def collect(
        self, sent: Sequence[torch.Tensor], lengths: Sequence[int], timeout_s: float
    ) -> Sequence[Sequence[torch.Tensor]]:
        by_device = {device: [one.to(device) for one in sent] for device in dict.fromkeys(one.device for one in sent)}
        return [by_device[one.device] for one in sent]

    def exchange(self, sent: Sequence[Sequence[torch.Tensor]], timeout_s: float) -> Sequence[Sequence[torch.Tensor]]:
        return [[one[rank].to(mine[rank].device) for one in sent] for rank, mine in enumerate(sent)]

    def two_shot(self, source: torch.Tensor, target: torch.Tensor, add: Add, timeout_s: float) -> None:
        raise NotImplementedError("ranks of one process have all tensors at hand")


class Group:
    """A process group of torch's. Its methods raise UnsupportedError if it has no backend for the tensors' device."""

    small_nbytes = 32 << 10  # messages of so many bytes take no longer than empty ones
    chunk_nbytes = 64 << 20

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
        self._run(lambda: self._group.allgather([to], [bytes_of(mine)], options), mine.device, timeout_s)
        return [[row[:length] for row, length in zip(received.unbind(), lengths, strict=True)]]

    def exchange(self, sent: Sequence[Sequence[torch.Tensor]], timeout_s: float) -> Sequence[Sequence[torch.Tensor]]:
        (parts,) = sent
        rows = parts[0].new_zeros(len(parts), max(part.numel() for part in parts))
        for row, part in zip(rows, parts, strict=True):
            row[: part.numel()].copy_(part)
        received = self._all_to_all(rows, timeout_s)
        return [received[:, : parts[self._rank].numel()].contiguous().unbind()]

    def two_shot(self, source: torch.Tensor, target: torch.Tensor, add: Add, timeout_s: float) -> None:
        shard = -(-source.numel() // self.world_size)
        padded = torch.nn.functional.pad(source, (0, self.world_size * shard - source.numel()))
        received = self._all_to_all(padded.view(self.world_size, shard), timeout_s)
        total = torch.empty_like(received[0], dtype=target.dtype)
        add(total, received.unbind(), self._rank * shard)
        (shards,) = self.collect([total], [shard] * self.world_size, timeout_s)
        for piece, one in zip(target.split(shard), shards, strict=False):  # the last ones may be padding
            piece.copy_(one[: piece.numel()])

    def _all_to_all(self, rows: torch.Tensor, timeout_s: float) -> torch.Tensor:
        received, device = torch.empty_like(rows), rows.device
        options = self._options(dist.distributed_c10d.AllToAllOptions(), device, timeout_s)
        start = self._group.alltoall_base
        self._run(lambda: start(bytes_of(received), bytes_of(rows), [], [], options), device, timeout_s)
        return received

    def _options(self, options, device: torch.device, timeout_s: float):
        check_backend(device, self._group)
        options.asyncOp = True
        if device.type == "cpu":  # else gloo's threads outlive the deadline, and delay the process's exit
            options.timeout = deadline(timeout_s)
        return options

    def _run(self, start: Callable[[], dist.Work], device: torch.device, timeout_s: float) -> None:
        work = start()  # an error of this rank alone is raised here, and ends no communicator
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

"""Symmetric tensors: tensors in memory that all ranks can access, so that an all-reduce needs no staging copy."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphar.runtime.arguments import Arguments
from graphar.runtime.memory.peer_memory import Buffer, PeerMemory
from graphar.runtime.plan import BoundedCache

# Memory is shared in whole blocks of this size. An allocation of whole blocks exposes no other memory to peers.
_BLOCK_NBYTES = 2 << 20
_ALIGNMENT = 16  # bytes of a pack
_SHARES = 2  # a tensor gets at most this part of a pool: two gathers of a model overlap


class SymmetricTensors:
    """The symmetric tensors of one communicator; ``devices`` are of this process's ranks, in rank order."""

    def __init__(self, devices: dict[int, int], memory: PeerMemory) -> None:
        self._devices, self._memory = devices, memory
        self.buffers: list[Buffer] = []
        self._held: BoundedCache[bool] = BoundedCache()  # for calls with one tensor
        self._places: BoundedCache[tuple[list[int], str]] = BoundedCache()  # by address
        # All allocations of this process lie in these addresses, with other memory between them.
        self._begin, self._end = sys.maxsize, 0

    def empty(self, like: torch.Tensor) -> list[torch.Tensor]:
        """Returns an uninitialised tensor for each rank of this process. Collective; ``like`` is alike on all ranks."""
        if like.numel() == 0:
            return [torch.empty_like(like, device=f"cuda:{device}") for device in self._devices.values()]
        buffer = self._memory.allocate(math.ceil(like.nbytes / _BLOCK_NBYTES) * _BLOCK_NBYTES)
        self.buffers.append(buffer)
        self._held.clear()
        self._places.clear()
        for rank in self._devices:
            self._begin = min(self._begin, buffer.pointers[rank])
            self._end = max(self._end, buffer.pointers[rank] + buffer.nbytes)
        return [tensor_at(buffer.pointers[rank], device, like) for rank, device in self._devices.items()]

    def where(self, pointer: int) -> tuple[list[int], str]:
        """Returns each rank's address for a symmetric one of this process, else none, and words alike on all ranks."""
        if (known := self._places.get(pointer)) is not None:
            return known
        place: tuple[list[int], str] = [], " at no symmetric tensor"
        for at, buffer in enumerate(self.buffers):
            for offset in [pointer - buffer.pointers[rank] for rank in self._devices]:
                if 0 <= offset < buffer.nbytes:
                    there = [base + offset for base in buffer.pointers]
                    place = there, f" at byte {offset} of symmetric tensor {at}"
        return self._places.keep(pointer, place)

    def hold(self, out: torch.Tensor | Sequence[torch.Tensor]) -> bool:
        """Whether an output, or one for each rank of this process, lies where kernels may write it on all ranks."""
        if not isinstance(out, torch.Tensor):
            return self._hold(out)
        pointer = out.data_ptr()
        if not self._begin <= pointer < self._end:
            return False
        key = pointer, out.is_contiguous()
        held = self._held.get(key)
        return self._held.keep(key, self._hold([out])) if held is None else held

    def _hold(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all tensors are contiguous, aligned to a pack, and at the same offset of one allocation."""
        pointer = tensors[0].data_ptr()
        there, _ = self.where(pointer)
        if not there or pointer % _ALIGNMENT or not tensors[0].is_contiguous():
            return False
        others = zip(list(self._devices)[1:], tensors[1:], strict=True)
        return all(x.data_ptr() == there[rank] and x.is_contiguous() for rank, x in others)

    def put_peers(self, arguments: Arguments) -> Callable[[], str]:
        """Returns a function that writes every rank's address of a symmetric output into the arguments.

        They have this rank's address already. The function returns :meth:`where` the tensor lies, in words.
        """
        last, place = None, ""

        def put() -> str:
            nonlocal last, place
            pointer = arguments.output
            if pointer != last:
                peers = arguments.peer_output
                addresses, at = self.where(pointer)
                for rank, there in enumerate(addresses):
                    peers[rank] = there
                last, place = pointer, f", its output{at}"
            return place

        return put


def tensor_at(pointer: int, device: int, like: torch.Tensor) -> torch.Tensor:
    """Returns a tensor like ``like`` over memory of ``device``, which it does not own."""
    described = {"shape": (like.nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3}
    raw = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=described), device=f"cuda:{device}")
    return raw.view(like.dtype).view(like.shape)


class TensorPool:
    """Symmetric memory that one tensor after another takes, on this process's only rank.

    Memory is free again once no tensor, and no view of one, uses it. As with torch's allocator, the next use must
    come after the last use in stream order. Memory stays in the pool until the communicator is closed.

    Ranks must make equal calls, and free tensors in the same order: then they take equal memory. Calls that use it tell
    the other ranks which memory they took.
    """

    def __init__(self, symmetric: SymmetricTensors, device: int, most_nbytes: int) -> None:
        self._symmetric, self._device, self._most = symmetric, device, most_nbytes
        self._memory: list[torch.Tensor] = []  # bytes
        self._users: dict[int, StorageWeakRef] = {}  # by address, of the tensor that took it last

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns an uninitialised tensor of one dimension; None if the pool has no room. Collective if it grows."""
        like = torch.empty(numel, dtype=dtype, device="meta")
        if not 0 < like.nbytes <= self._most // _SHARES:
            return None
        free = [memory for memory in self._memory if self._users[memory.data_ptr()].expired()]
        fitting = [memory for memory in free if memory.nbytes >= like.nbytes]
        memory = min(fitting, key=lambda memory: memory.nbytes, default=None)
        if memory is None:
            if sum(memory.nbytes for memory in self._memory) + like.nbytes > self._most:
                return None
            (memory,) = self._symmetric.empty(torch.empty(like.nbytes, dtype=torch.uint8, device="meta"))
            self._memory.append(memory)
        taken = tensor_at(memory.data_ptr(), self._device, like)
        self._users[memory.data_ptr()] = StorageWeakRef(taken.untyped_storage())
        return taken

"""A bounded pool of symmetric memory, for tensors that peers write and that are soon freed."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphar.runtime.memory.symmetric_tensors import SymmetricTensors, tensor_at

_SHARES = 2  # a tensor gets at most this part of the pool: two gathers of a model overlap


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
        self._users: list[StorageWeakRef | None] = []  # of the tensor that took it last

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Returns an uninitialised tensor of one dimension; None if the pool has no room. Collective if it grows."""
        like = torch.empty(numel, dtype=dtype, device="meta")
        if not 0 < like.nbytes <= self._most // _SHARES:
            return None
        fitting = [at for at, memory in enumerate(self._memory) if memory.nbytes >= like.nbytes and self._is_free(at)]
        at = min(fitting, key=lambda index: self._memory[index].nbytes, default=None)
        if at is None:
            if sum(memory.nbytes for memory in self._memory) + like.nbytes > self._most:
                return None
            at = len(self._memory)
            self._memory += self._symmetric.empty(torch.empty(like.nbytes, dtype=torch.uint8, device="meta"))
            self._users.append(None)
        taken = tensor_at(self._memory[at].data_ptr(), self._device, like)
        self._users[at] = StorageWeakRef(taken.untyped_storage())
        return taken

    def _is_free(self, at: int) -> bool:
        user = self._users[at]
        return user is None or user.expired()

"""Memory with a multicast address, from torch's symmetric memory: the third provider of peer pointers.

Nothing here is asked of torch before graphar.multicast and every rank allow it, since torch's rendezvous makes a
multicast object wherever it can. In torch 2.11 a rendezvous of one group can hang a later one of a larger group that
overlaps it (pytorch#196082), so a process that uses the multimem algorithms in several groups begins with the largest.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from graphar.errors import UnsupportedError
from graphar.ranks.rendezvous import Alone, StoreRendezvous
from graphar.runtime import multicast

T = TypeVar("T")


class TorchBuffer:
    """One allocation a rank, mapped into this process; see :class:`graphar.runtime.peer_memory.SharedBuffer`.

    Attributes:
        multicast_pointer: the address that stands for all of them at once.
    """

    def __init__(self, tensor: torch.Tensor, handle) -> None:
        self.pointers = list(handle.buffer_ptrs)
        self.multicast_pointer = handle.multicast_ptr
        self.nbytes = tensor.nbytes
        self._tensor, self._handle = tensor, handle

    def unmap(self) -> None:
        """Lets go of what torch has mapped; nothing of this process may use it any more."""
        self._handle = None

    def free(self) -> None:
        """Gives this process's allocation back to torch, after every peer has unmapped it."""
        self._tensor = None


class TorchMemory:
    """torch's symmetric memory between the processes of a group.

    Args:
        group: the process group, the only one a rendezvous is made for; None where one process holds all ranks.
        device: this rank's CUDA device index.
        rendezvous: where the ranks of the group meet.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: int, rendezvous: StoreRendezvous | Alone) -> None:
        self._group_name = group.group_name if group else None  # the group itself would keep its store
        self._device, self._rendezvous = device, rendezvous
        self._why_not: str | None = None

    def why_not(self) -> str:
        """Why no rank can have a multicast address, or nothing. Collective the first time; the same on every rank."""
        if self._why_not is None:
            try:
                self._check()
                self._why_not = ""
            except UnsupportedError as error:
                self._why_not = str(error)
        return self._why_not

    def allocate(self, nbytes: int) -> TorchBuffer:
        """Collective: an allocation of ``nbytes`` bytes on every rank, not yet cleared.

        Raises:
            UnsupportedError: on every rank, as :meth:`why_not` says, or where torch made no multicast object after all;
                on this one, where torch failed.
            CommunicatorError: torch failed on another rank. It may take torch's own time-out to be known.
        """
        if reason := self.why_not():
            raise UnsupportedError(reason)
        from torch.distributed import _symmetric_memory as symmetric_memory

        # Not symmetric_memory.empty: that may place a tensor inside a larger allocation, and torch's versions differ in
        # whether multicast_ptr is that allocation's or the tensor's.
        empty = symmetric_memory._SymmetricMemory.empty_strided_p2p
        device = torch.device("cuda", self._device)
        tensor = self._agree("allocating", lambda: empty((nbytes,), (1,), torch.uint8, device))
        handle = self._agree("mapping", lambda: symmetric_memory.rendezvous(tensor, self._group_name))
        made = handle.multicast_ptr and handle.offset == 0
        problem = "" if made else "torch's symmetric memory made no multicast object"
        try:
            self._rendezvous.agree_on_none("multicast", problem)
        except UnsupportedError as error:
            self._why_not = str(error)
            raise
        return TorchBuffer(tensor, handle)

    def _agree(self, what: str, step: Callable[[], T]) -> T:
        def ask_torch() -> T:
            try:
                return step()
            except RuntimeError as error:
                raise UnsupportedError(f"torch's symmetric memory failed: {error}") from error

        return self._rendezvous.agree(f"torch's symmetric memory: {what}", ask_torch)

    def _check(self) -> None:
        if self._group_name is None:
            raise UnsupportedError("NVLink multicast joins one process a rank, and this process holds all ranks")
        self._rendezvous.agree_on_none("the multicast opt-in", multicast.why_not(os.environ))
        self._rendezvous.agree_on_none("multicast support", self._why_not_here())

    def _why_not_here(self) -> str:
        from torch.distributed import _symmetric_memory as symmetric_memory

        supported = symmetric_memory._SymmetricMemory.has_multicast_support
        if supported(torch._C._autograd.DeviceType.CUDA, self._device):
            return ""
        return f"torch finds no NVLink multicast on cuda:{self._device}"

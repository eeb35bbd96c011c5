"""NVLink multicast: whether it may be used, and memory with a multicast address, from torch's symmetric memory.

graphar makes no multicast object itself. torch's rendezvous makes one wherever it can. It is therefore called only
after the environment and every rank allow multicast. In torch 2.11 a rendezvous of one group can hang a later
rendezvous of a larger group that overlaps it (pytorch#196082). A process that uses the multimem algorithms in several
groups must therefore begin with the largest group.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._autograd import DeviceType

from graphar.errors import Reason, UnsupportedError
from graphar.ranks.rendezvous import StoreRendezvous

T = TypeVar("T")

OPT_IN = "GRAPHAR_MULTICAST"

# Variables that switch multicast off in torch, NCCL and NVSHMEM, with the values that leave it on. Any other value
# forbids multicast, even one that the library would not recognise.
FORBIDDING = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": ("", "0"),
    "NCCL_NVLS_ENABLE": ("", "1", "2"),  # 1: on; 2: NCCL decides
    "NVSHMEM_DISABLE_NVLS": ("", "0"),
}


def why_not(environment: Mapping[str, str]) -> Reason | None:
    """Returns why ``environment`` or torch.use_deterministic_algorithms forbids multicast."""
    if environment.get(OPT_IN) != "1":
        return f"NVLink multicast needs the opt-in {OPT_IN}=1"
    for name, harmless in FORBIDDING.items():
        value = environment.get(name, "")
        if value not in harmless:
            return f"{name}={value} forbids NVLink multicast"
    if torch.are_deterministic_algorithms_enabled():
        return "torch.use_deterministic_algorithms forbids NVLink multicast, which adds in no defined order"
    return None


class TorchBuffer:
    """One allocation on each rank, mapped into this process; the interface of VirtualBuffer."""

    resident = True

    def __init__(self, tensor: torch.Tensor, handle) -> None:
        self.pointers, self.nbytes = list(handle.buffer_ptrs), tensor.nbytes
        self.multicast_pointer = handle.multicast_ptr  # the multicast address of all ranks' allocations
        self._tensor, self._handle = tensor, handle

    def unmap(self) -> None:
        self._handle = None

    def free(self) -> None:
        self._tensor = None


class TorchMemory:
    """Allocates torch's symmetric memory between the processes of a group; None: one process has all ranks."""

    def __init__(self, group: dist.ProcessGroup | None, device: int, rendezvous: StoreRendezvous) -> None:
        self._group_name = group.group_name if group else None  # not the group, which would keep its store alive
        self._device, self._rendezvous = device, rendezvous
        self._is_known = group is None
        alone = "NVLink multicast joins one process a rank, and this process holds all ranks"
        self._why_not: Reason | None = None if group else alone

    def why_not(self) -> Reason | None:
        """Returns why there is no multicast address, the same on every rank. The first call is collective."""
        if not self._is_known:
            try:
                self._rendezvous.agree_on_none("the multicast opt-in", why_not(os.environ))
                supported = _symmetric_memory()._SymmetricMemory.has_multicast_support(DeviceType.CUDA, self._device)
                reason = None if supported else f"torch finds no NVLink multicast on cuda:{self._device}"
                self._rendezvous.agree_on_none("multicast support", reason)
            except UnsupportedError as error:
                self._why_not = str(error)
            self._is_known = True
        return self._why_not

    def allocate(self, nbytes: int) -> TorchBuffer:
        """Allocates ``nbytes`` bytes on every rank, uninitialised; UnsupportedError without multicast. Collective.

        What torch raises on a rank may be known to others only after torch's own time-out.
        """
        if reason := self.why_not():
            raise UnsupportedError(reason)
        symmetric_memory = _symmetric_memory()
        # Not symmetric_memory.empty: it may place a tensor inside a larger allocation, and torch versions differ in
        # whether multicast_ptr then belongs to the allocation or to the tensor.
        empty = symmetric_memory._SymmetricMemory.empty_strided_p2p
        device = torch.device("cuda", self._device)
        tensor = self._agree("allocating", lambda: empty((nbytes,), (1,), torch.uint8, device))
        handle = self._agree("mapping", lambda: symmetric_memory.rendezvous(tensor, self._group_name))
        has_multicast = handle.multicast_ptr and handle.offset == 0
        problem = None if has_multicast else "torch's symmetric memory made no multicast object"
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


def _symmetric_memory() -> Any:
    return importlib.import_module("torch.distributed._symmetric_memory")

"""Memory that cannot be given back while its addresses stay: by cuMemAlloc, and shared by legacy CUDA IPC.

It serves where the driver or a sandbox forbids what graphar.runtime.memory.virtual_memory does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping

from graphar.errors import DriverError, GrapharError, Reason
from graphar.ranks.rendezvous import Alone, RanksAbsent, StoreRendezvous
from graphar.runtime.driver import call, driver, on_device


class SharedBuffer:
    """One allocation on each rank, mapped into this process; the interface of virtual_buffer.VirtualBuffer."""

    multicast_pointer = 0
    resident = True

    def __init__(self, pointers: list[int], nbytes: int, owned: list[int], opened: list[int]) -> None:
        self.pointers, self.nbytes = pointers, nbytes
        self._owned, self._opened = owned, opened

    def unmap(self) -> None:
        """Unmaps the peers' allocations; this process must no longer use them."""
        for pointer in self._opened:
            call(driver.cuIpcCloseMemHandle, pointer)
        self._opened = []

    def free(self) -> None:
        """Frees this process's allocations; every peer must have unmapped them."""
        for pointer in self._owned:
            call(driver.cuMemFree, pointer)
        self._owned = []


def allocate(devices: Mapping[int, int], meet: StoreRendezvous | Alone, nbytes: int, why_stays: Reason) -> SharedBuffer:
    """Allocates ``nbytes`` bytes for every rank; if one allocation fails, for none. Collective.

    ``devices`` are those of this process's ranks, by rank.
    """
    owned: list[int] = []
    opened: list[int] = []
    buffer = SharedBuffer(owned, nbytes, owned, opened)
    with on_device(next(iter(devices.values()))):
        try:
            handle = meet.agree("allocating", lambda: _allocate(devices.values(), nbytes, owned, meet))
        except GrapharError:
            buffer.free()  # no peer has its handle
            raise
        if isinstance(meet, Alone):
            return buffer
        handles = meet.exchange("sharing memory", handle)
        try:
            buffer.pointers = meet.agree(
                "mapping peers' memory", lambda: _open(handles, meet.rank, owned[0], opened, why_stays)
            )
        except RanksAbsent:
            raise  # keep the allocation: an absent rank may still map it
        except GrapharError:
            buffer.unmap()
            meet.exchange("unmapping peers' memory", b"")
            buffer.free()
            raise
    return buffer


def _allocate(devices: Iterable[int], nbytes: int, owned: list[int], meet: StoreRendezvous | Alone) -> bytes:
    """Allocates memory, adds its addresses to ``owned``, and returns its CUDA IPC handle, if there are peers."""
    for device in devices:
        with on_device(device):
            owned.append(int(call(driver.cuMemAlloc, nbytes)))
    if isinstance(meet, Alone):
        return b""
    handle = call(driver.cuIpcGetMemHandle, owned[0])
    # Read by address: the attribute with the bytes has different names in different releases of cuda-bindings.
    return ctypes.string_at(handle.getPtr(), driver.CU_IPC_HANDLE_SIZE)


def _open(handles: list[bytes], own_rank: int, own_pointer: int, opened: list[int], why_stays: Reason) -> list[int]:
    """Maps the peers' memory and returns every rank's address; adds the mapped addresses to ``opened``."""
    pointers = []
    for rank, raw in enumerate(handles):
        if rank == own_rank:
            pointers.append(own_pointer)
            continue
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), raw, driver.CU_IPC_HANDLE_SIZE)
        flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        try:
            opened.append(int(call(driver.cuIpcOpenMemHandle, handle, flags)))
        except DriverError as error:
            raise DriverError(
                f"{error}, for the memory of rank {rank}; CUDA IPC needs one container for all ranks, or --ipc=host "
                f"and --pid=host. File descriptors were not passed: {why_stays}"
            ) from error
        pointers.append(opened[-1])
    return pointers

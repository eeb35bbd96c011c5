"""Memory that every rank can write to: ProcessMemory for one process per rank, LocalMemory for one process.

ProcessMemory exchanges CUDA IPC handles through the group's store. It does not use torch's symmetric memory, whose
rendezvous counts per process and not per group, and hangs if two groups overlap (pytorch#196082). The multimem
algorithms need a multicast address, and take their memory from graphar.runtime.multicast_memory.
"""

from __future__ import annotations

import ctypes
import json

from graphar.errors import DriverError, GrapharError, UnsupportedError
from graphar.ranks.processes import host
from graphar.ranks.rendezvous import RanksAbsent, StoreRendezvous
from graphar.runtime.availability import may_share_gpu, no_peer_access
from graphar.runtime.driver import call, check, driver, on_device, primary_context


class SharedBuffer:
    """One allocation on each rank, mapped into this process."""

    multicast_pointer = 0  # only a TorchBuffer has one

    def __init__(self, pointers: list[int], nbytes: int, owned: list[int], opened: list[int]) -> None:
        self.pointers = pointers  # the addresses of the allocations in this process, in rank order
        self.nbytes = nbytes  # the size of each allocation
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


class ProcessMemory:
    """Allocates memory shared between the processes of one host, one process per rank, each with one CUDA device."""

    def __init__(self, device: int, rendezvous: StoreRendezvous) -> None:
        self._device, self._rendezvous = device, rendezvous

    def check(self) -> None:
        """Checks that all ranks can share memory. Collective.

        Raises:
            UnsupportedError: on every rank, if the ranks are on several hosts or a pair has no peer access.
            ValueError: on every rank, if two ranks use one GPU, unless all ranks may share GPUs (for tests).
        """
        mine = {"host": host(), "gpu": _gpu(self._device), "may_share": may_share_gpu()}
        everyone = [json.loads(word) for word in self._rendezvous.exchange("set-up", json.dumps(mine).encode())]
        hosts = {one["host"] for one in everyone}
        if len(hosts) > 1:
            raise UnsupportedError(f"the ranks are on {len(hosts)} hosts")
        gpus = [one["gpu"] for one in everyone]
        if not all(one["may_share"] for one in everyone):
            _check_distinct(gpus)
        self._rendezvous.agree_on_none("peer access", _unreachable(self._device, gpus))

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Allocates ``nbytes`` bytes on every rank, uninitialised; if one rank fails, on none. Collective."""
        meet, owned, opened = self._rendezvous, [], []
        buffer = SharedBuffer([], nbytes, owned, opened)
        with on_device(self._device):
            try:
                handle = meet.agree("allocating", lambda: _allocate_shareable(nbytes, owned))
            except GrapharError:
                buffer.free()  # no peer has its handle
                raise
            handles = meet.exchange("sharing memory", handle)
            try:
                buffer.pointers = meet.agree("mapping peers' memory", lambda: self._open(handles, owned[0], opened))
            except RanksAbsent:
                raise  # keep the allocation: an absent rank may still map it
            except GrapharError:
                buffer.unmap()
                meet.exchange("unmapping peers' memory", b"")
                buffer.free()
                raise
        return buffer

    def _open(self, handles: list[bytes], own: int, opened: list[int]) -> list[int]:
        """Maps the peers' memory and returns every rank's address; adds the mapped ones to ``opened``."""
        pointers = []
        for rank, raw in enumerate(handles):
            if rank == self._rendezvous.rank:
                pointers.append(own)
                continue
            handle = driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), raw, driver.CU_IPC_HANDLE_SIZE)
            flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            try:
                opened.append(int(call(driver.cuIpcOpenMemHandle, handle, flags)))
            except DriverError as error:
                raise DriverError(
                    f"{error}, for the memory of rank {rank}; ranks in containers must share one, or be run with "
                    "--ipc=host and --pid=host: see `python -m graphar doctor`"
                ) from error
            pointers.append(opened[-1])
        return pointers


class LocalMemory:
    """Allocates memory for the ranks of one process, one rank a CUDA device. In tests, several ranks may share one."""

    def __init__(self, devices: list[int]) -> None:
        self._devices = devices

    def check(self) -> None:
        """Enables peer access between all pairs of devices. UnsupportedError names the first pair without."""
        for device in dict.fromkeys(self._devices):
            for peer in dict.fromkeys(self._devices):
                if peer != device:
                    _enable_peer_access(device, peer)

    def allocate(self, nbytes: int) -> SharedBuffer:
        """Allocates ``nbytes`` bytes for every rank, uninitialised; if one allocation fails, for none."""
        pointers = []
        buffer = SharedBuffer(pointers, nbytes, pointers, [])
        for device in self._devices:
            with on_device(device):
                try:
                    pointers.append(int(call(driver.cuMemAlloc, nbytes)))
                except DriverError:
                    buffer.free()
                    raise
        return buffer


def _allocate_shareable(nbytes: int, owned: list[int]) -> bytes:
    """Allocates memory, adds its address to ``owned``, and returns its CUDA IPC handle."""
    owned.append(int(call(driver.cuMemAlloc, nbytes)))
    handle = call(driver.cuIpcGetMemHandle, owned[0])
    # Read by address: the attribute with the bytes has different names in different releases of cuda-bindings.
    return ctypes.string_at(handle.getPtr(), driver.CU_IPC_HANDLE_SIZE)


def _gpu(index: int) -> str:
    return bytes(call(driver.cuDeviceGetUuid, call(driver.cuDeviceGet, index)).bytes).hex()


def _check_distinct(gpus: list[str]) -> None:
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise ValueError(
                f"ranks {gpus.index(gpu)} and {rank} both use GPU {gpu}; call torch.cuda.set_device(local_rank)"
            )


def _unreachable(device: int, gpus: list[str]) -> str:
    """Returns why ``device`` cannot reach one of ``gpus``, or an empty string."""
    visible = {_gpu(index): index for index in range(call(driver.cuDeviceGetCount))}
    for rank, gpu in enumerate(gpus):
        if gpu not in visible:
            return f"the GPU of rank {rank} is not visible here; let CUDA_VISIBLE_DEVICES name every rank's GPU"
        peer = visible[gpu]
        if peer != device and not call(driver.cuDeviceCanAccessPeer, device, peer):
            return no_peer_access(device, peer)
    return ""


def _enable_peer_access(device: int, peer: int) -> None:
    if not call(driver.cuDeviceCanAccessPeer, device, peer):
        raise UnsupportedError(no_peer_access(device, peer))
    with on_device(device):
        (status,) = driver.cuCtxEnablePeerAccess(primary_context(peer), 0)
    if status != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        check("cuCtxEnablePeerAccess", status)

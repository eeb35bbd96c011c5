"""Memory that every rank can write to: ProcessMemory for one process per rank, LocalMemory for one process.

Both allocate VirtualBuffers, whose memory can be given back while their addresses stay. Processes pass memory to each
other as file descriptors. Where that is not possible, both allocate SharedBuffers.

ProcessMemory does not use torch's symmetric memory, whose rendezvous counts per process and not per group, and hangs if
two groups overlap (pytorch#196082). The multimem algorithms need a multicast address, and take their memory from
graphar.runtime.memory.multicast.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from graphar.errors import CommunicatorError, DriverError, GrapharError, Reason, UnsupportedError
from graphar.ranks.descriptors import Channel, close_all
from graphar.ranks.hosts import host, several_hosts
from graphar.ranks.rendezvous import Alone, RanksAbsent, StoreRendezvous, exchange_json
from graphar.runtime.availability import may_share_gpu, no_peer_access
from graphar.runtime.driver import call, check, driver, on_device, primary_context
from graphar.runtime.memory import virtual_memory
from graphar.runtime.memory.virtual_memory import VirtualBuffer


class SharedBuffer:
    """The interface of VirtualBuffer by cuMemAlloc and legacy CUDA IPC, where the driver or a sandbox forbids those.

    Its memory cannot be given back while its addresses stay.
    """

    multicast_pointer = 0
    resident = True

    def __init__(self, nbytes: int, pointers: Sequence[int] = ()) -> None:
        self.nbytes, self.pointers = nbytes, list(pointers)
        self._owned: list[int] = []
        self._opened: list[int] = []

    def create(self, devices: Iterable[int], is_shared: bool) -> bytes:
        """Allocates memory for the ranks of this process, on their devices; returns its CUDA IPC handle, if shared."""
        for device in devices:
            with on_device(device):
                self._owned.append(int(call(driver.cuMemAlloc, self.nbytes)))
        if not is_shared:
            return b""
        handle = call(driver.cuIpcGetMemHandle, self._owned[0])
        # Read by address: the attribute with the bytes has different names in different releases of cuda-bindings.
        return ctypes.string_at(handle.getPtr(), driver.CU_IPC_HANDLE_SIZE)

    def open(self, handles: Sequence[bytes], process: int, why_stays: Reason) -> None:
        """Maps the peers' memory; ``handles`` are of all processes; this one has number ``process``."""
        for rank, raw in enumerate(handles):
            if rank == process:
                self.pointers += self._owned
                continue
            handle = driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), raw, driver.CU_IPC_HANDLE_SIZE)
            flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            try:
                self._opened.append(int(call(driver.cuIpcOpenMemHandle, handle, flags)))
            except DriverError as error:
                raise DriverError(
                    f"{error}, for the memory of rank {rank}; CUDA IPC needs one container for all ranks, or "
                    f"--ipc=host and --pid=host. File descriptors were not passed: {why_stays}"
                ) from error
            self.pointers.append(self._opened[-1])

    def unmap(self) -> None:
        for pointer in self._opened:
            call(driver.cuIpcCloseMemHandle, pointer)
        self._opened = []

    def free(self) -> None:
        for pointer in self._owned:
            call(driver.cuMemFree, pointer)
        self._owned = []


Buffer: TypeAlias = VirtualBuffer | SharedBuffer


class PeerMemory:
    """Allocates memory that every rank can write to; ``devices`` has this process's, by rank."""

    why_stays: Reason | None = None  # why its memory cannot be given back while its addresses stay
    _channel: Channel | None = None  # to the processes of the other ranks

    def __init__(self, devices: Mapping[int, int], rendezvous: StoreRendezvous, world_size: int) -> None:
        self._devices, self._rendezvous, self._world_size = devices, rendezvous, world_size
        self._device = next(iter(devices.values()))
        self._exchanges = 0

    def allocate(self, nbytes: int) -> Buffer:
        """Allocates ``nbytes`` bytes on every rank, uninitialised; if one rank fails, on none. Collective."""
        if self.why_stays:
            return self._allocate_shared(nbytes, self.why_stays)
        buffer = VirtualBuffer(nbytes, self._devices, self._world_size)
        try:
            self.fill([buffer])
        except GrapharError:
            buffer.free()
            raise
        return buffer

    def _allocate_shared(self, nbytes: int, why_stays: Reason) -> SharedBuffer:
        meet, buffer = self._rendezvous, SharedBuffer(nbytes)
        with on_device(self._device):
            try:
                handle = meet.agree("allocating", lambda: buffer.create(self._devices.values(), meet.world_size > 1))
            except GrapharError:
                buffer.free()  # no peer has its handle
                raise
            handles = meet.exchange("sharing memory", handle)
            try:
                meet.agree("mapping peers' memory", lambda: buffer.open(handles, meet.rank, why_stays))
            except RanksAbsent:
                raise  # keep the allocation: an absent rank may still map it
            except GrapharError:
                buffer.unmap()
                meet.exchange("unmapping peers' memory", b"")
                buffer.free()
                raise
        return buffer

    def fill(self, buffers: Sequence[VirtualBuffer]) -> None:
        """Maps new memory of all ranks at the addresses of buffers; if one rank fails, nowhere. Collective."""
        meet = self._rendezvous
        self._exchanges += 1
        with contextlib.ExitStack() as ends:
            handles = meet.agree("allocating", lambda: self._create(buffers, ends))
            try:
                meet.agree("mapping peers' memory", lambda: self._map(buffers, handles))
            except GrapharError:
                for buffer in buffers:
                    buffer.clear()
                raise

    def _create(self, buffers: Sequence[VirtualBuffer], ends: contextlib.ExitStack) -> list[dict[int, object]]:
        """Returns handles of new memory for buffers, by rank, and sends them to the peers; ``ends`` releases them."""
        descriptors: list[int] = []
        with _told(), on_device(self._device), contextlib.ExitStack() as sent:
            sent.callback(close_all, descriptors)
            handles = [buffer.create(ends) for buffer in buffers]
            if self._channel:
                for memories in handles:
                    descriptors += map(virtual_memory.export, memories.values())
                self._channel.send(self._exchanges, descriptors)
        return handles

    def _map(self, buffers: Sequence[VirtualBuffer], handles: Sequence[dict[int, object]]) -> None:
        """Maps the memory of this process's ranks, and the memory that the peers have sent."""
        with _told(), on_device(self._device), contextlib.ExitStack() as ends:
            received = self._channel.receive(self._exchanges, len(buffers)) if self._channel else {}
            for descriptors in received.values():
                ends.callback(close_all, descriptors)
            for at, (buffer, memories) in enumerate(zip(buffers, handles, strict=True)):
                for rank, descriptors in received.items():
                    memories[rank] = virtual_memory.adopt(descriptors[at])
                    ends.callback(call, driver.cuMemRelease, memories[rank])
                buffer.map(memories)

    def close(self) -> None:
        """Closes the connections to the other ranks. Buffers stay as they are."""
        if self._channel:
            self._channel.close()
        self._channel = None


class ProcessMemory(PeerMemory):
    """Allocates memory shared between the processes of one host, one process per rank, each with one CUDA device."""

    def __init__(self, device: int, rendezvous: StoreRendezvous) -> None:
        super().__init__({rendezvous.rank: device}, rendezvous, rendezvous.world_size)

    def check(self) -> None:
        """Finds out how all ranks can share memory. UnsupportedError on every rank if they cannot. Collective."""
        with contextlib.ExitStack() as failing:
            failing.callback(self.close)
            mine = {"why_not": self._listen(), "host": host(), "gpu": _gpu(self._device), "may_share": may_share_gpu()}
            mine["address"] = self._channel.address if self._channel else ""
            everyone = exchange_json(self._rendezvous, "set-up", mine)
            if problem := several_hosts(facts["host"] for facts in everyone):
                raise UnsupportedError(problem)
            gpus = [facts["gpu"] for facts in everyone]
            if not all(facts["may_share"] for facts in everyone):
                _check_distinct(gpus)
            self.why_stays = _first_reason(everyone)
            if not self.why_stays and self._channel:
                try:
                    self._channel.connect([facts["address"] for facts in everyone])
                except OSError as error:
                    self.why_stays = str(error)
            facts = {"problem": _unreachable(self._device, gpus), "why_not": self.why_stays}
            everyone = exchange_json(self._rendezvous, "peer access", facts)
            if problem := _first_reason(everyone, "problem"):
                raise UnsupportedError(problem)
            self.why_stays = self.why_stays or _first_reason(everyone)
            if not self.why_stays:
                failing.pop_all()

    def _listen(self) -> Reason | None:
        """Opens this rank's socket, or returns why there is none."""
        if reason := virtual_memory.why_not(self._device):
            return reason
        try:
            self._channel = Channel(self._rendezvous.rank, self._rendezvous.world_size)
        except OSError as error:
            return str(error)
        return None


class LocalMemory(PeerMemory):
    """Allocates memory for the ranks of one process, one rank a CUDA device. In tests, several ranks may share one."""

    def __init__(self, devices: list[int]) -> None:
        super().__init__(dict(enumerate(devices)), Alone(), len(devices))

    def check(self) -> None:
        """Enables peer access between all pairs of devices, and finds out how to allocate."""
        distinct = list(dict.fromkeys(self._devices.values()))
        for device, peer in itertools.permutations(distinct, 2):
            _enable_peer_access(device, peer)
        self.why_stays = next(filter(None, map(virtual_memory.why_not, distinct)), None)


@contextlib.contextmanager
def _told():
    """Raises the operating system's errors as graphar's, which name what was done."""
    try:
        yield
    except OSError as error:
        raise CommunicatorError(f"sharing memory between processes: {error}") from error


def _first_reason(everyone: Sequence[dict], name: str = "why_not") -> Reason | None:
    """Returns the first rank's reason of this name, with the rank."""
    return next((f"rank {rank}: {facts[name]}" for rank, facts in enumerate(everyone) if facts[name]), None)


def _gpu(index: int) -> str:
    return bytes(call(driver.cuDeviceGetUuid, call(driver.cuDeviceGet, index)).bytes).hex()


def _check_distinct(gpus: list[str]) -> None:
    for rank, gpu in enumerate(gpus):
        if gpu in gpus[:rank]:
            raise ValueError(
                f"ranks {gpus.index(gpu)} and {rank} both use GPU {gpu}; call torch.cuda.set_device(local_rank)"
            )


def _unreachable(device: int, gpus: list[str]) -> Reason | None:
    visible = {_gpu(index): index for index in range(call(driver.cuDeviceGetCount))}
    for rank, gpu in enumerate(gpus):
        if gpu not in visible:
            return (
                f"the GPU of rank {rank} is not visible here; let CUDA_VISIBLE_DEVICES name every rank's GPU, and each "
                "container have all of them"
            )
        peer = visible[gpu]
        if peer != device and not call(driver.cuDeviceCanAccessPeer, device, peer):
            return no_peer_access(device, peer)
    return None


def _enable_peer_access(device: int, peer: int) -> None:
    if not call(driver.cuDeviceCanAccessPeer, device, peer):
        raise UnsupportedError(no_peer_access(device, peer))
    with on_device(device):
        (status,) = driver.cuCtxEnablePeerAccess(primary_context(peer), 0)
    if status != driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED:
        check("cuCtxEnablePeerAccess", status)

"""Addresses that outlive their memory: CUDA's virtual memory management, and allocations that other processes can map.

An address range is reserved once. Physical memory is mapped there, unmapped, and other memory is mapped there later:
kernels whose arguments hold the addresses, as in captured graphs, stay valid.

Allocations lie side by side in a few large ranges, in whole pages of the largest size, so that few entries of a GPU's
translation buffers serve all ranks' memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from graphar.errors import DriverError, Reason
from graphar.runtime.arguments import Counters
from graphar.runtime.driver import attribute, call, driver, on_device

PAGE_NBYTES = 2 << 20  # the largest page of a GPU's memory
RANGE_NBYTES = 4 << 30  # the addresses that are reserved at a time


@functools.cache
def why_not(device: int) -> Reason | None:
    """Returns why memory of ``device`` cannot be mapped at reserved addresses and shared."""
    for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        if not attribute(name, device):
            return f"the driver says so: {name} is 0 for cuda:{device}"
    try:  # some sandboxes say that it can, and then fail
        with on_device(device), contextlib.ExitStack() as ends:
            memory = create(device, granularity(device))
            ends.callback(call, driver.cuMemRelease, memory)
            descriptor = export(memory)
            ends.callback(os.close, descriptor)
            same = adopt(descriptor)
            ends.callback(call, driver.cuMemRelease, same)
            ends.enter_context(mapped(same, granularity(device), [device]))
    except DriverError as error:
        return f"a trial on cuda:{device} failed: {error}"
    return None


@dataclass
class Ranges:
    """Reserved address ranges. Allocations take parts of them. A range is given back with its last part."""

    taken: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # by range: the sizes of parts by begin
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, nbytes: int) -> int:
        """Returns the begin of addresses that nothing else uses, for ``nbytes`` in whole granules."""
        with self._lock:
            for (begin, end), parts in self.taken.items():
                address = _aligned(begin, nbytes)
                for part in sorted(parts):
                    if address + nbytes <= part:
                        break
                    address = _aligned(part + parts[part], nbytes)
                if address + nbytes <= end:
                    break
            else:
                size = -(-nbytes // RANGE_NBYTES) * RANGE_NBYTES
                address = int(call(driver.cuMemAddressReserve, size, _alignment(nbytes), 0, 0))
                parts = self.taken[address, address + size] = {}
            parts[address] = nbytes
            return address

    def give_back(self, address: int) -> None:
        """Gives addresses back, where nothing is mapped any more."""
        with self._lock:
            (begin, end), parts = next(taken for taken in self.taken.items() if address in taken[1])
            del parts[address]
            if not parts:
                del self.taken[begin, end]
                call(driver.cuMemAddressFree, begin, end - begin)


def _alignment(nbytes: int) -> int:
    """Returns the largest power of two that divides ``nbytes``, up to 512 MB: a multiple of its granularity."""
    return min(nbytes & -nbytes, 512 << 20)


def _aligned(address: int, nbytes: int) -> int:
    return -(-address // _alignment(nbytes)) * _alignment(nbytes)


ranges = Ranges()  # of this process


@functools.cache
def granularity(device: int) -> int:
    """Returns the unit in bytes of all allocations and mappings, which the driver recommends."""
    best = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
    return max(int(call(driver.cuMemGetAllocationGranularity, _properties(device), best)), PAGE_NBYTES)


def create(device: int, nbytes: int):
    """Returns a handle of new physical memory of ``device``. It exists while it is mapped, or not released."""
    return call(driver.cuMemCreate, nbytes, _properties(device), 0)


def export(memory) -> int:
    """Returns a file descriptor of physical memory, which the caller closes."""
    return int(call(driver.cuMemExportToShareableHandle, memory, _by_descriptor(), 0))


def adopt(descriptor: int):
    """Returns a handle of the physical memory of a file descriptor, which stays open."""
    return call(driver.cuMemImportFromShareableHandle, descriptor, _by_descriptor())


def place(address: int, nbytes: int, memory, devices: Sequence[int], times: int = 1) -> None:
    """Maps memory ``times`` times, one mapping behind the other, for these devices; if that fails, not at all."""
    end = address
    try:
        for _ in range(times):
            call(driver.cuMemMap, end, nbytes, 0, memory, 0)
            end += nbytes
        call(driver.cuMemSetAccess, address, end - address, [_access(device) for device in devices], len(devices))
    except DriverError:
        if end > address:
            call(driver.cuMemUnmap, address, end - address)
        raise


@contextlib.contextmanager
def mapped(memory, nbytes: int, devices: Sequence[int]) -> Iterator[int]:
    """Maps memory for these devices inside a ``with`` block, and yields its address."""
    with contextlib.ExitStack() as ends:
        address = ranges.take(nbytes)
        ends.callback(ranges.give_back, address)
        place(address, nbytes, memory, devices)
        ends.callback(call, driver.cuMemUnmap, address, nbytes)
        yield address


def _location(device: int):
    location = driver.CUmemLocation()
    location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, device
    return location


def _properties(device: int):
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = _location(device)
    properties.requestedHandleTypes = _by_descriptor()
    return properties


def _by_descriptor():
    return driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _access(device: int):
    access = driver.CUmemAccessDesc()
    access.location = _location(device)
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


class VirtualBuffer:
    """One allocation of ``nbytes`` on each rank, at addresses that are reserved when the first memory is created.

    ``device_of`` is the CUDA device of each rank of this process.
    """

    multicast_pointer = 0  # only a TorchBuffer has one

    def __init__(self, nbytes: int, device_of: Mapping[int, int], world_size: int) -> None:
        self.nbytes, self._own, self._world_size = nbytes, dict(device_of), world_size
        self._devices = list(dict.fromkeys(device_of.values()))  # kernels of these devices use the addresses
        self._reserved = 0  # bytes at each address
        self._mapped: dict[int, int] = {}  # the bytes that are mapped, by address
        self.resident = False  # whether there is memory
        self.pointers: list[int] = []  # the addresses in this process, in rank order

    def create(self, ends: contextlib.ExitStack) -> dict[int, object]:
        """Returns handles of new memory for the ranks of this process, by rank; ``ends`` releases them."""
        if not self.pointers:
            self._reserved = -(-self.nbytes // granularity(self._devices[0])) * granularity(self._devices[0])
            for _ in range(self._world_size):
                self.pointers.append(ranges.take(self._reserved))
        made: dict[int, object] = {}
        for rank, device in self._own.items():
            made[rank] = create(device, self._reserved)
            ends.callback(call, driver.cuMemRelease, made[rank])
        return made

    def map(self, memories: Mapping[int, object]) -> None:
        """Maps every rank's memory, given by handles that the caller releases, in place of what was mapped there."""
        self.clear()
        for rank, pointer in enumerate(self.pointers):
            place(pointer, self._reserved, memories[rank], self._devices)
            self._mapped[pointer] = self._reserved
        self.resident = True

    def map_guard(self, guard: Guard, copied: bool = False) -> None:
        """Gives the memory back, and maps a guard over all allocations of this process and over the peers' counters.

        Copy engines do not read counters. If they write there (``copied``), a sink lies behind all counters.
        """
        self.clear()
        pages = self._reserved // guard.nbytes
        for rank, pointer in enumerate(self.pointers):
            times = pages if rank in self._own and not copied else 1
            place(pointer, guard.nbytes, guard.memory, self._devices, times)
            self._mapped[pointer] = times * guard.nbytes
            if copied and pages > 1:
                place(pointer + guard.nbytes, guard.nbytes, guard.sink(), self._devices, pages - 1)
                self._mapped[pointer] = self._reserved

    def clear(self) -> None:
        """Gives the memory back. The addresses stay reserved: an access there is an error of the CUDA context."""
        self.resident = False
        for pointer in list(self._mapped):
            call(driver.cuMemUnmap, pointer, self._mapped[pointer])
            del self._mapped[pointer]

    def unmap(self) -> None:
        """Does nothing: memory is freed with its last mapping, so ranks need not unmap their peers' memory before."""

    def free(self) -> None:
        """Gives all memory and the addresses back. Peers that have this process's memory mapped keep it."""
        self.clear()
        for pointer in self.pointers if self._reserved else ():
            ranges.give_back(pointer)
        self._reserved = 0


class Guard:
    """What kernels of replayed graphs find in place of scratch while their communicator is suspended.

    All allocations of scratch begin with counters. The guard's tell every block that its call is aborted, so it
    sends and awaits nothing, and that another call runs, which it reports in the record of its rank
    (``end_aborted_call`` in cuda_src/device/sync/call.cuh). Blocks of a tile may still read, from their own rank's
    scratch, what its peers did not send. ``device`` has the memory; ``devices`` use it.
    """

    def __init__(self, device: int, devices: Sequence[int]) -> None:
        self._device, self._sink = device, None
        self.nbytes = granularity(device)
        self.memory = create(device, self.nbytes)
        try:
            with mapped(self.memory, self.nbytes, devices) as address:
                counters = Counters()
                for state in counters.epoch_state:
                    state.aborted = 1
                counters.busy[:] = [1] * len(counters.busy)
                call(driver.cuMemcpyHtoD, address, ctypes.addressof(counters), ctypes.sizeof(counters))
                call(driver.cuCtxSynchronize)  # a copy from pageable memory may still be under way
        except BaseException:
            self.free()
            raise

    def sink(self):
        """Returns memory of the guard's size in which copies of replayed graphs end."""
        if self._sink is None:
            self._sink = create(self._device, self.nbytes)
        return self._sink

    def free(self) -> None:
        """Gives the handles back. The memory is freed once no allocation maps it any more."""
        for memory in (self.memory, self._sink):
            if memory is not None:
                call(driver.cuMemRelease, memory)

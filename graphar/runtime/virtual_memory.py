"""Addresses that outlive their memory: CUDA's virtual memory management, and allocations that other processes can map.

An address range is reserved once. Physical memory is mapped there, unmapped, and other memory is mapped there later:
kernels whose arguments hold the addresses, such as those of captured graphs, stay valid.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence

from graphar.errors import DriverError
from graphar.runtime.driver import attribute, call, driver, on_device

IPC_SWITCH = "GRAPHAR_CUDA_IPC"


@functools.cache
def why_not(device: int) -> str:
    """Returns why memory of ``device`` cannot be mapped at reserved addresses and shared, or an empty string.

    Some sandboxes say that it can, and then fail. So this allocates a granule, exports and imports it, and maps it.
    """
    for name in ("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"):
        if not attribute(name, device):
            return f"the driver says so: {name} is 0 for cuda:{device}"
    try:
        with on_device(device):
            _try(device)
    except DriverError as error:
        return f"a trial on cuda:{device} failed: {error}"
    return ""


def why_not_wanted() -> str:
    """Returns that the environment has GRAPHAR_CUDA_IPC=1, which asks for cuMemAlloc's memory; else an empty string."""
    return f"{IPC_SWITCH}=1" if os.environ.get(IPC_SWITCH) == "1" else ""


def _try(device: int) -> None:
    nbytes = granularity(device)
    with contextlib.ExitStack() as ends:
        memory = create(device, nbytes)
        ends.callback(release, memory)
        descriptor = export(memory)
        ends.callback(os.close, descriptor)
        same = adopt(descriptor)
        ends.callback(release, same)
        address = reserve(nbytes)
        ends.callback(unreserve, address, nbytes)
        place(address, nbytes, same, [device])
        ends.callback(displace, address, nbytes)


# ---- the driver's calls ----------------------------------------------------------------------------------------------


@functools.cache
def granularity(device: int) -> int:
    """Returns the bytes of which every allocation and every mapping is a multiple."""
    least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(call(driver.cuMemGetAllocationGranularity, _properties(device), least))


def whole(nbytes: int, device: int) -> int:
    """Returns ``nbytes``, rounded up to the granularity."""
    return -(-nbytes // granularity(device)) * granularity(device)


def create(device: int, nbytes: int):
    """Returns a handle of new physical memory of ``device``. It exists while it is mapped, or not released."""
    return call(driver.cuMemCreate, nbytes, _properties(device), 0)


def release(memory) -> None:
    """Gives a handle back."""
    call(driver.cuMemRelease, memory)


def export(memory) -> int:
    """Returns a file descriptor of physical memory, which the caller closes."""
    return int(call(driver.cuMemExportToShareableHandle, memory, _by_descriptor(), 0))


def adopt(descriptor: int):
    """Returns a handle of the physical memory of a file descriptor, which stays open."""
    return call(driver.cuMemImportFromShareableHandle, descriptor, _by_descriptor())


def reserve(nbytes: int) -> int:
    """Returns the begin of an address range that nothing else uses."""
    return int(call(driver.cuMemAddressReserve, nbytes, 0, 0, 0))


def unreserve(address: int, nbytes: int) -> None:
    """Gives an address range back, where nothing is mapped any more."""
    call(driver.cuMemAddressFree, address, nbytes)


def place(address: int, nbytes: int, memory, devices: Sequence[int], times: int = 1) -> None:
    """Maps ``nbytes`` of memory at an address, for kernels of these devices to read and write.

    With ``times`` it is mapped so often, one mapping behind the other. Nothing stays if that fails.
    """
    mapped = 0
    try:
        for _ in range(times):
            call(driver.cuMemMap, address + mapped, nbytes, 0, memory, 0)
            mapped += nbytes
        call(driver.cuMemSetAccess, address, mapped, [_access(one) for one in devices], len(devices))
    except DriverError:
        if mapped:
            displace(address, mapped)
        raise


def displace(address: int, nbytes: int) -> None:
    """Unmaps all that :func:`place` has mapped in a range. Memory is freed with its last mapping in any process."""
    call(driver.cuMemUnmap, address, nbytes)


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

"""A CUDA driver on the CPU: memory that processes share by real file descriptors, and addresses that outlive it.

An allocation is a file in memory, a reserved address range one of this process that nothing may access, and a mapping
a shared mapping of the file. So an access to memory that was given back ends the process, as on a GPU.
"""

import contextlib
import ctypes
import functools
import mmap
import os
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import torch

from graphar.runtime import driver as drivers
from graphar.runtime.memory import virtual_memory

GRANULE_NBYTES = 2 << 20
OK, OUT_OF_MEMORY = 0, 2
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class OnGpu(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = property(lambda self: True)
    device = property(lambda self: torch.device("cuda", 0))


class FakeDriver:
    """The functions of cuda.bindings.driver that memory needs.

    Attributes:
        left_nbytes: the bytes that this process may still allocate.
        reserved: the sizes of the reserved address ranges, by address.
        mapped: the sizes of the mappings, by address.
        handles: the open handles, as descriptors of files in memory.
        succeeding: how many calls succeed before one fails, and all after it succeed again; None: all succeed. What
            only gives back never fails.
        granule_nbytes: what it recommends as granularity.
    """

    def __init__(self, left_nbytes: int = 1 << 40) -> None:
        self.left_nbytes = left_nbytes
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.handles: dict[int, int] = {}
        self.succeeding: int | None = None
        self.granule_nbytes = GRANULE_NBYTES
        self._next = 1
        for name in ("CUmemAllocationProp", "CUmemLocation", "CUmemAccessDesc"):
            setattr(self, name, SimpleNamespace)
        for name in _ENUMS:
            setattr(self, name, _Flags())
        for name, answer in _ANSWERS.items():
            setattr(self, name, lambda *given, answer=answer: answer)
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=OK)

    def fails(self, name: str) -> bool:
        """Whether the next call, of this name, is the one that fails."""
        if self.succeeding is None or name in _GIVING_BACK:
            return False
        self.succeeding -= 1
        return self.succeeding == -1

    def cuDeviceGet(self, index):
        return OK, index

    def cuDeviceGetUuid(self, device):
        return OK, SimpleNamespace(bytes=bytes([device] * 16))

    def cuDevicePrimaryCtxRetain(self, device):
        return OK, device

    def cuMemGetAllocationGranularity(self, properties, flags):
        return OK, self.granule_nbytes

    def cuMemCreate(self, nbytes, properties, flags):
        if nbytes > self.left_nbytes:
            return OUT_OF_MEMORY, 0
        self.left_nbytes -= nbytes
        file = os.memfd_create("gpu memory")
        os.ftruncate(file, nbytes)
        return OK, self._handle_of(file)

    def cuMemRelease(self, handle):
        os.close(self.handles.pop(handle))
        return (OK,)

    def cuMemExportToShareableHandle(self, handle, kind, flags):
        return OK, os.dup(self.handles[handle])

    def cuMemImportFromShareableHandle(self, descriptor, kind):
        return OK, self._handle_of(os.dup(descriptor))

    def cuMemAddressReserve(self, nbytes, alignment, address, flags):
        around = _forbidden(None, nbytes + alignment)
        found = -(-around // alignment) * alignment
        for begin, end in ((around, found), (found + nbytes, around + nbytes + alignment)):
            if begin < end:
                _libc.munmap(begin, end - begin)
        self.reserved[found] = nbytes
        return OK, found

    def cuMemAddressFree(self, address, nbytes):
        assert self.reserved.pop(address) == nbytes
        assert address not in self.mapped
        _libc.munmap(address, nbytes)
        return (OK,)

    def cuMemMap(self, address, nbytes, offset, handle, flags):
        assert address not in self.mapped
        kind = mmap.MAP_SHARED | _MAP_FIXED
        access = mmap.PROT_READ | mmap.PROT_WRITE
        assert _libc.mmap(address, nbytes, access, kind, self.handles[handle], 0) == address
        self.mapped[address] = nbytes
        return (OK,)

    def cuMemSetAccess(self, address, nbytes, accesses, count):
        assert sum(self._mapped_in(address, nbytes).values()) == nbytes
        assert len(accesses) == count
        return (OK,)

    def cuMemUnmap(self, address, nbytes):
        found = self._mapped_in(address, nbytes)
        assert sum(found.values()) == nbytes
        for one in found:
            del self.mapped[one]
        _forbidden(address, nbytes)
        return (OK,)

    def cuMemsetD8(self, address, value, nbytes):
        ctypes.memset(address, value, nbytes)
        return (OK,)

    def cuMemcpyHtoD(self, to, host, nbytes):
        ctypes.memmove(to, host, nbytes)
        return (OK,)

    def cuMemcpyDtoH(self, host, source, nbytes):
        ctypes.memmove(host, source, nbytes)
        return (OK,)

    def _mapped_in(self, address: int, nbytes: int) -> dict[int, int]:
        return {one: size for one, size in self.mapped.items() if address <= one < address + nbytes}

    def _handle_of(self, file: int) -> int:
        handle, self._next = self._next, self._next + 1
        self.handles[handle] = file
        return handle


_GIVING_BACK = (
    "cuCtxPopCurrent",
    "cuGetErrorName",
    "cuGetErrorString",
    "cuMemRelease",
    "cuMemAddressFree",
    "cuMemUnmap",
)
_ENUMS = (
    "CUmemAllocationGranularity_flags",
    "CUmemLocationType",
    "CUmemAllocationType",
    "CUmemAllocationHandleType",
    "CUmemAccess_flags",
    "CUdevice_attribute",
)
_ANSWERS = {
    "cuInit": (OK,),
    "cuGetErrorName": (OK, b"CUDA_ERROR_OUT_OF_MEMORY"),
    "cuGetErrorString": (OK, b"out of memory"),
    "cuDeviceGetCount": (OK, 8),
    "cuDeviceGetAttribute": (OK, 1),
    "cuDeviceCanAccessPeer": (OK, 1),
    "cuCtxPushCurrent": (OK,),
    "cuCtxPopCurrent": (OK, 0),
    "cuCtxSynchronize": (OK,),
}


class _Flags:
    """An enumeration whose values nothing here tells apart."""

    def __getattr__(self, name):
        return 1


def _forbidden(address: int | None, nbytes: int) -> int:
    """Maps addresses that nothing may access, new ones or those given; returns the first."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | (_MAP_FIXED if address else 0)
    return _libc.mmap(address, nbytes, 0, kind, -1, 0)


def _failing(fake: FakeDriver, name: str, function: Callable) -> Callable:
    if name.startswith("CU"):
        return function

    @functools.wraps(function)
    def call(*given):
        return (OUT_OF_MEMORY,) if fake.fails(name) else function(*given)

    return call


@contextlib.contextmanager
def installed(fake: FakeDriver):
    """Lets graphar use ``fake`` in place of the CUDA driver."""
    ranges, virtual_memory.ranges = virtual_memory.ranges, virtual_memory.Ranges()
    caches = (virtual_memory.why_not, virtual_memory.granularity)
    caches += (drivers.attribute, drivers.primary_context, drivers._initialise)
    real, drivers.driver.__dict__ = drivers.driver.__dict__, {}
    for name in dir(fake):
        if name.startswith(("cu", "CU")):
            found = getattr(fake, name)
            setattr(drivers.driver, name, _failing(fake, name, found) if callable(found) else found)
    for cache in caches:
        cache.cache_clear()
    try:
        yield fake
    finally:
        drivers.driver.__dict__, virtual_memory.ranges = real, ranges
        for cache in caches:
            cache.cache_clear()


def tensor_at(pointer: int, numel: int) -> torch.Tensor:
    """The bytes at an address."""
    return torch.frombuffer((ctypes.c_uint8 * numel).from_address(pointer), dtype=torch.uint8)


def descriptors() -> int:
    """How many file descriptors this process has open."""
    return len(os.listdir("/proc/self/fd"))


def open_files() -> Counter[str]:
    """What this process's file descriptors stand for."""
    links = [f"/proc/self/fd/{descriptor}" for descriptor in os.listdir("/proc/self/fd")]
    return Counter(os.readlink(link) for link in links if os.path.lexists(link))

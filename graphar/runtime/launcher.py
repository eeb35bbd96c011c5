"""Loads compiled kernels onto devices, and launches them with bound parameters."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from graphar.errors import UnsupportedError
from graphar.plan.policy import Chip
from graphar.ranks.capture import is_capturing
from graphar.runtime.availability import concurrent_communicators, missing_software
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import Cubin, compile_kernel
from graphar.runtime.driver import attribute, bind_context, call, check, driver, on_device

# Never unloaded: a captured graph may outlive the communicator that loaded its kernels.
_libraries: dict[bytes, object] = {}
_HERE = contextlib.nullcontext()


def here(device: int) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which a device is current. The caller has used the CUDA runtime in this thread."""
    return _HERE if torch._C._cuda_getDevice() == device else on_device(device)


@functools.cache
def architecture(device: int) -> str:
    """Returns the compiler's name of a device's architecture, with the suffix "a" from sm_90 on: "sm_90a"."""
    major = attribute("COMPUTE_CAPABILITY_MAJOR", device)
    return f"sm_{major}{attribute('COMPUTE_CAPABILITY_MINOR', device)}{'a' if major >= 9 else ''}"


def chip(device: int) -> Chip:
    return Chip(sm_count(device), architecture(device), concurrent_communicators())


@functools.cache
def sm_count(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def runs_on(device: int) -> bool:
    """Whether kernels without communication run on a device."""
    return torch.cuda.get_device_capability(device) >= (8, 0) and not missing_software()


@functools.cache
def can_overlap(device: int) -> bool:
    """Whether the device has programmatic dependent launch."""
    return attribute("COMPUTE_CAPABILITY_MAJOR", device) >= 9


@functools.cache
def load(source: KernelSource, device: int, shared_nbytes: int, what: str):
    """Compiles ``source`` for ``device``, loads it there, and returns the kernel's function; once in a process.

    Loading while a kernel waits for other ranks could hang, so every kernel is loaded before its first launch. A block
    may have ``shared_nbytes`` bytes of dynamic shared memory. ``what`` is the kernel's name in errors.
    """
    arch = architecture(device)
    if not source.runs_on(arch):
        needed = source.only_arch or f"sm_{source.minimum_arch} or newer"
        raise UnsupportedError(f"{what} needs {needed}, cuda:{device} is {arch}")
    if is_capturing(device):
        raise UnsupportedError(f"{what} is not loaded and cannot be during graph capture; make one such call before")
    return load_cubin(compile_kernel(source, arch), device, shared_nbytes)


def load_cubin(cubin: Cubin, device: int, shared_nbytes: int):
    with on_device(device):
        if cubin.image not in _libraries:
            _libraries[cubin.image] = call(driver.cuLibraryLoadData, cubin.image, [], [], 0, [], [], 0)
        kernel = call(driver.cuLibraryGetKernel, _libraries[cubin.image], cubin.symbol.encode())
        function = call(driver.cuKernelGetFunction, kernel)
        largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(driver.cuFuncSetAttribute, function, largest, shared_nbytes)
        return function


@dataclass(frozen=True)
class Grid:
    """The launch configuration of a kernel."""

    blocks: int  # a multiple of ``cluster``
    threads: int  # of a block
    shared_nbytes: int  # the dynamic shared memory of a block
    # Whether the kernel may start while the kernel before it ends (programmatic dependent launch). Such a kernel itself
    # waits for the kernel before it.
    overlaps: bool
    cluster: int = 1  # the blocks of a thread block cluster


def early_grid(device: int, blocks: int, threads: int, shared_nbytes: int = 0, cluster: int = 1) -> Grid:
    """Returns the grid of a kernel without communication. Two of its blocks fit on an SM."""
    overlaps = can_overlap(device) and chip(device).may_overlap(blocks, halves=True)
    return Grid(blocks, threads, shared_nbytes, overlaps, cluster)


class Launch:
    """A kernel bound to its parameters, which are read at each launch.

    cuLaunchKernelEx is called through ctypes with structs that are made once; cuda.bindings would copy the
    configuration at each launch. The driver aligns its copies of the parameters as the kernel declares them.
    """

    def __init__(self, function, parameters: Sequence[ctypes.Structure], grid: Grid) -> None:
        self._config = config = _configuration(grid)
        self._parameters = parameters  # a reference: `addresses` hold none
        addresses = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
        self.arguments = (_pointer(config.getPtr()), _pointer(int(function)), ctypes.byref(addresses), None)
        self.stream: int | None = None  # the handle of the stream of the next launch

    def on(self, stream: int) -> None:
        """Sets the stream of the launches that follow."""
        self._config.hStream = driver.CUstream(stream)
        self.stream = stream

    def enqueue(self, stream: int) -> None:
        """Launches the kernel on a stream; the stream's device must be current."""
        if stream != self.stream:
            self.on(stream)
        if status := launch_kernel()(*self.arguments):
            launch_again(status, self.arguments)


class OwnLaunches:
    """Launches on one GPU, for all threads, of kernels without communication that share their arguments."""

    def __init__(self, device: int, arguments: ctypes.Structure, launches: Sequence[Launch]) -> None:
        self._device, self._arguments, self.launches = device, arguments, launches
        self._lock = threading.Lock()

    def run(self, *chosen: Launch, **fields: torch.Tensor | int | None) -> None:
        """Queues all launches, or the chosen ones, on torch's current stream; ``fields`` are arguments, None is 0."""
        with self._lock, here(self._device):
            for name, value in fields.items():
                setattr(self._arguments, name, value.data_ptr() if isinstance(value, torch.Tensor) else value or 0)
            stream = torch._C._cuda_getCurrentRawStream(self._device)
            for launch in chosen or self.launches:
                launch.enqueue(stream)


def clusters_at_once(function, grid: Grid) -> int:
    """Returns how many clusters of a kernel run on an idle device at once. All blocks of a cluster lie in one GPC."""
    return call(driver.cuOccupancyMaxActiveClusters, function, _configuration(grid))


def _configuration(grid: Grid):
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid.blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = grid.threads, 1, 1
    config.sharedMemBytes = grid.shared_nbytes
    attributes, ids = [], driver.CUlaunchAttributeID
    if grid.cluster > 1:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = attributes[-1].value.clusterDim
        size.x, size.y, size.z = grid.cluster, 1, 1
    if grid.overlaps:
        attributes.append(driver.CUlaunchAttribute())
        attributes[-1].id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attributes[-1].value.programmaticStreamSerializationAllowed = 1
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _pointer(address: int):
    """Returns an address as ctypes passes it. ctypes would wrap a c_void_p again at each call, in 20 ns."""
    return ctypes.byref(ctypes.c_char.from_address(address))


def launch_again(status: int, arguments: tuple) -> None:
    """Repeats a launch that was refused with ``status`` if this thread had no context; else raises DriverError."""
    if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:
        bind_context(torch.cuda.current_device())
        status = launch_kernel()(*arguments)
    check("cuLaunchKernelEx", driver.CUresult(status))


@functools.cache
def launch_kernel():
    """Returns the driver's cuLaunchKernelEx: a function of :attr:`Launch.arguments` that returns a status."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function

"""cubin -> kernel -> launch."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

from cuda.bindings import driver

from graphar.runtime.arguments import Arguments
from graphar.runtime.compiler import Cubin
from graphar.runtime.driver import call, check, on_device

# Loaded for the life of the process: a captured graph may outlive whatever asked for the kernel.
_libraries: dict[bytes, object] = {}


def architecture(device: int) -> str:
    """The compiler's name for a device, with the instructions of exactly that chip from sm_90 on: "sm_90a"."""
    major = _attribute("COMPUTE_CAPABILITY_MAJOR", device)
    return f"sm_{major}{_attribute('COMPUTE_CAPABILITY_MINOR', device)}{'a' if major >= 9 else ''}"


def can_overlap(device: int) -> bool:
    """Whether the device knows programmatic dependent launch."""
    return _attribute("COMPUTE_CAPABILITY_MAJOR", device) >= 9


def has_clusters(device: int) -> bool:
    """Whether blocks of the device can be launched in clusters."""
    return can_overlap(device)


def can_prefetch(device: int) -> bool:
    """Whether the device brings memory into L2 by bulk prefetches."""
    return can_overlap(device)


def _attribute(name: str, device: int) -> int:
    return call(driver.cuDeviceGetAttribute, getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)


def load(cubin: Cubin, device: int, shared_nbytes: int):
    """The kernel of ``cubin``, in the memory of ``device`` now: a first load beside a spinning kernel could hang.

    Its blocks may take ``shared_nbytes`` bytes of dynamic shared memory: past 48 KB a kernel has to be told.
    """
    with on_device(device):
        if cubin.image not in _libraries:
            _libraries[cubin.image] = call(driver.cuLibraryLoadData, cubin.image, [], [], 0, [], [], 0)
        kernel = call(driver.cuLibraryGetKernel, _libraries[cubin.image], cubin.symbol.encode())
        function = call(driver.cuKernelGetFunction, kernel)
        largest = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call(driver.cuFuncSetAttribute, function, largest, shared_nbytes)
        return function


def make_launch(
    function, arguments: Arguments, blocks: int, threads: int, shared_nbytes: int, overlap: bool, cluster: int = 1
) -> Callable:
    """A function that launches a collective kernel: of the two tensors' addresses, and of a stream.

    Args:
        function: from :func:`load`.
        arguments: the kernel's struct; kept, and changed by every launch.

    The others are those of :func:`make_enqueue`.
    """
    enqueue = make_enqueue(function, [arguments], blocks, threads, shared_nbytes, overlap, cluster)

    def launch(input_pointer: int, output_pointer: int, stream: int) -> None:
        arguments.input, arguments.output = input_pointer, output_pointer
        enqueue(stream)

    return launch


def make_enqueue(
    function,
    parameters: Sequence[ctypes.Structure],
    blocks: int,
    threads: int,
    shared_nbytes: int,
    overlap: bool,
    cluster: int = 1,
) -> Callable[[int], None]:
    """A function that launches a kernel on a stream, whose device is current, with what its parameters hold then.

    Args:
        function: from :func:`load`.
        parameters: the kernel's, in order; kept. The driver aligns its copies as the kernel declares them.
        blocks: of the grid; a multiple of ``cluster``.
        threads: of a block.
        shared_nbytes: dynamic shared memory of a block.
        overlap: whether the kernel may be launched while the one before it ends (programmatic dependent launch); it
            waits for that one by itself.
        cluster: blocks that run at the same time and reach each other's shared memory.
    """
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_nbytes
    attributes = [_cluster(cluster)] if cluster > 1 else []
    attributes += [_early()] if overlap else []
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    addresses = (ctypes.c_void_p * len(parameters))(*map(ctypes.addressof, parameters))
    config_pointer, function_pointer = ctypes.c_void_p(config.getPtr()), ctypes.c_void_p(int(function))
    launch_kernel, last_stream = _launch_kernel(), None

    def enqueue(stream: int) -> None:
        nonlocal last_stream
        if stream != last_stream:
            config.hStream = driver.CUstream(stream)
            last_stream = stream
        status = launch_kernel(config_pointer, function_pointer, addresses, None)
        if status:
            check("cuLaunchKernelEx", driver.CUresult(status))

    enqueue.parameters = parameters  # kept: `addresses` are only numbers
    return enqueue


def _cluster(blocks: int) -> driver.CUlaunchAttribute:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = attribute.value.clusterDim
    size.x, size.y, size.z = blocks, 1, 1
    return attribute


def _early() -> driver.CUlaunchAttribute:
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute


@functools.cache
def _launch_kernel():
    """The driver's cuLaunchKernelEx, called with structs made once: cuda.bindings copies the config for every call."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function

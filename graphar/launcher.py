"""cubin -> kernel -> launch."""

from __future__ import annotations

import ctypes
import functools

from cuda.bindings import driver

from graphar.compiler import Cubin
from graphar.driver import call, on_device
from graphar.kernels import Arguments

# Loaded for the life of the process: a captured graph may outlive whatever asked for the kernel.
_libraries: dict[bytes, object] = {}


def architecture(device: int) -> str:
    """The compiler's name for a device, with the instructions of exactly that chip from sm_90 on: "sm_90a"."""
    major = _attribute("COMPUTE_CAPABILITY_MAJOR", device)
    return f"sm_{major}{_attribute('COMPUTE_CAPABILITY_MINOR', device)}{'a' if major >= 9 else ''}"


def can_overlap(device: int) -> bool:
    """Whether the device knows programmatic dependent launch."""
    return _attribute("COMPUTE_CAPABILITY_MAJOR", device) >= 9


def multiprocessor_count(device: int) -> int:
    return _attribute("MULTIPROCESSOR_COUNT", device)


def _attribute(name: str, device: int) -> int:
    return call(driver.cuDeviceGetAttribute, getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device)


def load(cubin: Cubin, device: int):
    """The kernel of ``cubin``, in the memory of ``device`` now: a first load beside a spinning kernel could hang."""
    with on_device(device):
        if cubin.image not in _libraries:
            _libraries[cubin.image] = call(driver.cuLibraryLoadData, cubin.image, [], [], 0, [], [], 0)
        kernel = call(driver.cuLibraryGetKernel, _libraries[cubin.image], cubin.symbol.encode())
        return call(driver.cuKernelGetFunction, kernel)


class Launch:
    """One kernel with its grid and its arguments, ready but for the two tensors.

    Args:
        function: from :func:`load`.
        arguments: the kernel's struct; kept and changed by every call.
        blocks: of the grid.
        threads: of a block.
        overlap: whether the kernel may be launched while the one before it ends (programmatic dependent launch).
    """

    __slots__ = ("_arguments", "_call", "_config", "_launch", "_stream")

    def __init__(self, function, arguments: Arguments, blocks: int, threads: int, overlap: bool) -> None:
        self._arguments = arguments
        self._config = driver.CUlaunchConfig()
        self._config.gridDimX, self._config.gridDimY, self._config.gridDimZ = blocks, 1, 1
        self._config.blockDimX, self._config.blockDimY, self._config.blockDimZ = threads, 1, 1
        self._config.sharedMemBytes = 0
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            self._config.attrs, self._config.numAttrs = [attribute], 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        self._call = (ctypes.c_void_p(self._config.getPtr()), ctypes.c_void_p(int(function)), parameters, None)
        self._launch = _launch_kernel()
        self._stream = None

    def __call__(self, input_pointer: int, output_pointer: int, stream: int) -> None:
        """Launches on ``stream``, whose device is current."""
        self._arguments.input, self._arguments.output = input_pointer, output_pointer
        if stream != self._stream:
            self._config.hStream = driver.CUstream(stream)
            self._stream = stream
        status = self._launch(*self._call)
        if status:
            call(lambda: (driver.CUresult(status),))


@functools.cache
def _launch_kernel():
    """The driver's cuLaunchKernelEx, called with structs made once: cuda.bindings copies the config for every call."""
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function

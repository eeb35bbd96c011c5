"""Small kernels written in tests. They may include headers of cuda_src."""

import contextlib
import ctypes
import functools
import time
from collections.abc import Sequence

import torch

from graphar.runtime.compiler import OPTIONS, Cubin, source_directory
from graphar.runtime.launcher import Grid, Launch, architecture, load_cubin


def bind(text: str, symbol: str, device: int, parameters: Sequence, grid: Grid) -> Launch:
    """Compiles ``text`` and binds its extern "C" kernel ``symbol`` to ctypes parameters."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=architecture(device), include_path=str(source_directory()), **OPTIONS)
    image = Program(text, "c++", options).compile("cubin").code
    return Launch(load_cubin(Cubin(bytes(image), symbol), device, grid.shared_nbytes), parameters, grid)


WRITE_LATE = """
#include "device/ptx/ptx.cuh"
extern "C" __global__ void __launch_bounds__(256) write_late(const Pack* from, Pack* to, u64 packs) {
  wait_for_previous_kernel();
  release_next_kernel();
  const u64 begin = global_time_ns();
  while (global_time_ns() - begin < 2000000) continue;
  for (u64 i = threadIdx.x; i < packs; i += blockDim.x) to[i] = from[i];
}
"""


@functools.cache
def late_writer():
    """The launch of the kernel above, and its parameters, which it reads when it is enqueued."""
    parameters = [ctypes.c_uint64() for _ in range(3)]
    return bind(WRITE_LATE, "write_late", 0, parameters, Grid(1, 256, 0, overlaps=False)), parameters


def write_late(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies on the current stream, long after the next kernel there could start."""
    launch, parameters = late_writer()
    for parameter, value in zip(parameters, (source.data_ptr(), target.data_ptr(), source.nbytes // 16), strict=True):
        parameter.value = value
    launch.enqueue(torch.cuda.current_stream().cuda_stream)


HOLD = """
#include "device/ptx/ptx.cuh"
extern "C" __global__ void __launch_bounds__(1024, 1) hold(volatile u32* stop, u32* started) {
  const u64 begin = global_time_ns();
  if (threadIdx.x == 0) started[blockIdx.x] = 1;
  while (*stop == 0 && global_time_ns() - begin < 20000000000ull) continue;
}
"""
WHOLE_SM_NBYTES = 200 << 10


@contextlib.contextmanager
def held(sms: int):
    """Another kernel holds so many SMs of the GPU."""
    words = torch.zeros(1 + sms, dtype=torch.int32).pin_memory()
    pointers = [ctypes.c_uint64(words.data_ptr()), ctypes.c_uint64(words.data_ptr() + 4)]
    stream = torch.cuda.Stream()
    holder = bind(HOLD, "hold", 0, pointers, Grid(sms, 1024, WHOLE_SM_NBYTES, overlaps=False))
    holder.enqueue(stream.cuda_stream)
    until = time.monotonic() + 10
    while not words[1:].all() and time.monotonic() < until:
        time.sleep(1e-3)
    assert words[1:].all()
    try:
        yield
    finally:
        words[0] = 1
        stream.synchronize()

"""A kernel's source to what a device launches: the one way from the catalogue to the launcher."""

from __future__ import annotations

from graphar.errors import UnsupportedError
from graphar.plan.checks import is_capturing
from graphar.runtime import launcher
from graphar.runtime.catalogue import KernelSource
from graphar.runtime.compiler import compile_kernel


def load(source: KernelSource, device: int, shared_nbytes: int, what: str):
    """The kernel of ``source``, compiled for ``device`` and loaded there by :func:`graphar.runtime.launcher.load`.

    Args:
        what: the kernel, as an error names it.

    Raises:
        CompileError: the source does not compile.
        UnsupportedError: the device lacks the kernel's instructions, or a graph is being captured there.
    """
    arch = launcher.architecture(device)
    if not source.runs_on(arch):
        needed = source.only_arch or f"sm_{source.minimum_arch} or newer"
        raise UnsupportedError(f"{what} needs {needed}, cuda:{device} is {arch}")
    if is_capturing(device):
        raise UnsupportedError(f"{what} is not loaded and cannot be during graph capture; make one such call before")
    return launcher.load(compile_kernel(source, arch), device, shared_nbytes)

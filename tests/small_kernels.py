"""Small kernels written in tests. They may include headers of cuda_src."""

from __future__ import annotations

from collections.abc import Sequence

from graphar.runtime.compiler import OPTIONS, Cubin, source_directory
from graphar.runtime.launcher import Grid, Launch, architecture, load_cubin


def bind(text: str, symbol: str, device: int, parameters: Sequence, grid: Grid) -> Launch:
    """Compiles ``text`` and binds its extern "C" kernel ``symbol`` to ctypes parameters."""
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=architecture(device), include_path=str(source_directory()), **OPTIONS)
    image = Program(text, "c++", options).compile("cubin").code
    return Launch(load_cubin(Cubin(bytes(image), symbol), device, grid.shared_nbytes), parameters, grid)

"""Source to cubin. The only file that knows NVRTC."""

from __future__ import annotations

import functools
import hashlib
import io
import re
from dataclasses import dataclass, field
from pathlib import Path

from graphar.errors import CompileError
from graphar.runtime import cache
from graphar.runtime.arguments import layout_check
from graphar.runtime.catalogue import KernelSource

OPTIONS = {"std": "c++17"}

# NVRTC puts an error in the name expression itself into a file of its own, __nv_name_map, which nobody can open.
_ERROR = re.compile(r"^(?!__nv_name_map)(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error", re.MULTILINE)


@dataclass(frozen=True)
class Cubin:
    """One compiled kernel.

    Attributes:
        image: an ELF file with the code for one architecture.
        symbol: the kernel's name in it, mangled.
        said: what the compiler had to say about it; nothing of one that was found on disk.
    """

    image: bytes
    symbol: str
    said: str = field(default="", compare=False)


def source_directory() -> Path:
    """Where the kernels' sources are: inside an installed package, beside the package in a checkout."""
    installed = Path(__file__).parents[1] / "cuda_src"
    return installed if installed.is_dir() else installed.parents[1] / "cuda_src"


def nvrtc_version() -> tuple[int, int]:
    """NVRTC's major and minor version."""
    from cuda.bindings import nvrtc

    _, major, minor = nvrtc.nvrtcVersion()
    return major, minor


@functools.cache
def compile_kernel(source: KernelSource, arch: str) -> Cubin:
    """Compiles one kernel, or finds it compiled: first in this process, then on disk.

    Args:
        source: the kernel, from the catalogue.
        arch: the architecture to compile for, as NVRTC spells it: "sm_90a".

    Raises:
        CompileError: the source does not compile, or NVRTC does not know the architecture.
    """
    key = cache_key(source, arch)
    entry = cache.load(key)
    if entry is not None:
        symbol, _, image = entry.partition(b"\n")
        return Cubin(image, symbol.decode())
    cubin = _compile(source, arch)
    # Otherwise a file was edited meanwhile, and nobody knows which state of it NVRTC has read.
    if cache_key(source, arch) == key:
        cache.store(key, cubin.symbol.encode() + b"\n" + cubin.image)
    return cubin


def cache_key(source: KernelSource, arch: str) -> str:
    """A hash, in hex, of all that a cubin depends on: compiler, options, kernel, every header in cuda_src/device."""
    device = source_directory() / "device"
    named = [repr(nvrtc_version()), arch, repr(OPTIONS), source.file, source.name, _text(source)]
    fields = [field.encode() for field in named]
    # An editor's lock file is a link to nowhere, hence is_file().
    for header in sorted(path for path in device.rglob("*.cuh") if path.is_file()):
        fields += [bytes(header.relative_to(device)), header.read_bytes()]
    digest = hashlib.sha256()
    for one in fields:
        digest.update(b"%d:" % len(one) + one)  # with the length, no two lists of fields hash the same bytes
    return digest.hexdigest()


def _text(source: KernelSource) -> str:
    """What NVRTC is given. What comes behind the file has lines of its own, so the file keeps its own."""
    text = (source_directory() / source.file).read_text(encoding="utf-8")
    generated = f'\n#line 1 "graphar.numerics.epilogues"\n{source.generated}' if source.generated else ""
    return f'{text}{generated}\n#line 1 "graphar.runtime.arguments.layout_check"\n{layout_check()}\n'


def _compile(source: KernelSource, arch: str) -> Cubin:
    from cuda.core import Program, ProgramOptions

    directory = source_directory()
    file = str(directory / source.file)
    options = ProgramOptions(name=file, arch=arch, include_path=str(directory), **OPTIONS)
    program, said = Program(_text(source), "c++", options), io.StringIO()
    try:
        compiled = program.compile("cubin", name_expressions=(source.name,), logs=said)
    except Exception as error:  # cuda.core keeps the class private; compile() raises nothing but what NVRTC said
        log = str(error).strip()
        raise CompileError(*_first_error(log, file), log) from None
    return Cubin(bytes(compiled.code), compiled.symbol_mapping[source.name].decode(), said.getvalue().strip())


def _first_error(log: str, file: str) -> tuple[str, int]:
    """File and line of the first error that has them; `file` and 0 where none has."""
    match = _ERROR.search(log)
    return (match["file"], int(match["line"])) if match else (file, 0)

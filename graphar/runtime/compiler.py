"""Compiles a kernel's source to a cubin with NVRTC, through the kernel cache. No other file uses NVRTC."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import logging
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from graphar.errors import CompileError
from graphar.plan.sources import digest_of, hashed
from graphar.runtime import cache
from graphar.runtime.arguments import layout_check
from graphar.runtime.catalogue import KernelSource

OPTIONS = {"std": "c++17"}

_log = logging.getLogger(__name__)
_importing = threading.Lock()

# NVRTC reports errors in a name expression under __nv_name_map, which is not a file.
_ERROR = re.compile(r"^(?!__nv_name_map)(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error", re.MULTILINE)


@dataclass(frozen=True)
class Cubin:
    image: bytes  # an ELF file with the code for one architecture
    symbol: str  # the kernel's mangled name in the image
    said: str = field(default="", compare=False)  # the compiler's log; an empty string for a cubin from the cache


def source_directory() -> Path:
    """Returns the folder cuda_src: inside an installed package, or beside the package in a checkout."""
    installed = Path(__file__).parents[1] / "cuda_src"
    return installed if installed.is_dir() else installed.parents[1] / "cuda_src"


def nvrtc_version() -> tuple[int, int]:
    return importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()[1:]


@functools.cache
def nvrtc_build() -> str:
    """Returns what NVRTC says of its build, as it begins all PTX: builds of one version make different code."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(b"", b"", 0, [], [])
    nvrtc.nvrtcCompileProgram(program, 0, [])
    ptx = bytes(nvrtc.nvrtcGetPTXSize(program)[1])
    nvrtc.nvrtcGetPTX(program, ptx)
    nvrtc.nvrtcDestroyProgram(program)
    return "\n".join(re.findall("^//.+", ptx.decode(), re.MULTILINE))


@functools.cache
def compile_kernel(source: KernelSource, arch: str) -> Cubin:
    """Returns the compiled kernel: from this process, from the cache on disk, or by compiling it.

    CompileError if the source does not compile, NVRTC does not know ``arch``, such as "sm_90a", or a file from outside
    cuda_src was edited since it was loaded.
    """
    key = cache_key(source, arch)
    entry = cache.load(key)
    if entry is not None:
        _log.debug("found %s of %s for %s in the kernel cache", source.name, source.file, arch)
        symbol, _, image = entry.partition(b"\n")
        return Cubin(image, symbol.decode())
    begin = time.perf_counter()
    cubin = _compile(source, arch)
    _log.debug("compiled %s of %s for %s in %.2f s", source.name, source.file, arch, time.perf_counter() - begin)
    # A changed key means that a source was edited meanwhile, and it is unknown which version NVRTC read.
    if cache_key(source, arch) == key:
        cache.store(key, cubin.symbol.encode() + b"\n" + cubin.image)
    return cubin


def compile_at_once(sources: Sequence[KernelSource], arch: str, threads: int) -> None:
    """Compiles kernels in several threads, for later calls of :func:`compile_kernel`, which also raise the errors."""

    def compile_one(source: KernelSource) -> None:
        with contextlib.suppress(CompileError):
            compile_kernel(source, arch)

    with ThreadPoolExecutor(threads, "graphar-nvrtc") as pool:  # NVRTC runs without the GIL
        list(pool.map(compile_one, sources))


def cache_key(source: KernelSource, arch: str) -> str:
    """Returns a SHA-256, in hex, of the compiler's build, the options, the kernel and all of cuda_src/device."""
    device = source_directory() / "device"
    _check_unedited(source)
    named = [nvrtc_build(), arch, repr(OPTIONS), source.file, source.name, _text(source), source.digest]
    fields = [field.encode() for field in named]
    # is_file(): an editor's lock file may be a broken link.
    for header in sorted(path for path in device.rglob("*.cuh") if path.is_file()):
        fields += [bytes(header.relative_to(device)), header.read_bytes()]
    return hashed(fields)


def _check_unedited(source: KernelSource) -> None:
    """Raises CompileError if a file from outside cuda_src is no longer what the algorithm's name stands for."""
    try:
        edited = bool(source.digest) and digest_of(Path(source.file)) != source.digest
    except OSError as error:
        raise CompileError(source.file, 0, f"it cannot be read: {error}") from None
    if edited:
        log = "this file, or one that it includes, was edited since it was loaded; load it again"
        raise CompileError(source.file, 0, log)


def _text(source: KernelSource) -> str:
    """Returns the text that NVRTC compiles: the file, generated code and the layout check, each with its own lines."""
    text = (source_directory() / source.file).read_text(encoding="utf-8")
    generated = f'\n#line 1 "graphar.numerics.epilogues"\n{source.generated}' if source.generated else ""
    return f'{text}{generated}\n#line 1 "graphar.runtime.arguments.layout_check"\n{layout_check()}\n'


def _compile(source: KernelSource, arch: str) -> Cubin:
    file = str(source_directory() / source.file)
    compiled = _ask_nvrtc(source, arch, file)
    if isinstance(compiled, str):
        named = _ERROR.search(compiled)  # the first error that names its place
        raise CompileError(named["file"] if named else file, int(named["line"]) if named else 0, compiled)
    return compiled


def _ask_nvrtc(source: KernelSource, arch: str, file: str) -> Cubin | str:
    """Returns the compiled kernel, or the log of a source that does not compile.

    It raises no CompileError: the traceback would keep the program, which cannot be collected in a cycle.
    """
    with _importing:  # it replaces itself while it is imported, and another thread would see it half done
        core = importlib.import_module("cuda.core")

    folders = [str(Path(file).parent)] if source.digest else []
    include_path = [*folders, str(source_directory())]
    options = core.ProgramOptions(name=file, arch=arch, include_path=include_path, **OPTIONS)
    program, log = core.Program(_text(source), "c++", options), io.StringIO()
    try:
        compiled = program.compile("cubin", name_expressions=(source.name,), logs=log)
    except Exception as error:  # the class is private in cuda.core; compile() raises only NVRTC's log
        return str(error).strip()
    return Cubin(bytes(compiled.code), compiled.symbol_mapping[source.name].decode(), log.getvalue().strip())

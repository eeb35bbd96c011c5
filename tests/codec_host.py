"""The kernels' codecs on the host: device code compiled with g++ on a twin of its intrinsics, and called."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from graphar.codecs import Codec
from graphar.compiler import source_directory
from graphar.kernels import TYPE_NAMES

TWIN = Path(__file__).parent / "codec_twin"
# Nothing may be contracted, as nothing is on the device; pragmas are NVRTC's.
FLAGS = ("-std=c++20", "-O1", "-mfma", "-ffp-contract=off", "-shared", "-fPIC", "-Wall", "-Wno-unknown-pragmas")


class _Call(ctypes.Structure):
    """Mirrors Call in codec_twin/run.cpp."""

    _fields_ = [
        ("numel", ctypes.c_uint64),
        ("inputs", ctypes.c_void_p),
        ("ranks", ctypes.c_uint64),
        ("wires", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("seed", ctypes.c_uint64),
        ("call", ctypes.c_uint64),
    ]


class HostCodecs:
    """Device code for some (codec, dtype), in a library under ``folder``."""

    def __init__(self, entries: Sequence[tuple[Codec, torch.dtype]], folder: Path) -> None:
        self.entries = list(entries)
        for path in [*(source_directory() / "device").glob("*.cuh"), *TWIN.iterdir()]:  # twins in place of originals
            shutil.copy(path, folder)
        lines = [f"ENTRY(({codec.type_name}), {TYPE_NAMES[dtype]})\n" for codec, dtype in self.entries]
        (folder / "entries.inc").write_text("".join(lines))
        library = folder / "codecs.so"
        command = ["g++", *FLAGS, str(folder / "run.cpp"), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        self._run = ctypes.CDLL(str(library)).run_codec

    def allreduce(self, codec: Codec, parts: Sequence[Tensor], seed: int, call: int) -> tuple[Tensor, list[Tensor]]:
        """The sum as every rank gets it, and the wires: of each rank's input, then of the sum."""
        numel, dtype = parts[0].numel(), parts[0].dtype
        wires = [torch.full((codec.wire_nbytes(numel),), 0xFF, dtype=torch.uint8) for _ in range(len(parts) + 1)]
        output = torch.empty(numel, dtype=dtype)
        inputs = (ctypes.c_void_p * len(parts))(*[part.data_ptr() for part in parts])
        places = (ctypes.c_void_p * len(wires))(*[wire.data_ptr() for wire in wires])
        addresses = [ctypes.cast(array, ctypes.c_void_p) for array in (inputs, places)]
        arguments = _Call(numel, addresses[0], len(parts), addresses[1], output.data_ptr(), seed, call)
        self._run(self.entries.index((codec, dtype)), ctypes.byref(arguments))
        return output, wires

"""The catalogue of kernels: their files, their template arguments, and the structs they are given."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

MAX_RANKS = 8
MAX_BLOCKS = 256

TYPE_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
WORLD_SIZES = range(2, MAX_RANKS + 1)


class Record(ctypes.Structure):
    """Mirrors Record in cuda_src/device/arguments.cuh."""

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in ("kind", "algorithm", "sequence", "rank", "peer", "block", "expected", "seen")
    ]


class Counters(ctypes.Structure):
    """Mirrors Counters in cuda_src/device/arguments.cuh."""

    _fields_ = [(name, ctypes.c_uint32 * MAX_BLOCKS) for name in ("epoch", "steps", "busy")]


class Arguments(ctypes.Structure):
    """Mirrors Arguments in cuda_src/device/arguments.cuh."""

    _fields_ = [
        ("input", ctypes.c_uint64),
        ("output", ctypes.c_uint64),
        ("numel", ctypes.c_uint64),
        ("timeout_ns", ctypes.c_uint64),
        ("capacity", ctypes.c_uint32),
        ("chunk", ctypes.c_uint32),
        ("scratch", ctypes.c_uint64 * MAX_RANKS),
        ("peer_input", ctypes.c_uint64 * MAX_RANKS),
        ("peer_output", ctypes.c_uint64 * MAX_RANKS),
        ("counters", ctypes.c_uint64),
        ("abort", ctypes.c_uint64),
        ("record", ctypes.c_uint64),
        ("rank", ctypes.c_uint32),
        ("algorithm", ctypes.c_uint32),
    ]


def layout_check() -> str:
    """C++ that fails to compile unless the structs above match the sources' byte for byte."""
    lines = []
    for struct in (Record, Counters, Arguments):
        name = struct.__name__
        lines += [f"static_assert(sizeof({name}) == {ctypes.sizeof(struct)});"]
        for field, _ in struct._fields_:
            mine = getattr(struct, field)
            lines += [
                f"static_assert(sizeof({name}::{field}) == {mine.size});",
                f"static_assert(__INTADDR__(&(({name}*)0)->{field}) == {mine.offset});",  # NVRTC 13.0 lacks offsetof
            ]
    return "\n".join(lines)


@dataclass(frozen=True)
class KernelSource:
    """One kernel as the compiler wants it.

    Attributes:
        file: its file in cuda_src.
        name: the C++ name expression, template arguments included.
    """

    file: str
    name: str


def kernel_source(algorithm: str, dtype: torch.dtype, world_size: int, direct: bool = False) -> KernelSource:
    """The kernel of an algorithm, which is also its file's name and its function's; or its direct variant."""
    arguments = [TYPE_NAMES[dtype], str(world_size), *(["direct"] if direct else [])]
    return KernelSource(f"{algorithm}.cu", f"{algorithm}<{', '.join(arguments)}>")


KERNELS = ("one_shot_push", "one_shot", "two_shot_push", "two_shot_pipelined")
# Those with a direct variant, and which symmetric operand that reads or writes where it lies on every rank.
DIRECT_OPERANDS = {"one_shot": "input", "two_shot_pipelined": "output"}


def catalogue() -> Iterator[KernelSource]:
    """Every kernel graphar can launch."""
    for algorithm in KERNELS:
        for dtype in TYPE_NAMES:
            for world_size in WORLD_SIZES:
                yield kernel_source(algorithm, dtype, world_size)
                if algorithm in DIRECT_OPERANDS:
                    yield kernel_source(algorithm, dtype, world_size, direct=True)

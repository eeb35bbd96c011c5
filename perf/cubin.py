"""Reads a kernel's resources and instructions from its cubin.

A cubin is an ELF file. Its .nv.info section lists attributes, and its .text sections hold instructions of 16 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

FRAME_SIZE, REGISTER_COUNT = 0x11, 0x2F  # EIATTR_FRAME_SIZE, EIATTR_REGCOUNT
SIZED_VALUE = 4  # EIFMT_SVAL: a size, then that many bytes. Other formats have 2 bytes of value instead of the size.
NOP, STORE_LOCAL = 0x918, 0x387  # opcodes: the low 12 bits of an instruction
WIDTHS = (1, 1, 2, 2, 4, 8, 16)  # the bytes of a store, by bits 73 to 75: 8 and 16 bits are signed or not


@dataclass(frozen=True)
class Resources:
    """The resources of a kernel: registers and stack of a thread, and shared memory of a block.

    Attributes:
        registers: 32-bit registers.
        stack_nbytes: local memory for the stack frame: spilled registers, and arrays that are not in registers.
        shared_nbytes: static shared memory.
    """

    registers: int
    stack_nbytes: int
    shared_nbytes: int


def resources(image: bytes, symbol: str) -> Resources:
    """Returns the resources of a cubin's only kernel."""
    sections = dict(_sections(image))
    offset, size = sections[".nv.info"]
    values = dict.fromkeys((REGISTER_COUNT, FRAME_SIZE), 0)
    for attribute, value in _attributes(image[offset : offset + size]):
        if attribute in values:
            values[attribute] = max(values[attribute], value)
    shared = sections.get(f".nv.shared.{symbol}", (0, 0))[1]
    return Resources(values[REGISTER_COUNT], values[FRAME_SIZE], shared)


@dataclass(frozen=True)
class Code:
    """The machine code of a kernel and the functions that it calls.

    Attributes:
        instructions: without those that only fill up the last cache line.
        spilled_nbytes: what its instructions store to local memory.
    """

    instructions: int
    spilled_nbytes: int


def code(image: bytes) -> Code:
    """Returns the code of a cubin's only kernel, for sm_70 or newer."""
    count = spilled = 0
    for name, (offset, size) in _sections(image):
        if not name.startswith(".text."):
            continue
        words = list(struct.iter_unpack("<2Q", image[offset : offset + size]))
        while words and words[-1][0] & 0xFFF == NOP:
            words.pop()
        count += len(words)
        spilled += sum(WIDTHS[high >> 9 & 7] for low, high in words if low & 0xFFF == STORE_LOCAL)
    return Code(count, spilled)


def _sections(image: bytes) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yields the name of every section of a 64-bit ELF file, with its offset and size."""
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<3H", image, 0x3A)
    headers = [struct.unpack_from("<2I4Q", image, table + index * entry_size) for index in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, size in headers:
        start = names + name
        yield image[start : image.index(b"\0", start)].decode(), (offset, size)


def _attributes(info: bytes) -> Iterator[tuple[int, int]]:
    """Yields the attribute and the value of every entry that holds a symbol and a 32-bit value."""
    position = 0
    while position < len(info):
        form, attribute, size = struct.unpack_from("<2BH", info, position)
        position += 4
        if form != SIZED_VALUE:
            continue
        if size == 8:
            yield attribute, struct.unpack_from("<2I", info, position)[1]
        position += size

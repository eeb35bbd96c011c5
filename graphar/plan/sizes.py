"""Prints and parses sizes in binary units."""

from __future__ import annotations

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


def format_nbytes(nbytes: int) -> str:
    """Returns a size in the largest unit that divides it: 2048 is "2 KB"."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def parse_nbytes(text: str) -> int:
    """Returns the bytes of a size such as "64M", in binary units. A number without a unit counts bytes."""
    units = {"K": KB, "M": MB, "G": GB}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    return int(number) * unit

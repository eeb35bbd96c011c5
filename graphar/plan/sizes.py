"""Sizes as people write them: binary units."""

from __future__ import annotations

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


def format_nbytes(nbytes: int) -> str:
    """2048 is "2 KB"."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def parse_nbytes(text: str) -> int:
    """ "64M" is 64 binary megabytes; a bare number counts bytes."""
    units = {"K": KB, "M": MB, "G": GB}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    return int(number) * unit

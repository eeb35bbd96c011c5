"""Prints and parses sizes in binary units."""

from __future__ import annotations

import re
from fractions import Fraction

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


def format_nbytes(nbytes: int) -> str:
    """Returns a size in the largest unit that divides it: 2048 is "2 KB"."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def parse_nbytes(text: str) -> int:
    """Returns the bytes of a size such as "64M" or "1.5M", in binary units. A number without a unit counts bytes.

    Raises:
        ValueError: it is no size, is negative, or is no whole number of bytes.
    """
    units = {"K": KB, "M": MB, "G": GB}
    number, unit = (text[:-1], units[text[-1].upper()]) if text[-1:].upper() in units else (text, 1)
    if not re.fullmatch(r"\d+(\.\d+)?", number, re.ASCII):
        raise ValueError(f"{text!r} is no size")
    nbytes = Fraction(number) * unit
    if nbytes.denominator != 1:
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(nbytes)

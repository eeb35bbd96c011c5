"""Prints and parses sizes in binary units."""

from __future__ import annotations

import re
from fractions import Fraction

KB, MB, GB = 1 << 10, 1 << 20, 1 << 30


def format_nbytes(nbytes: int) -> str:
    """Returns a size in its largest unit with at most one decimal: 2048 is "2 KB", and 4000 is "3.9 KB"."""
    for unit, name in ((GB, "GB"), (MB, "MB"), (KB, "KB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}".replace(".0 ", " ")
    return f"{nbytes} B"


def parse_nbytes(text: str) -> int:
    """Returns the bytes of a size such as "64M", "1.5 MB" or "2KiB". Units are binary; without a unit it is bytes.

    Raises:
        ValueError: the text is no size, is negative, or is no whole number of bytes.
    """
    units = {"": 1, "K": KB, "M": MB, "G": GB}
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(?: ?(?:([KMG])(?:I?B)?|B))?", text, re.ASCII | re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r} is no size")
    nbytes = Fraction(match[1]) * units[(match[2] or "").upper()]
    if nbytes.denominator != 1:
        raise ValueError(f"{text!r} is no whole number of bytes")
    return int(nbytes)

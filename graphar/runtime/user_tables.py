"""Finds the tuning table of a device: the user's, which `python -m graphar tune` writes, or the shipped one."""

from __future__ import annotations

import functools
import warnings

from graphar.plan.tables import Table, shipped_table, slug
from graphar.runtime import cache

FOLDER = "tuning"  # in the kernel cache


def find_table(device_name: str) -> Table:
    """Returns the tuning table of a device, by torch's name: the user's if it is valid, else the shipped or default."""
    name = slug(device_name)
    try:
        if table := user_table(name):
            return table
    except (OSError, ValueError) as error:
        _warn_once(f"{FOLDER}/{name}.json of the cache", str(error))
    return shipped_table(name)


def user_table(name: str) -> Table | None:
    """Returns the user's table of that name, or None. OSError if it is not trusted; ValueError if it is no table."""
    content = cache.load_file(FOLDER, f"{name}.json")
    return None if content is None else Table.from_json(content)


@functools.cache
def _warn_once(file: str, reason: str) -> None:
    message = f"graphar: the tuning table {file} is ignored: {reason}; `python -m graphar tune` writes another"
    warnings.warn(message, RuntimeWarning, stacklevel=3)

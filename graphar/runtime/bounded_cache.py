"""A cache that empties itself when it is full."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

T = TypeVar("T")


class BoundedCache(dict[Hashable, T]):
    """A dict that empties itself before an entry beyond ``max_entries`` is added.

    The bound is needed because keys hold addresses: a caller whose tensors move adds a key with each call.
    """

    def __init__(self, max_entries: int = 1024) -> None:
        self._max_entries = max_entries

    def keep(self, key: Hashable, value: T) -> T:
        """Adds an entry and returns its value."""
        if len(self) >= self._max_entries:
            self.clear()
        self[key] = value
        return value

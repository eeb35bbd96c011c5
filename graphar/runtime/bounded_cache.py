"""What was made once, by all that it depends on."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

T = TypeVar("T")


class Kept(dict[Hashable, T]):
    """Things of one kind, as many as come after one another up to ``most``: then they are made anew.

    A caller whose tensors keep moving asks for others with each call.
    """

    def __init__(self, most: int = 1024) -> None:
        self._most = most

    def keep(self, key: Hashable, one: T) -> T:
        """Adds one, and returns it."""
        if len(self) >= self._most:
            self.clear()
        self[key] = one
        return one

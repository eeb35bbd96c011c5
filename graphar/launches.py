"""Launches that were made once, by all that they depend on."""

from __future__ import annotations

from collections.abc import Callable, Hashable

_MOST = 1024  # a caller whose tensors keep moving makes them anew: each is a few hundred bytes


class Launches(dict[Hashable, Callable]):
    """Those of one kind of kernel; so many that come after one another are kept."""

    def keep(self, key: Hashable, launch: Callable) -> Callable:
        """Adds one, and returns it."""
        if len(self) >= _MOST:
            self.clear()
        self[key] = launch
        return launch

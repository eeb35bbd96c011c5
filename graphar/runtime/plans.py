"""The plans of one engine, and the calls that repeat them."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch

from graphar.runtime.bounded_cache import BoundedCache
from graphar.runtime.plan import Count, Plan
from graphar.runtime.watch.stats import Totals

# Takes the tensors of a call, its output or None, and the numbers of its epilogue; returns its result, or None.
Repeat = Callable[[tuple[torch.Tensor, ...], "torch.Tensor | None", tuple[float, ...]], object]


class Plans(BoundedCache[Plan]):
    """A cache of plans by call.

    Attributes:
        repeats: functions that repeat a call by a plan, by the op, the shape and the options of the call. Dropped with
            the plans: a new cache replaces it, so a thread that is about to add a repeat of a dropped plan adds it to
            the old cache.
        unrepeated: a count of the calls that could be repeated, but were not.
        made: how many plans there have been.
        totals: the counts of the plans that were dropped.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__(max_entries)
        self.repeats: BoundedCache[Repeat] = BoundedCache()
        self.unrepeated = self.made = 0
        self.totals = Totals()
        self._seen: BoundedCache[None] = BoundedCache()

    def was_seen(self, key: Hashable) -> bool:
        """Whether a call with this key was made before. A key with a new function each time is never seen again."""
        if key in self._seen:
            return True
        self._seen.keep(key, None)
        return False

    def keep(self, key: Hashable, value: Plan) -> Plan:
        """Adds a plan, and returns it with a count of its own."""
        self.made += 1
        return super().keep(key, value._replace(served=Count()))

    def clear(self) -> None:
        self.repeats = BoundedCache()
        self.totals.add(self.items())
        super().clear()

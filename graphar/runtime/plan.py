"""Plan: what the first of several equal calls is turned into, and all of them run; and the plans of one engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar, cast

import torch

from graphar.plan.call import Call, Operands
from graphar.plan.config import Config, Explanation
from graphar.runtime.watch.stats import CallStats, merged

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]
# Launches with the parts of one rank's operands, for a caller that has made the rank's device the current one.
Launch = Callable[..., None]  # takes the inputs, outputs and numbers of a rank, and perhaps its Corner
# Takes the tensors of a call, its output or None, and the numbers of its epilogue; returns its result, or None.
Repeat = Callable[[Tensors, torch.Tensor | None, tuple[float, ...]], object]


@dataclass(slots=True)
class Count:
    """How many calls a plan has served. Callers add to it directly, since the time of a small call is the host's."""

    looked_up: int = 0  # calls that looked the plan up, or made it
    repeated: int = 0  # calls that repeated its launch


class Plan(NamedTuple):
    """The kernels that equal calls launch, or a function that makes the call without kernels.

    A matmul's kernels are bound to the addresses of its operands: with other tensors it needs other launches.
    """

    # Makes the call with the operands of each rank of this process. Launches on torch's current streams.
    run: Callable[[Sequence[Operands]], None]
    config: Config  # the algorithm, and its launch configuration
    reason: str = ""  # why the call has this algorithm
    # Takes the tensors of this process's only rank. Returns the launch of calls whose tensors differ from these in
    # their addresses only; None if such calls need more than a launch.
    launch_like: Callable[[Operands], Launch | None] = lambda operands: None
    # Takes one rank's operands. Returns in words whose matmul multiplies them, and why. It depends on K, in which equal
    # calls may differ. An empty string: there is no matmul, or it is part of the kernel.
    matmul: Callable[[Operands], str] = lambda operands: ""
    served: Count = Count()  # plans that no engine keeps share a count

    def explain(self, operands: Operands | None = None) -> Explanation:
        """Returns the algorithm, the grid and the reason, and whose matmul multiplies these operands of one rank."""
        reason = "; ".join(filter(None, (self.reason, self.matmul(operands) if operands else "")))
        return Explanation(self.config.algorithm.value, self.config.blocks, self.config.threads, reason)


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


class Plans(BoundedCache[Plan]):
    """A cache of plans by call, with the functions that repeat a call by a plan."""

    def __init__(self, max_entries: int) -> None:
        super().__init__(max_entries)
        self.repeats: BoundedCache[Repeat] = BoundedCache()  # by the op, the shape and the options of the call
        self.unrepeated = 0  # calls that could be repeated, but were not
        self.made = 0  # plans so far
        self._dropped: tuple[CallStats, ...] = ()  # the calls of plans that were dropped
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
        # A thread that is about to add a repeat of a dropped plan adds it to the old cache.
        self.repeats, self._dropped = BoundedCache(), self.calls()
        super().clear()

    def calls(self) -> tuple[CallStats, ...]:
        """Returns what all plans so far have served."""
        served = list(self._dropped)
        for call, plan in cast("list[tuple[Call, Plan]]", list(self.items())):  # a copy: another thread may add one
            count, algorithm = plan.served.looked_up + plan.served.repeated, plan.config.algorithm
            why = "" if algorithm.row.layout else plan.reason
            nbytes = count * sum(call.work.parts) * call.unit_nbytes
            served += [CallStats(call.op, algorithm.value, count, plan.served.repeated, nbytes, why)] if count else []
        return merged(served)

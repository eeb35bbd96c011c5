"""The hook around calls: sinks see each call that an engine makes, and decide in what context it is made.

graphar.profile, NVTX, torch's profiler and graphar.explain are sinks. What :mod:`graphar.runtime.watch.stats` tells is
counted by the plans, since an op runs a known plan directly while no sink is active.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch._C._autograd import _profiler_enabled as _is_profiling

from graphar.plan.call import Call, Operands
from graphar.ranks.rendezvous import Ranks
from graphar.runtime.bounded_cache import BoundedCache
from graphar.runtime.plan import Plan
from graphar.runtime.watch import kineto


class Planner(Ranks, Protocol):
    """The part of an engine that sinks use."""

    @property
    def plans(self) -> BoundedCache[Plan]: ...
    def plan(self, call: Call, ranks: Sequence[Operands]) -> Plan: ...


# Takes the engine, a call and its operands; returns the context in which the call is made.
Sink = Callable[[Any, Call, Sequence[Operands]], AbstractContextManager[object]]

sinks: list[Sink] = []  # of the calls of all engines; the context of a later sink encloses those of earlier sinks
when_changed: list[Callable[[], None]] = []  # called when the sinks change


@contextlib.contextmanager
def watching(sink: Sink) -> Iterator[None]:
    """Shows the calls of all engines inside to ``sink``."""
    sinks.append(sink)
    _tell()
    try:
        yield
    finally:
        sinks.remove(sink)
        _tell()


def _tell() -> None:
    for tell in when_changed:
        tell()


@contextlib.contextmanager
def around(engine: Planner, call: Call, ranks: Sequence[Operands]) -> Iterator[None]:
    """The contexts of all sinks around a call."""
    with contextlib.ExitStack() as contexts:
        for sink in reversed(sinks):
            contexts.enter_context(sink(engine, call, ranks))
        if _is_profiling():
            contexts.enter_context(kineto.recorded(engine, call, ranks, engine.plan(call, ranks)))
        yield

"""The hook around calls: sinks see each call that an engine makes, and decide in what context it is made.

graphar.profile, NVTX, torch's profiler and graphar.explain are sinks. What :mod:`graphar.runtime.watch.stats` tells is
counted by the plans, since an op runs a known plan directly while no sink is active.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch._C._autograd import _profiler_enabled as _is_profiling

from graphar.plan.call import Call, Operands
from graphar.ranks.rendezvous import Ranks

# Takes the engine, a call and its operands; returns the context in which the call is made.
Sink = Callable[[Any, Call, Sequence[Operands]], AbstractContextManager[object]]

sinks: list[Sink] = []  # of the calls of all engines; the context of a later sink encloses earlier sinks' contexts
when_changed: list[Callable[[], None]] = []  # called when the sinks change
NVTX_SWITCH = "GRAPHAR_NVTX"


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
def around(engine: Any, call: Call, ranks: Sequence[Operands]) -> Iterator[None]:
    with contextlib.ExitStack() as contexts:
        for sink in reversed(sinks):
            contexts.enter_context(sink(engine, call, ranks))
        if _is_profiling():
            algorithm = engine.plan(call, ranks).config.algorithm.value
            contexts.enter_context(_recorded(engine, call, ranks[0], algorithm))
        yield


def ranks_of(engine: Ranks) -> list[int]:
    """Returns the ranks of a communicator as ranks in the world; without a group, as ranks of this process."""
    return dist.get_process_group_ranks(engine.group) if engine.group else [*range(engine.world_size)]


def _recorded(engine: Ranks, call: Call, operands: Operands, algorithm: str) -> AbstractContextManager[object]:
    """Returns a range of torch's profiler around a call, such as "graphar:allreduce", with metadata of one rank.

    The metadata has the names that Kineto uses for NCCL and gloo. It is in the trace if the profiler records shapes.
    torch's own backends record it in C++, with an event of the name record_param_comms. The profiler reads that event's
    metadata from the thread's debug info, which Python cannot set, and crashes where there is none. Keyword values of
    an event reach the trace as well. So graphar's event has a name of its own, and the same keys.
    """
    x, out, group = operands.inputs[0], operands.outputs[0], engine.group
    metadata = {
        "Collective name": call.op,
        "In msg nelems": x.numel(),
        "Out msg nelems": out.numel(),
        "dtype": x.type().rpartition(".")[2].removesuffix("Tensor"),  # as Kineto writes it: BFloat16
        "Group size": engine.world_size,
        "Process Group Name": group.group_name if group else "",
        "Process Group Description": group.group_desc if group else "devices of one process",
        "Process Group Ranks": str(ranks_of(engine)),
        "Algorithm": algorithm,
    }
    return torch._C._profiler._RecordFunctionFast(f"graphar:{call.op}", (), metadata)  # type: ignore[attr-defined]


# NVTX ranges, for Nsight Systems: inside graphar.profile, and everywhere with GRAPHAR_NVTX=1.
def start_nvtx() -> None:
    """Puts each later call of the process into a range, if the environment has GRAPHAR_NVTX=1."""
    if os.environ.get(NVTX_SWITCH) == "1":
        sinks.append(nvtx_sink)


def nvtx_sink(engine: object, call: Call, ranks: Sequence[Operands]) -> AbstractContextManager[object]:
    """Returns a range such as "graphar.allreduce" for a call; on the CPU no range.

    It is in the NVTX domain "graphar" if the package nvtx is installed, and in torch's domain otherwise.
    """
    return _nvtx_range()(f"graphar.{call.op}") if ranks[0].inputs[0].is_cuda else contextlib.nullcontext()


@functools.cache
def _nvtx_range() -> Callable[[str], AbstractContextManager[object]]:
    try:
        return functools.partial(importlib.import_module("nvtx").annotate, domain="graphar")
    except ImportError:
        return torch.cuda.nvtx.range

"""NVTX ranges around calls, for Nsight Systems: inside graphar.profile, and everywhere with GRAPHAR_NVTX=1."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from graphar.plan.call import Call, Operands
from graphar.runtime.watch.hook import Planner, sinks

SWITCH = "GRAPHAR_NVTX"
DOMAIN = "graphar"


def start() -> None:
    """Puts each later call of the process into a range, if the environment has GRAPHAR_NVTX=1."""
    if os.environ.get(SWITCH) == "1":
        sinks.append(sink)


def sink(engine: Planner, call: Call, ranks: Sequence[Operands]) -> AbstractContextManager[object]:
    """Returns a range such as "graphar.allreduce" for a call; on the CPU no range.

    It is in the NVTX domain "graphar" if the package nvtx is installed, and in torch's domain otherwise.
    """
    return _range_of()(f"graphar.{call.op}") if ranks[0].inputs[0].is_cuda else nullcontext()


@functools.cache
def _range_of() -> Callable[[str], AbstractContextManager[object]]:
    try:
        return functools.partial(importlib.import_module("nvtx").annotate, domain=DOMAIN)
    except ImportError:
        return torch.cuda.nvtx.range

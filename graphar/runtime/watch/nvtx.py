"""NVTX ranges around calls, for Nsight Systems: inside graphar.profile, and everywhere with GRAPHAR_NVTX=1."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from graphar.plan.call import Call, Operands
from graphar.runtime.engine import Engine, profilers

SWITCH = "GRAPHAR_NVTX"
DOMAIN = "graphar"


def start() -> None:
    """Puts each later call of the process into a range, if the environment has GRAPHAR_NVTX=1."""
    if os.environ.get(SWITCH) == "1":
        profilers.append(watch)


def watch(engine: Engine, call: Call, ranks: Sequence[Operands], note: str, run: Callable[[], None]) -> None:
    """Makes the call inside a range; a Watcher."""
    with around(call, ranks[0].inputs[0]):
        run()


def around(call: Call, x: torch.Tensor) -> AbstractContextManager[object]:
    """Returns a range such as "graphar.allreduce" for a call with a first tensor ``x``; on the CPU no range.

    It is in the NVTX domain "graphar" if the package nvtx is installed, and in torch's domain otherwise.
    """
    return _range_of()(f"graphar.{call.op}") if x.is_cuda else nullcontext()


@functools.cache
def _range_of() -> Callable[[str], AbstractContextManager[object]]:
    try:
        return functools.partial(importlib.import_module("nvtx").annotate, domain=DOMAIN)
    except ImportError:
        return torch.cuda.nvtx.range

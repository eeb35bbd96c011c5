"""CUDA graphs, in which what is timed leaves the host out."""

from __future__ import annotations

from collections.abc import Callable

import torch


def capture(run: Callable[[], object]) -> Callable[[], None]:
    """The replay of what ``run``, which has run before, enqueues. The caller keeps the operands for as long."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay

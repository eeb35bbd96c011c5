"""Counts of the calls of the backend that torch's own group serves, as graphar.stats() shows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from graphar.runtime.watch.stats import CallStats, Stats

_OPS = {  # graphar's names of calls that have others as methods
    "allreduce_coalesced": "allreduce",
    "reduce_scatter": "reducescatter",
    "_reduce_scatter_base": "reducescatter",
    "_allgather_base": "allgather",
}


def tensors_in(given: object) -> Iterator[torch.Tensor]:
    """Yields the tensors of a call's arguments, which may be lists of lists."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, (list, tuple)):
        for one in given:
            yield from tensors_in(one)


class PassedOn:
    """Counts calls, and the bytes of their outputs or inputs, whichever are more, by op, library and reason."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str, str], tuple[int, int]] = {}

    def count(self, method: str, device: torch.device, why: str, given: Sequence[object]) -> None:
        kind = _OPS.get(method, method), "nccl" if device.type == "cuda" else "gloo", why
        calls, nbytes = self._counts.get(kind, (0, 0))
        more = max((sum(x.nbytes for x in tensors_in(one)) for one in given), default=0)
        self._counts[kind] = calls + 1, nbytes + more

    def stats(self) -> Stats:
        counts = dict(self._counts)  # a copy: another thread may add one
        found = [CallStats(op, by, calls, 0, nbytes, why) for (op, by, why), (calls, nbytes) in counts.items()]
        return Stats(tuple(found), 0, {}, 0.0, "")

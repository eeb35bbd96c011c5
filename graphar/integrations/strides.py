"""Tensors of any strides in calls of torch's own group: gloo reads and writes memory as it lies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from graphar.integrations.works import CombinedWork
from graphar.runtime.checks.tensor_checks import check_own_memory


class Arguments:
    """The arguments of a call, with contiguous tensors in place of others; ValueError for outputs that share memory."""

    def __init__(self, name: str, rank: int, given: tuple, named: dict) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # each output, and what is in its place
        self.outputs: list[torch.Tensor] = []  # which the call writes
        all_given = [*given, *named.values()]
        first, *rest = all_given
        writes = _writes(name, rank, all_given)
        changed = [_mapped(first, lambda x: self._output(name, x) if writes else _dense(x))]
        changed += [_mapped(one, _dense) for one in rest]
        self.given, self.named = changed[: len(given)], dict(zip(named, changed[len(given) :], strict=True))

    def _output(self, name: str, x: torch.Tensor) -> torch.Tensor:
        check_own_memory(name, x, "a tensor that is written")
        self.outputs.append(x)
        found = _dense(x)
        if found is not x:
            self._copies.append((x.detach(), found))
        return found

    def finish(self, work: dist.Work | None) -> dist.Work | None:
        """Returns the call's work, which also copies results into outputs with gaps."""
        if work is not None:
            return CombinedWork([work], self.outputs, self._copies) if self._copies else work
        for output, result in self._copies:  # the call is complete, or ordered on the current stream
            output.copy_(result)
        return None


def _writes(name: str, rank: int, given: Sequence[Any]) -> bool:
    if name not in ("broadcast", "reduce"):
        return name != "send"
    roots = [one.rootRank if hasattr(one, "rootRank") else one for one in given[1:]]
    root = next((one for one in roots if type(one) is int), 0)
    return (rank == root) is (name == "reduce")


def _mapped(given: object, function: Callable[[torch.Tensor], torch.Tensor]) -> object:
    """Returns an argument, which may be a list of lists, with the results of ``function`` for its tensors."""
    if isinstance(given, torch.Tensor):
        return function(given)
    return [_mapped(one, function) for one in given] if isinstance(given, (list, tuple)) else given


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Returns ``x`` if it is contiguous and holds its values as they are, or a copy that is."""
    if x.layout is not torch.strided or (x.is_contiguous() and not x.is_neg() and not x.is_conj()):
        return x
    return x.detach().resolve_conj().resolve_neg().contiguous()

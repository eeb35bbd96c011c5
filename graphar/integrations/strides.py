"""Tensors of any strides in calls of torch's own group: gloo reads and writes memory as it lies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphar.integrations.untraced import untraced
from graphar.runtime.checks.tensor_checks import check_own_memory


class Arguments:
    """The arguments of a call, with contiguous tensors in place of others.

    Attributes:
        given, named: the arguments.
        outputs: the tensors that the call writes.

    Raises:
        ValueError: elements of an output share memory.
    """

    def __init__(self, name: str, rank: int, given: tuple, named: dict) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # of outputs, and what is in their place
        self.outputs: list[torch.Tensor] = []
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
        """Returns the call's work: a CopyingWork if there are outputs to copy."""
        if not self._copies:
            return work
        if work is None:  # the call is complete, or ordered on the current stream
            self.copy()
            return None
        return CopyingWork(work, self)

    def copy(self) -> None:
        """Copies the call's results into its outputs."""
        for x, found in self._copies:
            x.copy_(found)


@untraced
class CopyingWork(dist.Work):
    """A call whose results are copied into its outputs once it is complete: by ``wait()``, or by its future."""

    def __init__(self, work: dist.Work, arguments: Arguments) -> None:
        super().__init__()
        self._work, self._arguments = work, arguments
        self._copying, self._copied = threading.Lock(), False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if not self._copied:  # gloo's receives wait for ever the second time
            self._work.wait(timeout) if timeout else self._work.wait()  # 0 is torch's word for no limit
            self._copy()
        return True

    def _copy(self) -> None:
        with self._copying:
            if not self._copied:
                self._arguments.copy()
            self._copied = True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        if done and self._work.is_success():
            self._copy()
        return done

    def is_success(self) -> bool:
        return self._work.is_success()

    def source_rank(self) -> int:
        return self._work._source_rank()

    _source_rank = source_rank

    def result(self) -> list[torch.Tensor]:
        return self._arguments.outputs

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        def copied(done: torch.futures.Future) -> list[torch.Tensor]:
            done.value()  # raises the call's error
            self._copy()
            return self._arguments.outputs

        return self._work.get_future().then(copied)


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

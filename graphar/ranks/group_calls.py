"""Calls over a process group that end in bounded time on the CPU, and say which rank they waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from graphar.errors import CollectiveTimeout, CommunicatorError, TimeoutRecord
from graphar.plan.algorithms import Algorithm
from graphar.ranks import fallback
from graphar.ranks.rendezvous import LastWord, StoreRendezvous

_GRACE_S = 1.0  # for a process that was killed to be seen as ended


class GroupCalls:
    """The calls of one communicator over torch.distributed.

    Args:
        group: the process group.
        rendezvous: where its ranks leave word of what they do.
    """

    def __init__(self, group: dist.ProcessGroup, rendezvous: StoreRendezvous) -> None:
        self._group, self._rendezvous = group, rendezvous
        self._made = 0

    def bind(self, op: str, x: torch.Tensor, timeout_s: float, parts: dict[str, object]) -> Callable:
        """A function of a call's tensors that does ``op`` for those like ``x``; ``parts`` are what else it is given.

        It raises CollectiveTimeout where a rank failed, or did not take part within ``timeout_s``; for CUDA tensors it
        only queues the call, and the process group's own time-out holds.
        """
        run = partial(fallback.PROCESS[op], group=self._group, timeout_s=timeout_s, **parts)
        if x.device.type != "cpu":
            return run
        counts = parts.get("counts")
        elements = f"{x.numel()} elements" if counts is None else f"parts of {list(counts)} elements"

        def run_or_tell(x: torch.Tensor, out: torch.Tensor, *more) -> None:
            sequence, self._made = self._made, self._made + 1
            self._rendezvous.note(f"{op} call {sequence} over torch.distributed, {elements} of {x.dtype}")
            deadline = time.monotonic() + timeout_s
            try:
                run(x, out, *more)
            except fallback.GroupFailed as error:
                words = self._last_words(broken=time.monotonic() < deadline)
                raise self._timeout(op, sequence, timeout_s, words, str(error)) from error

        return run_or_tell

    def _timeout(
        self, op: str, sequence: int, timeout_s: float, words: list[LastWord], reason: str
    ) -> CollectiveTimeout:
        at_fault = [rank for rank, word in enumerate(words) if word.behind or word.ended]
        # Where one rank gives up, so may those that waited for it: they are not the reason.
        missing = [rank for rank in at_fault if not words[rank].gave_up] or at_fault
        self._leave_word(f"{op} call {sequence}, in which it waited for rank(s) {missing} in vain")
        dead = [rank for rank in missing if words[rank].ended]
        named = f"rank(s) {missing} failed, or did not take part" if missing else "a rank failed, or was not done"
        return CollectiveTimeout(
            f"{op} call {sequence} over torch.distributed: {named} within {timeout_s:g} s ({reason}); close this "
            "communicator, and make another in a new process group",
            TimeoutRecord(
                op,
                Algorithm.HIERARCHICAL.value if op == Algorithm.HIERARCHICAL.op else Algorithm.FALLBACK.value,
                sequence,
                self._rendezvous.rank,
                next(iter(dead + missing), None),
                tuple(map(str, words)),
            ),
        )

    def _leave_word(self, what: str) -> None:
        with contextlib.suppress(CommunicatorError):  # the store may have ended with the rank that served it
            self._rendezvous.note(what, gave_up=True)

    def _last_words(self, broken: bool) -> list[LastWord]:
        """What every rank did last. Where a connection is ``broken`` a process will have ended, a moment from now."""
        deadline = time.monotonic() + _GRACE_S
        while True:
            words = self._rendezvous.last_words()
            at_fault = any(word.ended or (word.behind and not broken) for word in words)
            if at_fault or time.monotonic() > deadline:
                return words
            time.sleep(0.02)

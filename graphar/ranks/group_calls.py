"""Calls over a process group. On the CPU they end in bounded time, and name the rank that they waited for."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from graphar.errors import CollectiveTimeout, CommunicatorError, TimeoutRecord
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.ranks import fallback
from graphar.ranks.rendezvous import LastWord, StoreRendezvous

_GRACE_S = 1.0  # a killed process may take so long to be seen as ended


class GroupCalls:
    """The calls of one communicator over torch.distributed. The ranks record their last calls at ``rendezvous``."""

    def __init__(self, group: dist.ProcessGroup, rendezvous: StoreRendezvous) -> None:
        self._group, self._rendezvous = group, rendezvous
        self._made = 0

    def bind(self, call: Call, x: torch.Tensor, timeout_s: float, run: Callable, algorithm: Algorithm) -> Callable:
        """Returns ``run``, a function of the call's tensors, wrapped to name the rank that it waited for.

        On the CPU the wrapper raises CollectiveTimeout if a rank failed, or did not take part within ``timeout_s``
        seconds. For CUDA tensors ``run`` is returned as it is: it only queues the call, and the process group's own
        time-out applies.
        """
        if x.device.type != "cpu":
            return run
        parts = f"parts of {list(call.counts)} elements" if isinstance(call.counts, tuple) else f"{x.numel()} elements"

        def run_or_tell(x: torch.Tensor, out: torch.Tensor, *more) -> None:
            sequence, self._made = self._made, self._made + 1
            self._rendezvous.note(f"{call.op} call {sequence} over torch.distributed, {parts} of {x.dtype}")
            deadline = time.monotonic() + timeout_s
            try:
                run(x, out, *more)
            except fallback.GroupFailed as error:
                words = self._last_words(broken=time.monotonic() < deadline)
                raise self._timeout(call.op, algorithm, sequence, timeout_s, words, str(error)) from error

        return run_or_tell

    def _timeout(
        self, op: str, algorithm: Algorithm, sequence: int, timeout_s: float, words: list[LastWord], reason: str
    ) -> CollectiveTimeout:
        what = f"{op} call {sequence}"
        at_fault = [rank for rank, word in enumerate(words) if word.behind or word.ended]
        # A rank that gave up waited for another rank, so it is not the cause.
        missing = [rank for rank in at_fault if not words[rank].gave_up] or at_fault
        with contextlib.suppress(CommunicatorError):  # the store may have ended with the rank that served it
            self._rendezvous.note(f"{what}, in which it waited for rank(s) {missing} in vain", gave_up=True)
        dead = [rank for rank in missing if words[rank].ended]
        peer = next(iter(dead + missing), None)
        named = f"rank(s) {missing} failed, or did not take part" if missing else "a rank failed, or was not done"
        return CollectiveTimeout(
            f"{what} over torch.distributed: {named} within {timeout_s:g} s ({reason}); close this "
            "communicator, and make another in a new process group",
            TimeoutRecord(op, algorithm.value, sequence, self._rendezvous.rank, peer, tuple(map(str, words))),
        )

    def _last_words(self, broken: bool) -> list[LastWord]:
        """Returns what every rank did last. If a connection is ``broken``, waits a moment for a process to end."""
        deadline = time.monotonic() + _GRACE_S
        while True:
            words = self._rendezvous.last_words()
            at_fault = any(word.ended or (word.behind and not broken) for word in words)
            if at_fault or time.monotonic() > deadline:
                return words
            time.sleep(0.02)

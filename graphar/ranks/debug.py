"""Debug mode: before each call the ranks compare their calls, so that a mismatch raises an error instead of a hang.

The comparison costs each call some messages through torch.distributed's store. Between ranks of one process it is not
needed: a call has the tensors of all ranks, and the ops check them. Calls that are captured into a graph are not
compared, since no host code runs in a replay.
"""

from __future__ import annotations

import os
import threading

import torch

from graphar.errors import CollectiveTimeout, TimeoutRecord
from graphar.plan.call import Call
from graphar.plan.work import without_seeds
from graphar.ranks import agreement
from graphar.ranks.capture import is_capturing
from graphar.ranks.rendezvous import Ranks, RanksAbsent

SWITCH = "GRAPHAR_DEBUG"


def is_enabled(debug: bool | None) -> bool:
    """Returns ``debug``; if it is None, whether GRAPHAR_DEBUG is 1 in the environment. ValueError if not 0 or 1."""
    given = os.environ.get(SWITCH, "") if debug is None else str(int(debug))
    if given not in ("", "0", "1"):
        raise ValueError(f"{SWITCH} must be 1 to compare the ranks' calls, or 0, got {given!r}")
    return given == "1"


class Comparison:
    """Compares the calls of the ranks of one engine."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._lock = threading.Lock()  # autograd computes gradients in another thread
        self._calls = 0

    def compare(self, what: str, details: str = "") -> None:
        """Returns once every rank has called with the same ``what`` and ``details``.

        Raises:
            CommunicatorError: on every rank, if ranks differ. The message has the call of each rank.
            RanksAbsent: ranks did not come in time. The message names them.
        """
        with self._lock:
            self._meet(f"{what} {details}".rstrip(), None)

    def compare_call(self, call: Call, x: torch.Tensor, note: str) -> None:
        """Compares a call whose first tensor is ``x``, unless a graph captures it; ``note`` says where tensors lie."""
        if not (x.is_cuda and is_capturing(x.device)):
            self._compare_call(call, f"{agreement.words_of_tensor(call, x)}{note}")

    def _compare_call(self, call: Call, described: str) -> None:
        with self._ranks.keeping_failure(), self._lock:
            try:
                self._meet(described, call.timeout_s)
            except RanksAbsent as error:
                last_calls = tuple(map(str, self._ranks.rendezvous().last_words()))
                record = TimeoutRecord(
                    call.op, call.algorithm, self._calls - 1, self._ranks.rank, error.absent[0], last_calls
                )
                raise CollectiveTimeout(f"{error} (is {SWITCH} set on all of them?)", record) from None

    def _meet(self, described: str, timeout_s: float | None) -> None:
        rendezvous = self._ranks.rendezvous()
        described = f"call {self._calls}, {without_seeds(described)}"
        self._calls += 1
        rendezvous.note(described)
        rendezvous.exchange(described, b"", timeout_s)

"""Debug mode: before each call the ranks compare what they call, so that a mismatch is an error and not a wait.

It costs a call some messages through torch.distributed's store. In one process there is nothing to compare: one call
has all ranks' tensors, and the ops check them. Nor is what a graph holds compared, whose replays no host code sees.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from graphar.errors import CollectiveTimeout, TimeoutRecord
from graphar.plan.checks import is_capturing
from graphar.ranks.rendezvous import RanksAbsent

if TYPE_CHECKING:
    from graphar.communicator import Communicator
    from graphar.numerics.epilogues.epilogue import AppliedEpilogue, Form

SWITCH = "GRAPHAR_DEBUG"
_SEED = re.compile(", seed=[0-9]+")  # in a codec's text: ranks may have seeds of their own


def is_asked_for(debug: bool | None) -> bool:
    """``debug``, or what the environment says where that is None."""
    return os.environ.get(SWITCH) == "1" if debug is None else debug


class Comparison:
    """What the ranks of one communicator tell each other before a call."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._lock = threading.Lock()  # gradients come from a thread of their own
        self._calls = 0

    def compare(self, op: str, details: str = "") -> None:
        """Goes on where every rank calls ``op`` with the same ``details``.

        Raises:
            CommunicatorError: on every rank, where they call different things, saying who what.
            RanksAbsent: naming the ranks that did not come in time.
        """
        with self._lock:
            self._meet(f"{op} {details}".rstrip(), None)

    def _meet(self, call: str, timeout_s: float | None) -> None:
        rendezvous = self._communicator.rendezvous()
        call = f"call {self._calls}, {_SEED.sub('', call)}"
        self._calls += 1
        rendezvous.note(call)
        rendezvous.exchange(call, b"", timeout_s)

    # ---- ops --------------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        """Has the ops of the communicator compare first: of this one alone, so that others pay nothing for it."""
        communicator = self._communicator
        allreduce, parts = communicator.run_allreduce, communicator.run_parts
        with_epilogue, matmul = communicator.run_with_epilogue, communicator.run_matmul

        def compare_and_allreduce(
            x, out, algorithm: str, timeout_s: float | None, codec: str = "", blocks: int | None = None, prefetch=None
        ) -> None:
            places = communicator._symmetric.describe(x, out) if communicator._symmetric else ""
            details = f"of {list(x.shape)} {x.dtype}, algorithm {algorithm}{_describe_codec(codec)}{places}"
            self.compare_op("allreduce", details, x, algorithm, timeout_s)
            allreduce(x, out, algorithm, timeout_s, codec, blocks, prefetch)

        def compare_and_run(
            op: str, x, out, counts, timeout_s: float | None, axis: int = 0, codec: str = "", blocks: int | None = None
        ) -> None:
            details = f"{_describe_parts(op, x, counts, axis)}{_describe_codec(codec)}"
            self.compare_op(op, details, x, "auto", timeout_s)
            parts(op, x, out, counts, timeout_s, axis, codec, blocks)

        def compare_and_run_with_epilogue(
            op: str,
            x,
            out,
            counts,
            form: Form,
            operands,
            algorithm: str,
            timeout_s: float | None,
            axis: int = 0,
            blocks: int | None = None,
        ) -> None:
            whole = f"of {list(x.shape)} {x.dtype}, algorithm {algorithm}"
            details = whole if isinstance(counts, int) else _describe_parts(op, x, counts, axis)
            self.compare_op(op, f"{details}, epilogue {form.text}", x, algorithm, timeout_s)
            with_epilogue(op, x, out, counts, form, operands, algorithm, timeout_s, axis, blocks)

        def compare_and_multiply(
            op: str,
            a,
            w,
            bias,
            out,
            counts,
            timeout_s: float | None = None,
            epilogue: AppliedEpilogue | None = None,
            codec: str = "",
        ) -> None:
            columns = f"{len(w)} columns{'' if bias is None else ' with a bias'}"
            follows = f", epilogue {epilogue.form.text}" if epilogue else _describe_codec(codec)
            self.compare_op(op, f"of {a.dtype}, sizes {list(counts)}, {columns}{follows}", a, "auto", timeout_s)
            matmul(op, a, w, bias, out, counts, timeout_s, epilogue, codec)

        communicator.run_allreduce, communicator.run_parts = compare_and_allreduce, compare_and_run
        communicator.run_with_epilogue, communicator.run_matmul = compare_and_run_with_epilogue, compare_and_multiply

    def compare_op(self, op: str, details: str, x: torch.Tensor, algorithm: str, timeout_s: float | None) -> None:
        """As :meth:`compare`, before a call with ``x``, which a graph may be about to hold; by where that is, too."""
        if x.is_cuda and is_capturing(x.device):
            return
        with self._communicator.keeping_failure(), self._lock:
            try:
                self._meet(f"{op} {details}{', on a GPU' if x.is_cuda else ''}", timeout_s)
            except RanksAbsent as error:
                last_calls = tuple(map(str, self._communicator.rendezvous().last_words()))
                rank, peer = self._communicator.rank, error.absent[0]
                record = TimeoutRecord(op, algorithm, self._calls - 1, rank, peer, last_calls)
                raise CollectiveTimeout(f"{error} (is {SWITCH} set on all of them?)", record) from None


def _describe_codec(codec: str) -> str:
    return f", codec {codec}" if codec else ""


def _describe_parts(op: str, rows: torch.Tensor, counts: Sequence[int], axis: int) -> str:
    """A reduce-scatter or all-gather as the user calls it; ``rows`` have ``axis`` first."""
    in_a_row = max(1, torch.Size(rows.shape[1:]).numel())
    lengths = [count // in_a_row for count in counts]
    shape = [str(size) for size in rows.shape[1:]]
    shape.insert(axis, str(sum(lengths)) if op == "reducescatter" else "*")
    return f"of [{', '.join(shape)}] {rows.dtype}, axis {axis}, sizes {lengths}"

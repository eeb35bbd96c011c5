"""Calls that graphar's kernels do not serve: over the process group, host by host, or within this process.

Calls over a process group are compared before they are made, bounded in time on the CPU, and name the rank at fault.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from graphar.errors import CollectiveTimeout, CommunicatorError, ConcurrentCallError, TimeoutRecord
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.config import HIERARCHICAL, Config
from graphar.plan.work import Exchange, Parts, Sum
from graphar.ranks import agreement
from graphar.ranks.cpu import fallback
from graphar.ranks.cpu.fallback import Run
from graphar.ranks.cpu.messages import Messages, hash_of, messages_of
from graphar.ranks.cpu.reduction import Coder
from graphar.ranks.cpu.transport import Group, GroupFailed, InProcess
from graphar.ranks.groups import known_group
from graphar.ranks.hierarchical import Hierarchy
from graphar.ranks.rendezvous import LastWord, Ranks, RanksAbsent, StoreRendezvous

_GRACE_S = 1.0  # the time until a killed process is seen as ended
_CROSSED = (
    "{op}: two threads are in calls of one communicator, whose order may differ between ranks, so that results may be "
    "wrong; give each thread a process group of its own, by torch.distributed.new_group()"
)
_PARTS = re.compile(r"^allgather of parts of \[[^]]*\]")  # as agreement.words begins


class WithoutKernels:
    """The calls of one communicator without kernels.

    ``coder_of`` makes the coder of a call from the call, its codec, and the devices of this process's ranks.
    """

    def __init__(self, communicator: Ranks, hierarchy: Hierarchy, coder_of: Callable[..., Coder]) -> None:
        self._communicator, self._hierarchy, self._coder_of = communicator, hierarchy, coder_of
        self._group_calls: GroupCalls | None = None  # made at first use
        self._making = threading.Lock()
        self._quantized_calls = itertools.count()  # kernels count their own calls

    def bind(self, call: Call[Sum | Parts | Exchange], x: torch.Tensor, config: Config, timeout_s: float) -> Run:
        """Returns the function of a call whose first tensor is like ``x``."""
        ranks, numbers = self._communicator, self._quantized_calls
        coded = call._replace(dtype=torch.float32) if config == HIERARCHICAL else call  # as sums of hosts are
        coder = self._coder_of(coded, call.wire, ranks.devices) if call.wire else None
        if ranks.devices:
            return fallback.bind(call, InProcess(ranks.world_size), numbers, coder)
        calls = self.group_calls()
        if config == HIERARCHICAL:
            run = self._hierarchy.bind(call, timeout_s, coder)
        else:
            messages = calls.messages if x.device.type == "cpu" else None
            transport = messages or Group(known_group(ranks.group), timeout_s)
            run = fallback.bind(call, transport, numbers, coder)
        return calls.bind(call, x, timeout_s, run, config.algorithm)

    def group_calls(self) -> GroupCalls:
        """Returns the calls over the process group. The first call makes them."""
        ranks = self._communicator
        with self._making:
            self._group_calls = self._group_calls or GroupCalls(known_group(ranks.group), ranks.rendezvous())
            return self._group_calls

    def let_go_of_group(self) -> None:
        """Drops the process group. Calls over it fail from now on."""
        if self._group_calls:
            self._group_calls.let_go_of_group()
        self._group_calls = None


class GroupCalls:
    """The calls of one communicator over torch.distributed.

    Ranks compare their calls before data is delivered: over gloo by headers of their ``messages``, over another backend
    at ``rendezvous``. They meet there before their first call in any case.
    """

    def __init__(self, group: dist.ProcessGroup, rendezvous: StoreRendezvous) -> None:
        self._rendezvous = rendezvous
        self.messages = messages_of(group, rendezvous.prefix)
        self._made, self._met = 0, False
        self._current = self._previous = ("", -1)  # this call and the one before, in words, and their numbers
        self._one_thread, self._crossed = threading.Lock(), False

    def let_go_of_group(self) -> None:
        """Drops the process group and its store. No call follows."""
        if self.messages:
            self.messages.let_go_of_group()
        self.messages, self._rendezvous.beside_meeting = None, None

    def bind(self, call: Call, x: torch.Tensor, timeout_s: float, run: Callable, algorithm: Algorithm) -> Callable:
        """Returns ``run``, a function of the call's operands, wrapped to compare calls and to name absent ranks.

        It raises CommunicatorError on every rank if calls differ, and CollectiveTimeout if a rank does not come within
        ``timeout_s`` seconds; on the CPU also if one fails later. A CUDA call is only queued: then the process group's
        own time-out applies. The hierarchical algorithm, which shall be fast between hosts, compares nothing on GPUs.
        """
        on_cpu, by_hosts = x.device.type == "cpu", algorithm.row.across_hosts
        if by_hosts and not on_cpu:
            return run
        agreed, by = agreement.words(call), algorithm.value
        what = f"{agreed} on {'the CPU' if on_cpu else 'a GPU'}{f' by {by}' if by_hosts else ''}"
        hashed = hash_of(what)
        sends = on_cpu and not by_hosts  # by self.messages, if there are any

        def compare(sequence: int) -> None:
            self._compare(call.op, f"{what}, call {sequence}", timeout_s)

        def run_or_tell(ranks: Sequence[Operands]) -> None:
            messages = self.messages
            meets = not (messages and self._met)
            with self.one_call(call.op, agreed, by, timeout_s, meets) as sequence:
                if meets:
                    compare(sequence)
                    self._met = True  # every rank has come, so gloo can connect to it: headers compare from now on
                    if messages:
                        self._rendezvous.beside_meeting = partial(self._beside_meeting, messages)
                if messages:
                    messages.begin(hashed, sequence, timeout_s, compare)
                    if not sends:
                        messages.agree()
                run(ranks)

        return run_or_tell

    @contextlib.contextmanager
    def _beside_meeting(self, messages: Messages, what: str, timeout_s: float) -> Iterator[None]:
        """Tells ranks that make a call in place of the meeting inside that this one comes to the meeting.

        The meeting finds out who does not come: gloo, whose waits break its connections, waits after that.
        """
        with self._one_thread:
            messages.begin(hash_of(what), self._made, timeout_s, lambda sequence: None)
            messages.announce()
            all_came = True
            try:
                yield
            except RanksAbsent:
                all_came = False
                raise
            finally:
                if all_came:
                    try:
                        messages.await_headers()
                    except GroupFailed as error:
                        raise RanksAbsent(f"{what}: {error}", [*(error.absent or ())]) from error

    @contextlib.contextmanager
    def one_call(self, op: str, agreed: str, by: str, timeout_s: float, notes: bool) -> Iterator[int]:
        """The context of a call, ``agreed`` in words, which gives its number; CollectiveTimeout if ranks fail.

        Two threads that are inside at the same time get ConcurrentCallError, and so do all later calls. ``by`` is the
        algorithm or the backend. Without ``notes`` for other ranks, GroupFailed knows which of them made no call.
        """
        begin = time.monotonic()
        if not self._one_thread.acquire(blocking=False):
            self._crossed = True  # the other thread's call may have met this one of another rank
            raise ConcurrentCallError(_CROSSED.format(op=op))
        try:
            sequence, self._made = self._made, self._made + 1
            self._previous, self._current = self._current, (agreed, sequence)
            if notes:
                self._rendezvous.note(_words_of(self._current))
            yield sequence
        except (GroupFailed, RanksAbsent) as error:
            raise self._failure(op, by, timeout_s, notes, error, time.monotonic() - begin) from error
        finally:
            self._one_thread.release()
            if self._crossed:  # whatever became of the call
                raise ConcurrentCallError(_CROSSED.format(op=op))

    def _failure(
        self, op: str, by: str, timeout_s: float, notes: bool, error: GroupFailed | RanksAbsent, took_s: float
    ) -> CollectiveTimeout:
        """Returns the error that tells users of ``error``, which ended a call after so many seconds."""
        waited_s, sequence = getattr(error, "waited_s", None), self._current[1]
        broken = (took_s if waited_s is None else waited_s) < timeout_s
        words = self._last_words(broken, None if notes else error.absent or ())
        at_fault = [rank for rank, word in enumerate(words) if word.behind or word.ended]
        # A rank that gave up waited for another rank, so it is not the cause.
        missing = [rank for rank in at_fault if not words[rank].gave_up] or at_fault
        what = f"{op} call {sequence}"
        with contextlib.suppress(CommunicatorError):  # the store may have ended with the rank that served it
            waited = f"waited for rank(s) {missing} in vain" if missing else "gave up, with no rank known to be missing"
            self._rendezvous.note(f"{what}, in which it {waited}", gave_up=True)
        dead = [rank for rank in missing if words[rank].ended]
        peer = next(iter(dead + missing), None)
        named = f"rank(s) {missing} failed, or did not take part" if missing else "a rank failed, or was not done"
        when = f"after {took_s:.1f} s" if broken else f"within {timeout_s:g} s"
        return CollectiveTimeout(
            f"{what} over torch.distributed: {named} {when} ({error}); close this communicator, and make another in a "
            "new process group",
            TimeoutRecord(op, by, sequence, self._rendezvous.rank, peer, tuple(map(str, words))),
        )

    def _compare(self, op: str, what: str, timeout_s: float) -> None:
        try:
            self._rendezvous.exchange_at_once(what, b"", timeout_s)
        except CommunicatorError as error:
            said = {_PARTS.sub("", line.partition(": ")[2]) for line in str(error).splitlines()[1:]}
            if isinstance(error, RanksAbsent) or op != "allgather" or len(said) > 1:
                raise
            raise CommunicatorError(f"{error}\nParts of different lengths need sizes=, equal on all ranks.") from None

    def _last_words(self, broken: bool, absent: Collection[int] | None) -> list[LastWord]:
        """Returns what every rank did last. If a connection is ``broken``, waits a moment for a process to end.

        All but the ranks ``absent`` have made this call; None: what ranks recorded tells.
        """
        deadline = time.monotonic() + _GRACE_S
        while True:
            words = self._rendezvous.last_words()
            if absent is not None:
                words = [self._with_call(word, rank in absent) for rank, word in enumerate(words)]
            at_fault = any(word.ended or (word.behind and not broken) for word in words)
            if at_fault or time.monotonic() > deadline:
                return words
            time.sleep(0.02)

    def _with_call(self, word: LastWord, behind: bool) -> LastWord:
        """Returns the last word of a rank that made this call, or is ``behind`` it and made the one before."""
        made = self._previous if behind else self._current
        is_known = made[0] and not word.gave_up
        return replace(word, what=_words_of(made) if is_known else word.what, behind=behind)


def _words_of(call: tuple[str, int]) -> str:
    agreed, sequence = call
    return f"{agreed}, call {sequence} over torch.distributed"

"""The rendezvous of a group's ranks outside kernels: small messages through the group's store, in bounded time."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from graphar.errors import CommunicatorError, Reason, UnsupportedError
from graphar.ranks.hosts import has_ended, identify

T = TypeVar("T")

_SEPARATOR = b"\0"  # between a message's purpose and its payload
_LONGEST_PAUSE_S = 0.02  # between two polls of the store
_LIVENESS_S = 0.5  # between two checks whether an absent rank's process still runs
_NOTHING = "\1"  # what the store answers for a key that it does not have
# How many rendezvous a group's ranks have made in a store: each has keys of its own. The counts of a store end with it,
# since its processes may have met others in an earlier store.
_made: weakref.WeakKeyDictionary[Store, Counter[str]] = weakref.WeakKeyDictionary()
_MET = "met"  # the outcome of a meeting to which all ranks came in time


class RanksAbsent(CommunicatorError):
    """The ranks ``absent`` did not come to a meeting. The processes of the ranks ``ended`` are known to have ended."""

    def __init__(self, message: str, absent: Sequence[int] = (), ended: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.absent, self.ended = list(absent), list(ended)


@dataclass(frozen=True)
class LastWord:
    """The last call that a rank recorded."""

    what: str  # the call in words
    behind: bool  # whether the rank has made fewer calls than the rank that asks
    ended: bool  # whether its process is known to have ended
    gave_up: bool = False  # whether the rank itself gave up waiting for another rank

    def __str__(self) -> str:
        return f"{self.what}; its process has ended" if self.ended else self.what


class Ranks(Protocol):
    """The interface to the communicator, which this package does not know: its ranks, and where they meet."""

    group: dist.ProcessGroup | None
    devices: tuple[torch.device, ...] | None
    world_size: int
    timeout_s: float

    def rendezvous(self) -> StoreRendezvous: ...


class StoreRendezvous:
    """The rendezvous of a process group's ranks through torch.distributed's store.

    ``prefix`` begins all keys; it is equal on every rank, and new for every communicator. ``timeout_s`` is for one
    meeting. ``processes`` are the ranks' numbers in the default group; None: equal to the ranks.
    """

    def __init__(
        self,
        store: Store,
        prefix: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        processes: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store: Store | None = store  # None after leave()
        self.prefix, self._timeout_s = prefix, timeout_s
        self._processes = list(range(world_size) if processes is None else processes)
        self._meetings = self._notes = 0
        self.waited_s = 0.0  # for ranks to come, in all meetings
        self.has_met = False  # whether all ranks have come to a meeting
        self.is_served: Callable[[], bool] = lambda: True  # whether the store can still be expected to answer
        self._keys: set[str] = set()  # of this rank, in the store
        # For ranks that may make a call in place of an exchange: the context of its meeting, by its purpose and limit.
        self.beside_meeting: Callable[[str, float], contextlib.AbstractContextManager[None]] | None = None
        self._identity = identify()
        self._set(self._key("process", rank), self._identity)

    def exchange(self, what: str, payload: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Returns every rank's payload, in rank order, once all ranks have come.

        RanksAbsent, which names them, if ranks did not come in time or have ended; also on a rank that comes after
        another has given up. CommunicatorError on every rank if purposes, ``what``, differ.
        """
        limit_s = timeout_s or self._timeout_s
        with self.beside_meeting(what, limit_s) if self.beside_meeting else contextlib.nullcontext():
            return self.exchange_at_once(what, payload, limit_s)

    def exchange_at_once(self, what: str, payload: bytes, timeout_s: float) -> list[bytes]:
        """As :meth:`exchange`, for ranks that are each known to come to this meeting, or to none."""
        meeting, self._meetings = self._meetings, self._meetings + 1
        if meeting > 1:  # all ranks came to the last meeting, so they have read the one before
            self._delete(self._key(meeting - 2, self.rank))
        return self._meet(meeting, what, payload, timeout_s)

    def close(self, step: int) -> None:
        """Meets for step ``step`` of closing; RanksAbsent if ranks did not come in time, or have ended.

        The key is the step, not the count of meetings, so ranks that failed earlier and met less often can take part.
        """
        self._meet(f"closing {step}", "closing", b"", self._timeout_s)

    def agree(self, what: str, step: Callable[[], T]) -> T:
        """Runs ``step`` on every rank and returns its result. If it raises on one rank, all ranks raise.

        A rank raises its own error again, or CommunicatorError, which names the ranks that failed and their errors.
        """
        result, error = None, None
        try:
            result = step()
        except Exception as caught:
            error = caught
        words = self.exchange(what, f"{type(error).__name__}: {error}".encode() if error else b"")
        failed = [f"rank {r}: {word.decode()}" for r, word in enumerate(words) if word]
        if error is not None:
            raise error
        if failed:
            raise CommunicatorError(f"{what} failed on another rank\n" + "\n".join(failed))
        return cast("T", result)

    def agree_on_none(self, what: str, problem: Reason | None) -> None:
        """Raises UnsupportedError on every rank if any rank has a ``problem``."""
        words = self.exchange(what, (problem or "").encode())
        for rank, word in enumerate(words):
            if word:
                raise UnsupportedError(f"rank {rank}: {word.decode()}" if len(words) > 1 else word.decode())

    def publish(self, name: str, words: str) -> None:
        """Stores this rank's ``words`` for all ranks under ``name``, if the store can be reached. Does not wait."""
        with contextlib.suppress(CommunicatorError):
            self._set(self._key(name, self.rank), words)

    def published(self, name: str, rank: int) -> str | None:
        """Returns what a rank published under ``name``; None if nothing was, or the store cannot be reached."""
        with contextlib.suppress(CommunicatorError):
            words = self._look(self._key(name, rank))
            return None if words is None else words.decode()

    def withdraw(self, name: str) -> None:
        """Deletes what this rank published under ``name``, if the store can be reached."""
        with contextlib.suppress(CommunicatorError):
            self._delete(self._key(name, self.rank))

    def note(self, what: str, gave_up: bool = False) -> None:
        """Records what this rank does next, for ranks that may time out waiting for it. Does not wait."""
        self._notes += 1
        word = [self.prefix, self._processes, self._notes, what, gave_up, self._identity]
        self._ask(lambda store: store.set(_word_of(self._processes[self.rank]), json.dumps(word)))

    def last_words(self) -> list[LastWord]:
        """Returns the last call that each rank recorded, in this communicator or another."""
        try:
            return [self._last_word(rank) for rank in range(self.world_size)]
        except CommunicatorError:
            return [LastWord("unknown, without the process group's store", behind=False, ended=False)] * self.world_size

    def _last_word(self, rank: int) -> LastWord:
        key = _word_of(self._processes[rank])
        raw = self._look(key)
        if raw is None:
            return LastWord("no call known", behind=True, ended=rank in self.ended())
        ended = has_ended(json.loads(raw)[-1])
        if ended:
            raw = self._look(key) or raw  # the process has ended, so this record is final
        prefix, processes, notes, what, gave_up, _ = json.loads(raw)
        if prefix != self.prefix:
            what = f"{what}, in another communicator, between ranks {processes} of the default group"
        return LastWord(what, prefix != self.prefix or notes < self._notes, ended, gave_up)

    def name(self, what: str, ranks: Sequence[int]) -> str:
        """Returns a name for an object that some ranks share. After the next meeting the name is not used again."""
        return f"{self.prefix}/{self._meetings}/{what}/{'-'.join(map(str, ranks))}"

    def leave(self) -> None:
        """Drops the store. Methods that need it raise CommunicatorError from now on. Does not wait for other ranks."""
        if self._store is not None and self.is_served():
            with contextlib.suppress(CommunicatorError):
                self._ask(self._give_keys_back)
        self._store = None

    def _give_keys_back(self, store: Store) -> None:
        """Deletes the keys of all ranks, if all others have left: until then they may read them."""
        count, told = f"{self.prefix}/left", [self._key("left", rank) for rank in range(self.world_size)]
        store.set(told[self.rank], json.dumps([*self._keys]))
        if store.add(count, 1) == self.world_size:
            of_ranks = [json.loads(keys) for keys in store.multi_get(told)]
            for key in (*itertools.chain(*of_ranks), *told, count):
                store.delete_key(key)

    def ended(self) -> list[int]:
        """Returns the ranks whose processes are known to have ended."""
        identities = [self._look(self._key("process", rank)) for rank in range(self.world_size)]
        return [rank for rank, raw in enumerate(identities) if raw is not None and has_ended(raw.decode())]

    def _meet(self, meeting: object, what: str, payload: bytes, timeout_s: float) -> list[bytes]:
        keys = [self._key(meeting, rank) for rank in range(self.world_size)]
        self._set(keys[self.rank], what.encode() + _SEPARATOR + payload)
        begin = time.monotonic()
        try:
            self._wait(what, keys, timeout_s)
        except RanksAbsent as error:
            if self._outcome(meeting, str(error)) != _MET:
                raise
        else:
            if (outcome := self._outcome(meeting, _MET)) != _MET:
                raise RanksAbsent(f"{what}: rank {self.rank} came too late: {outcome}")
        finally:
            self.waited_s += time.monotonic() - begin
        self.has_met = True
        said = [word.partition(_SEPARATOR) for word in self._ask(lambda store: store.multi_get(keys))]
        purposes = [purpose.decode() for purpose, _, _ in said]
        if len(set(purposes)) > 1:
            raise CommunicatorError(
                "ranks must make the same graphar calls in the same order, got\n"
                + "\n".join(f"rank {rank}: {purpose}" for rank, purpose in enumerate(purposes))
            )
        return [payload for _, _, payload in said]

    def _outcome(self, meeting: object, words: str) -> str:
        """Returns what the first rank said became of a meeting: ``words``, if that is this one.

        Otherwise a rank that comes just after another has given up would take the meeting for held.
        """
        if not isinstance(meeting, int):  # ranks that close do not need each other
            return words
        key, said = f"{self.prefix}/outcome", ""  # of the last meeting, with its number
        self._keys.add(key)
        while (number := int(said.partition(" ")[0] or -1)) < meeting:
            said = self._ask(lambda store, said=said: store.compare_set(key, said, f"{meeting} {words}")).decode()
        return _MET if number > meeting else said.partition(" ")[2]

    def _wait(self, what: str, keys: list[str], timeout_s: float) -> None:
        # The store's own wait does not notice ended ranks, and torch prints a warning when it expires.
        begin = looked = time.monotonic()
        while not self._ask(lambda store: store.check(keys)):
            now = time.monotonic()
            late = now - begin >= timeout_s
            if late or now - looked > _LIVENESS_S:
                looked, absent = now, [rank for rank, key in enumerate(keys) if self._look(key) is None]
                ended = [rank for rank in self.ended() if rank in absent]
                if absent and (late or absent == ended):
                    raise RanksAbsent(self._complaint(what, absent, ended, timeout_s), absent, ended)
            time.sleep(min(_LONGEST_PAUSE_S, (now - begin) / 10))

    def _complaint(self, what: str, absent: list[int], ended: list[int], timeout_s: float) -> str:
        if absent == ended:
            return f"{what}: rank {self.rank} waits for rank(s) {absent}, whose process has ended"
        hint = f" (rank(s) {ended} have ended)" if ended else ""
        return (
            f"{what}: rank {self.rank} waited {timeout_s:g} s for rank(s) {absent}{hint}; every rank of the group must "
            "make the same graphar calls in the same order"
        )

    def _key(self, meeting: object, rank: object) -> str:
        return f"{self.prefix}/{meeting}/{rank}"

    def _look(self, key: str) -> bytes | None:
        # get() waits for a key that another rank deletes after a check. This sets nothing, and answers at once.
        value = self._ask(lambda store: store.compare_set(key, _NOTHING, _NOTHING))
        return None if value == _NOTHING.encode() else value

    def _delete(self, key: str) -> None:
        self._keys.discard(key)
        self._ask(lambda store: store.delete_key(key))

    def _set(self, key: str, value: Any) -> None:
        self._keys.add(key)
        self._ask(lambda store: store.set(key, value))

    def _ask(self, question: Callable[[Store], T]) -> T:
        if self._store is None:
            raise CommunicatorError(f"rank {self.rank} left the store: its group was destroyed, or communicator closed")
        try:
            return question(self._store)
        except Exception as error:  # torch raises many types
            raise CommunicatorError(
                f"rank {self.rank} does not reach the process group's store; has the process that serves it ended? "
                f"({error})"
            ) from error


def exchange_json(rendezvous: StoreRendezvous, what: str, facts: object) -> list[Any]:
    """Returns every rank's ``facts``, which become JSON, in rank order: see :meth:`StoreRendezvous.exchange`."""
    return [json.loads(word) for word in rendezvous.exchange(what, json.dumps(facts).encode())]


class Alone(StoreRendezvous):
    """The rendezvous of a process that holds all ranks. It returns at once."""

    def __init__(self) -> None:
        super().__init__(HashStore(), "alone", 0, 1, 1.0)


def _word_of(process: int) -> str:
    return f"last word/{process}"


def meet(group: dist.ProcessGroup, timeout_s: float) -> StoreRendezvous:
    """Returns a new rendezvous of a group's ranks. All ranks must make theirs in the same order. Does not wait."""
    processes = dist.get_process_group_ranks(group)
    prefix = f"graphar/{group.group_name}/{'-'.join(map(str, processes))}"
    # Make another store object, because the registry watches when torch drops the one that it holds with the group.
    default = dist.distributed_c10d._get_default_store()
    store, known = PrefixStore("graphar", default), weakref.ref(default)
    counts = _made.setdefault(default, Counter())
    counts[prefix] += 1
    made = StoreRendezvous(store, f"{prefix}/{counts[prefix]}", group.rank(), group.size(), timeout_s, processes)
    # The store of an ended default group may be served no more, and its keys end with it.
    made.is_served = lambda: dist.is_initialized() and dist.distributed_c10d._get_default_store() is known()
    return made

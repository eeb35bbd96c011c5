"""How the ranks of a group meet outside their kernels: small messages through the group's store, in bounded time."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from graphar.errors import CommunicatorError, UnsupportedError
from graphar.ranks.processes import has_ended, identify

T = TypeVar("T")

_SEPARATOR = b"\0"  # between what a rank does and its payload
_LONGEST_PAUSE_S = 0.02  # between two looks into the store
_LIVENESS_S = 0.5  # between two looks whether an absent rank's process still runs
_made: Counter[str] = Counter()  # rendezvous by group and ranks, so that each has keys of its own in the store


class RanksAbsent(CommunicatorError):
    """Ranks did not come to a meeting.

    Attributes:
        absent: these ranks.
        ended: those of them whose processes are known to have ended.
    """

    def __init__(self, message: str, absent: Sequence[int] = (), ended: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.absent, self.ended = list(absent), list(ended)


@dataclass(frozen=True)
class LastWord:
    """What a rank was last known to do.

    Attributes:
        what: in words.
        behind: whether it has not come as far as the rank that asks.
        ended: whether its process is known to have ended.
        gave_up: whether it has itself waited in vain, for another rank.
    """

    what: str
    behind: bool
    ended: bool
    gave_up: bool = False

    def __str__(self) -> str:
        return f"{self.what}; its process has ended" if self.ended else self.what


class Alone:
    """The rendezvous of a process that holds all ranks itself."""

    rank = 0
    world_size = 1

    def exchange(self, what: str, payload: bytes) -> list[bytes]:
        return [payload]

    def agree(self, what: str, step: Callable[[], T]) -> T:
        return step()

    def agree_on_none(self, what: str, problem: str) -> None:
        if problem:
            raise UnsupportedError(problem)

    def close(self, step: int) -> None:
        pass

    def ended(self) -> list[int]:
        return []


class StoreRendezvous:
    """The ranks of a process group, met through torch.distributed's store.

    Args:
        store: a store every rank of the group reaches.
        prefix: what the keys begin with; the same on every rank, and new for every communicator.
        rank: this process.
        world_size: how many processes take part.
        timeout_s: how long one meeting may take, in seconds.
        processes: the ranks' numbers in the default group; None: the same ones.
    """

    def __init__(
        self,
        store,
        prefix: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        processes: Sequence[int] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._prefix, self._timeout_s = store, prefix, timeout_s
        self._processes = list(range(world_size) if processes is None else processes)
        self._meetings = self._notes = 0
        self._identity = identify()
        self._set(self._key("process", rank), self._identity)

    def exchange(self, what: str, payload: bytes, timeout_s: float | None = None) -> list[bytes]:
        """Every rank's payload, in rank order; returns on no rank before all have come.

        Args:
            what: what the ranks meet for, in words; the same on every rank.
            payload: this rank's message; an empty one arrives as one zero byte.
            timeout_s: how long it may take, in seconds; None: as long as any meeting.

        Raises:
            RanksAbsent: naming the ranks that did not come in time, or have ended.
            CommunicatorError: on every rank, where they came for different things, saying who for what.
        """
        meeting, self._meetings = self._meetings, self._meetings + 1
        if meeting > 1:  # every rank that has come to the last meeting has read what was said at the one before
            self._ask(lambda: self._store.delete_key(self._key(meeting - 2, self.rank)))
        return self._meet(meeting, what, payload, timeout_s or self._timeout_s)

    def close(self, step: int) -> None:
        """One of the last meetings, by number: ranks find it that failed on the way and met less often than others.

        Raises:
            RanksAbsent: as :meth:`exchange`.
        """
        self._meet(f"closing {step}", "closing", b"", self._timeout_s)

    def agree(self, what: str, step: Callable[[], T]) -> T:
        """Runs ``step`` on every rank; where it fails on one it fails on all, each naming who and why."""
        error: Exception | None = None
        try:
            result = step()
        except Exception as caught:
            error = caught
        words = self.exchange(what, f"{type(error).__name__}: {error}".encode() if error else b"\0")
        failed = [f"rank {r}: {word.decode()}" for r, word in enumerate(words) if word != b"\0"]
        if error is not None:
            raise error
        if failed:
            raise CommunicatorError(f"{what} failed on another rank\n" + "\n".join(failed))
        return result

    def agree_on_none(self, what: str, problem: str) -> None:
        """Goes on where no rank has a ``problem``: "" is none. Otherwise raises UnsupportedError, on every rank."""
        for rank, word in enumerate(self.exchange(what, problem.encode())):
            if word != b"\0":
                raise UnsupportedError(f"rank {rank}: {word.decode()}")

    # ---- what ranks leave word of -----------------------------------------------------------------------------------

    def note(self, what: str, gave_up: bool = False) -> None:
        """Leaves word of what this rank does next, for ranks that may wait for it in vain. Waits for nobody."""
        self._notes += 1
        word = [self._prefix, self._processes, self._notes, what, gave_up, self._identity]
        self._set(_word_of(self._processes[self.rank]), json.dumps(word))

    def last_words(self) -> list[LastWord]:
        """What each rank was last known to do, in this communicator or another."""
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
            raw = self._look(key)  # only now the last one for certain
        prefix, processes, notes, what, gave_up, _ = json.loads(raw)
        if prefix != self._prefix:
            what = f"{what}, in another communicator, between ranks {processes} of the default group"
        return LastWord(what, prefix != self._prefix or notes < self._notes, ended, gave_up)

    def name(self, what: str, ranks: Sequence[int]) -> str:
        """A name for what some of these ranks share, which none gives again: not this one either, after it has met."""
        return f"{self._prefix}/{self._meetings}/{what}/{'-'.join(map(str, ranks))}"

    def leave(self) -> None:
        """Lets go of the store: whatever needs it raises CommunicatorError from now on."""
        self._store = None

    def ended(self) -> list[int]:
        """The ranks whose processes are known to have ended."""
        identities = [self._look(self._key("process", rank)) for rank in range(self.world_size)]
        return [rank for rank, one in enumerate(identities) if one is not None and has_ended(one.decode())]

    # ---- the store --------------------------------------------------------------------------------------------------

    def _meet(self, meeting: object, what: str, payload: bytes, timeout_s: float) -> list[bytes]:
        keys = [self._key(meeting, rank) for rank in range(self.world_size)]
        self._set(keys[self.rank], what.encode() + _SEPARATOR + (payload or b"\0"))
        self._wait(what, keys, timeout_s)
        said = [word.partition(_SEPARATOR) for word in self._ask(lambda: self._store.multi_get(keys))]
        purposes = [purpose.decode() for purpose, _, _ in said]
        if len(set(purposes)) > 1:
            raise CommunicatorError(
                "ranks must make the same graphar calls in the same order, got\n"
                + "\n".join(f"rank {rank}: {purpose}" for rank, purpose in enumerate(purposes))
            )
        return [payload for _, _, payload in said]

    def _wait(self, what: str, keys: list[str], timeout_s: float) -> None:
        # Not the store's own wait, which knows of no rank that has ended, and torch warns of each that is in vain.
        begin = looked = time.monotonic()
        while not self._ask(lambda: self._store.check(keys)):
            now = time.monotonic()
            late = now - begin >= timeout_s
            if late or now - looked > _LIVENESS_S:
                looked, absent = now, self._absent(keys)
                ended = [rank for rank in self.ended() if rank in absent]
                if absent and (late or absent == ended):
                    raise RanksAbsent(self._complaint(what, absent, ended, timeout_s), absent, ended)
            time.sleep(min(_LONGEST_PAUSE_S, (now - begin) / 10))

    def _absent(self, keys: list[str]) -> list[int]:
        return [rank for rank, key in enumerate(keys) if not self._ask(lambda key=key: self._store.check([key]))]

    def _complaint(self, what: str, absent: list[int], ended: list[int], timeout_s: float) -> str:
        if absent == ended:
            return f"{what}: rank {self.rank} waits for rank(s) {absent}, whose process has ended"
        hint = f", of which {ended} have ended" if ended else ""
        return (
            f"{what}: rank {self.rank} waited {timeout_s:g} s for rank(s) {absent}{hint}; every rank of the group must "
            "make the same graphar calls in the same order"
        )

    def _key(self, meeting: object, rank: int) -> str:
        return f"{self._prefix}/{meeting}/{rank}"

    def _look(self, key: str) -> bytes | None:
        return self._ask(lambda: self._store.get(key) if self._store.check([key]) else None)

    def _set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def _ask(self, question: Callable[[], T]) -> T:
        if self._store is None:
            raise CommunicatorError(f"rank {self.rank} left the store: its group was destroyed, or communicator closed")
        try:
            return question()
        except Exception as error:  # torch's, of many types
            raise CommunicatorError(
                f"rank {self.rank} does not reach the process group's store; has the process that serves it ended? "
                f"({error})"
            ) from error


def _word_of(process: int) -> str:
    return f"last word/{process}"


def meet(group: dist.ProcessGroup, timeout_s: float) -> StoreRendezvous:
    """A new rendezvous of a group's ranks, who must make theirs in the same order. Waits for nobody."""
    processes = dist.get_process_group_ranks(group)
    prefix = f"graphar/{group.group_name}/{'-'.join(map(str, processes))}"
    _made[prefix] += 1
    # A store object of its own: the registry has to see the end of the one that torch keeps as long as the group.
    store = dist.PrefixStore("graphar", dist.distributed_c10d._get_default_store())
    return StoreRendezvous(store, f"{prefix}/{_made[prefix]}", group.rank(), group.size(), timeout_s, processes)

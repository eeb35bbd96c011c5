"""How the ranks of a group meet outside their kernels: small messages through the group's store, in bounded time."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from graphar.errors import CommunicatorError, UnsupportedError

T = TypeVar("T")


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


class StoreRendezvous:
    """The ranks of a process group, met through torch.distributed's store.

    Args:
        store: a store every rank of the group reaches.
        prefix: what the keys begin with; the same on every rank, and new for every communicator.
        rank: this process.
        world_size: how many processes take part.
        timeout_s: how long one meeting may take, in seconds.
    """

    def __init__(self, store, prefix: str, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank, self.world_size = rank, world_size
        self._store, self._prefix, self._timeout_s = store, prefix, timeout_s
        self._meetings = 0

    def exchange(self, what: str, payload: bytes) -> list[bytes]:
        """Every rank's payload, in rank order; returns on no rank before all have come.

        Raises:
            CommunicatorError: naming the ranks that did not come in time.
        """
        keys = [f"{self._prefix}/{self._meetings}/{r}" for r in range(self.world_size)]
        self._meetings += 1
        self._store.set(keys[self.rank], payload or b"\0")
        deadline = time.monotonic() + self._timeout_s
        for key in keys:
            self._wait(what, key, keys, deadline - time.monotonic())
        return [self._store.get(key) for key in keys]

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

    def _wait(self, what: str, key: str, keys: list[str], seconds: float) -> None:
        try:
            self._store.wait([key], timedelta(seconds=max(seconds, 0.001)))
        except Exception as caught:
            absent = [r for r, k in enumerate(keys) if not self._store.check([k])]
            raise CommunicatorError(
                f"{what}: rank {self.rank} waited {self._timeout_s:g} s for rank(s) {absent}; every rank of the group "
                "must make the same graphar calls in the same order"
            ) from caught

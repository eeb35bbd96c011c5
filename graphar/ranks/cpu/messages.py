"""Messages between the ranks of a gloo group. The first message of a call compares the calls of all ranks.

    every rank -> every other rank    header | this rank's tensor, if it is small

A header is the number of the call and a hash of the call in words, so a call that repeats needs no message besides its
data. gloo puts a message into any buffer that is large enough for it: ranks that disagree on the size of a small tensor
still read each other's headers. Larger data travel in messages of their own, tagged by the header, or behind it.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import time
import zlib
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

SMALL_NBYTES = 256 << 10  # of a tensor that travels behind the header
_HEADER_NBYTES = 64  # a multiple of every dtype's size, so that the tensor behind it is aligned


class GroupFailed(Exception):
    """A rank of the process group failed, or did not take part in time. The message is torch's.

    The ranks ``absent`` are known not to have made the call; None: nothing is known. The wait that failed began at
    ``begin``, by time.monotonic(); None: with the call.
    """

    def __init__(self, message: str, absent: Collection[int] | None = None, begin: float | None = None) -> None:
        super().__init__(message)
        self.absent, self.waited_s = absent, None if begin is None else time.monotonic() - begin


class Pending:
    """Messages that are under way: waits as torch.distributed's Work does.

    Args:
        receives: the messages to this rank, by the rank that sends.
        failure: the error by which a message could not be started.
    """

    def __init__(
        self, receives: dict[int, dist.Work], sends: Sequence[dist.Work], failure: RuntimeError | None = None
    ) -> None:
        self._receives, self._sends, self._failure = receives, sends, failure
        self.arrived: set[int] = set()  # the ranks whose messages have come

    def wait(self, timeout: timedelta) -> None:
        """Waits for all messages; RuntimeError if a rank failed, or was not done in time."""
        if self._failure:
            raise self._failure
        end = time.monotonic() + timeout.total_seconds()
        for peer, work in self._receives.items():
            work.wait(deadline(end - time.monotonic()))
            self.arrived.add(peer)
        for work in self._sends:
            work.wait(deadline(end - time.monotonic()))

    def look(self) -> None:
        """Finds after a failure which other messages had come."""
        for peer, work in self._receives.items():
            if peer not in self.arrived:
                with contextlib.suppress(RuntimeError):
                    work.wait(deadline(0.0))
                    self.arrived.add(peer)


def deadline(seconds: float) -> timedelta:
    """Returns a deadline for gloo, which counts whole milliseconds, and takes 0 for none: not before ``seconds``."""
    return timedelta(milliseconds=max(1, math.ceil(seconds * 1e3)))


class Messages:
    """The messages of one communicator over gloo. They meet no messages of other communicators of the group.

    It has those methods of a process group that :mod:`graphar.ranks.cpu.fallback` calls.

    Args:
        gloo: the group's backend for CPU tensors.
        name: the communicator's name, equal on every rank and unlike the names of all other communicators.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, name: str) -> None:
        self._gloo, self._rank, self._world_size = gloo, gloo.rank(), gloo.size()
        self.peers = [(gloo.rank() + step) % gloo.size() for step in range(1, gloo.size())]
        self._tag = zlib.crc32(f"graphar {name}".encode()) >> 1  # gloo's tags are not negative
        self._letters = [bytearray(_HEADER_NBYTES + SMALL_NBYTES) for _ in range(gloo.size())]
        with torch.inference_mode(False):  # else no call outside of that mode could write into them
            self._tensors = [torch.frombuffer(letter, dtype=torch.uint8) for letter in self._letters]
        self._own, self._incoming = self._tensors[self._rank], {peer: self._tensors[peer] for peer in self.peers}
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._pending: Pending | None = None  # the headers
        self._under_way: list[tuple[int, dist.Work]] = []  # with the rank of each; sent before the headers came
        self._header, self._sequence = b"", 0  # of a call that has sent none
        self._if_unlike: Callable[[int], None] = lambda sequence: None

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world_size

    def _get_backend(self, device: torch.device) -> dist.ProcessGroupGloo:
        return self._gloo

    def let_go_of_group(self) -> None:
        """Drops gloo, and with it the group's store. No call follows."""
        self._gloo = self._pending = None
        self._under_way, self._if_unlike = [], lambda sequence: None  # the latter refers to this object's owner

    # ---- headers ----------------------------------------------------------------------------------------------------

    def begin(self, words_hash: bytes, sequence: int, if_unlike: Callable[[int], None]) -> None:
        """Begins a call, whose first message brings a header.

        If ranks begin different calls, that message runs ``if_unlike(sequence)`` on each of them, which raises their
        error unless the call sends nothing else.
        """
        self._header, self._sequence, self._if_unlike = words_hash, sequence, if_unlike

    def behind_headers(self, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        """Returns where a tensor of each rank lies behind its header: this rank's before agreement, all of them after.

        It has at most SMALL_NBYTES bytes.
        """
        end = _HEADER_NBYTES + numel * dtype.itemsize
        with torch.inference_mode(False):
            return [one[_HEADER_NBYTES:end].view(dtype) for one in self._tensors]

    def agree(self, timeout_s: float, nbytes: int = 0) -> None:
        """Returns once all ranks have begun this call. Brings ``nbytes`` bytes of each behind its header.

        Raises:
            GroupFailed: a header did not come within ``timeout_s`` seconds.
        """
        self.announce(nbytes)
        self.await_headers(timeout_s)

    def announce(self, nbytes: int = 0) -> None:
        """Begins to exchange headers, with ``nbytes`` bytes behind each."""
        self._sent, self._header = self._header + self._sequence.to_bytes(8, "little"), b""
        self._letters[self._rank][: len(self._sent)] = self._sent
        self._tag_of_call = zlib.crc32(self._sent, self._tag) >> 1
        sent = dict.fromkeys(self.peers, self._own[: _HEADER_NBYTES + nbytes])
        self._pending = self._start(self._incoming, sent, self._tag)

    def await_headers(self, timeout_s: float) -> None:
        """Returns once all ranks are known to have announced this call; raises what :meth:`agree` raises."""
        pending, self._pending = self._pending, None
        under_way, self._under_way = self._under_way, []
        begin = time.monotonic()
        try:
            pending.wait(deadline(timeout_s))
        except RuntimeError as error:
            pending.look()
            absent = [peer for peer in self.peers if peer not in pending.arrived]
            raise GroupFailed(str(error), absent, begin) from error
        unlike = [peer for peer in self.peers if not self._letters[peer].startswith(self._sent)]
        if unlike:
            # What began between ranks that agree must end: gloo cannot take back half a message.
            self.wait([work for peer, work in under_way if peer not in unlike], timeout_s)
            self._if_unlike(self._sequence)

    def scratch(self, like: torch.Tensor) -> dict[int, torch.Tensor]:
        """Returns memory for a tensor like ``like`` from every other rank. It is used again by the next call."""
        nbytes = -(-like.nbytes // _HEADER_NBYTES) * _HEADER_NBYTES  # aligned for every dtype
        if self._scratch.numel() < len(self.peers) * nbytes:
            with torch.inference_mode(False):
                self._scratch = torch.empty(len(self.peers) * nbytes, dtype=torch.uint8)
        rows = {peer: self._scratch[at * nbytes :][: like.nbytes] for at, peer in enumerate(self.peers)}
        return {peer: row.view(like.dtype) for peer, row in rows.items()}

    # ---- data ---------------------------------------------------------------------------------------------------

    def receive(self, x: torch.Tensor, peer: int) -> dist.Work:
        """Begins to receive the next message of this call from a rank. GroupFailed if the connection is broken.

        Other calls have other messages: ranks that disagree do not receive each other's.
        """
        return self._begin(self._gloo.recv, x, peer)

    def send(self, x: torch.Tensor, peer: int) -> dist.Work:
        """Begins to send the next message of this call to a rank. GroupFailed if the connection is broken."""
        return self._begin(self._gloo.send, x, peer)

    def _begin(self, start: Callable[..., dist.Work], x: torch.Tensor, peer: int) -> dist.Work:
        try:
            work = start([x], peer, self._tag_of_call)
        except RuntimeError as error:
            raise GroupFailed(str(error), begin=time.monotonic()) from error
        if self._pending:
            self._under_way.append((peer, work))
        return work

    def wait(self, works: Sequence[dist.Work], timeout_s: float) -> None:
        """Waits for messages; GroupFailed if a rank failed, or was not done within ``timeout_s`` seconds."""
        begin = time.monotonic()
        try:
            for work in works:
                work.wait(deadline(begin + timeout_s - time.monotonic()))
        except RuntimeError as error:
            raise GroupFailed(str(error), begin=begin) from error

    # ---- data, as a process group's methods -------------------------------------------------------------------------

    def alltoall_base(self, received: torch.Tensor, sent: torch.Tensor, *given) -> Pending:
        if self._header:
            self.agree(given[-1].timeout.total_seconds())
        theirs, mine = received.chunk(self._world_size), sent.chunk(self._world_size)
        theirs[self._rank].copy_(mine[self._rank])
        return self._start(
            {peer: theirs[peer] for peer in self.peers}, {peer: mine[peer] for peer in self.peers}, self._tag
        )

    def allgather(self, received: Sequence[Sequence[torch.Tensor]], sent: Sequence[torch.Tensor], options) -> Pending:
        (theirs,), (mine,) = received, sent
        if self._header:
            small = self.behind_headers(torch.uint8, mine.numel()) if mine.numel() <= SMALL_NBYTES else []
            if small:
                small[self._rank].copy_(mine)
            self.agree(options.timeout.total_seconds(), len(small) and mine.numel())
            for target, one in zip(theirs, small, strict=False):
                target.copy_(one)
            if small:
                return Pending({}, [])
        theirs[self._rank].copy_(mine)
        return self._start({peer: theirs[peer] for peer in self.peers}, dict.fromkeys(self.peers, mine), self._tag)

    def _start(self, received: dict[int, torch.Tensor], sent: dict[int, torch.Tensor], tag: int) -> Pending:
        gloo, receives, sends = self._gloo, {}, []
        try:
            for peer, one in received.items():
                receives[peer] = gloo.recv([one], peer, tag)
            for peer, one in sent.items():
                sends.append(gloo.send([one], peer, tag))
        except RuntimeError as error:  # a connection is broken
            return Pending(receives, sends, error)
        return Pending(receives, sends)


def hash_of(words: str) -> bytes:
    """Returns the hash of a call's words in a header."""
    return hashlib.blake2b(words.encode(), digest_size=16).digest()


def messages_of(group: dist.ProcessGroup, name: str) -> Messages | None:
    """Returns the messages of a communicator's ranks; None if the group has no gloo for CPU tensors."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    is_gloo = dist.is_gloo_available() and isinstance(backend, dist.ProcessGroupGloo)
    return Messages(backend, name) if is_gloo else None

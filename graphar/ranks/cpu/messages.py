"""Messages between the ranks of a gloo group. The first message of a call compares the calls of all ranks.

    every rank -> every other rank    header | this rank's tensor, if it is small

A header is the number of the call and a hash of the call in words, so a call that repeats needs no message besides its
data. gloo puts a message into any buffer that is large enough for it: ranks that disagree on the size of a small tensor
still read each other's headers. Larger data travel in messages of their own, tagged by the header, or behind it.

A large all-reduce is a two-shot, and a reduce-scatter its first step:

    every rank -> rank r              shard r of a chunk: tagged by the header, or behind it if it is small
    rank r -> every other rank        the sum of shard r, once all headers are known to be equal
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from graphar.ranks.cpu.reduction import Tensors
from graphar.ranks.cpu.transport import ROW_UNIT, Arriving, GroupFailed, Rooms, arriving, deadline, wait

SMALL_NBYTES = 256 << 10  # of a tensor that travels behind the header
_HEADER_NBYTES = 64  # a multiple of every dtype's size, so that the tensor behind it is aligned
_KEPT_VIEWS = 64


class Messages:
    """The transport of one communicator over gloo. ``name`` tells its messages from other communicators'."""

    small_nbytes, chunk_nbytes = SMALL_NBYTES, 64 << 20
    two_shot_nbytes = 8 << 20  # a communicator keeps memory for this rank's shards of two chunks of each other rank

    def __init__(self, gloo: Any, name: str) -> None:  # torch types few of its methods
        self._gloo: Any = gloo
        self._rank, self.world_size = gloo.rank(), gloo.size()
        self.ranks = (self._rank,)
        self.peers: list[int] = [(gloo.rank() + step) % gloo.size() for step in range(1, gloo.size())]
        self._tag = zlib.crc32(f"graphar {name}".encode()) >> 1  # gloo's tags are not negative
        self._letters = [bytearray(_HEADER_NBYTES + SMALL_NBYTES) for _ in range(gloo.size())]
        with torch.inference_mode(False):  # else no call outside of that mode could write into them
            self._tensors = [torch.frombuffer(letter, dtype=torch.uint8) for letter in self._letters]
        self._behind_headers = functools.lru_cache(_KEPT_VIEWS)(partial(_behind_headers, self._tensors))
        self._scratch = [torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)]
        # The headers that are under way: receives by rank, sends, and the error by which one could not be started.
        self._pending: tuple[dict[int, dist.Work], list[dist.Work], RuntimeError | None] | None = None
        self._under_way: list[tuple[int, dist.Work]] = []  # with the rank of each; sent before the headers came
        self._header, self._sequence = b"", 0  # of a call that has sent none
        self._if_unlike: Callable[[int], None] = lambda sequence: None

    def let_go_of_group(self) -> None:
        """Drops gloo, and with it the group's store. No call follows."""
        self._gloo = self._pending = None
        self._under_way, self._if_unlike = [], lambda sequence: None  # the latter refers to this object's owner

    def begin(self, words_hash: bytes, sequence: int, timeout_s: float, if_unlike: Callable[[int], None]) -> None:
        """Begins a call, whose first message brings a header. ``timeout_s`` is the deadline of each of its waits.

        If ranks begin different calls, each runs ``if_unlike(sequence)``, which raises unless nothing else is sent.
        """
        self._header, self._sequence = words_hash, sequence
        self._timeout_s, self._if_unlike = timeout_s, if_unlike

    def agree(self, nbytes: int = 0) -> None:
        """Returns once all ranks have begun this call. Brings ``nbytes`` bytes of each behind its header."""
        self.announce(nbytes)
        self.await_headers()

    def announce(self, nbytes: int = 0, parts: Tensors = ()) -> None:
        """Begins to exchange headers, with ``nbytes`` bytes behind each, or with a part for each rank."""
        self._sent, self._header = self._header + self._sequence.to_bytes(8, "little"), b""
        self._letters[self._rank][: len(self._sent)] = self._sent
        self._tag_of_call = zlib.crc32(self._sent, self._tag) >> 1
        mine = self._tensors[self._rank][: _HEADER_NBYTES + nbytes]
        letters = {peer: torch.cat([mine, parts[peer]]) if parts else mine for peer in self.peers}
        receives, sends, failure = {}, [], None
        try:
            for peer in self.peers:
                receives[peer] = self._gloo.recv([self._tensors[peer]], peer, self._tag)
            for peer, letter in letters.items():
                sends.append(self._gloo.send([letter], peer, self._tag))
        except RuntimeError as error:  # a connection is broken
            failure = error
        self._pending = receives, sends, failure

    def await_headers(self) -> None:
        """Returns once all ranks have announced this call; GroupFailed if one has not in time."""
        receives, sends, failure = self._pending or ({}, [], None)
        under_way, self._under_way, self._pending = self._under_way, [], None
        begin, arrived = time.monotonic(), set()
        end = begin + self._timeout_s
        try:
            if failure:
                raise failure
            for peer, work in receives.items():
                work.wait(deadline(end - time.monotonic()))
                arrived.add(peer)
            for work in sends:
                work.wait(deadline(end - time.monotonic()))
        except RuntimeError as error:
            for peer in receives.keys() - arrived:
                with contextlib.suppress(RuntimeError):
                    receives[peer].wait(deadline(0.0))
                    arrived.add(peer)
            raise GroupFailed(str(error), [peer for peer in self.peers if peer not in arrived], begin) from error
        unlike = [peer for peer in self.peers if not self._letters[peer].startswith(self._sent)]
        if unlike:
            # What began between ranks that agree must end: gloo cannot take back half a message.
            wait([work for peer, work in under_way if peer not in unlike], self._timeout_s)
            self._if_unlike(self._sequence)

    def gather(self, sent: Tensors, lengths: Sequence[int], rooms: Rooms = None) -> Arriving:
        (mine,), gloo = sent, self._gloo
        if self._header and max(lengths) * mine.element_size() <= SMALL_NBYTES:
            behind = self._behind_headers(mine.dtype, tuple(lengths))
            behind[self._rank].copy_(mine)
            self.agree(mine.nbytes)
            return lambda: [behind]
        if self._header:
            self.agree()
        if rooms is None:
            rooms = [[mine if rank == self._rank else mine.new_empty(length) for rank, length in enumerate(lengths)]]
        (received,) = rooms
        tag = zlib.crc32(b"gather", self._tag_of_call) >> 1
        moves = [self._post(gloo.recv, received[peer], peer, tag) for peer in self.peers if received[peer].numel()]
        moves += [self._post(gloo.send, mine, peer, tag) for peer in self.peers if mine.numel()]
        return arriving(partial(wait, moves, self._timeout_s), received)

    def exchange(self, sent: Sequence[Tensors], rooms: Rooms = None) -> Arriving:
        """Small parts travel behind the header, if the call has brought none yet, and others while headers do."""
        (mine,), rank, gloo = sent, self._rank, self._gloo
        received = rooms[0] if rooms else self._scratch_like(mine[rank])
        most = self.small_nbytes if self._header else 0  # of a part behind a header
        if self._header:
            self.announce(parts=[part[: part.numel() if part.numel() <= most else 0] for part in mine])
        tag, large = self._tag_of_call, [peer for peer in self.peers if received[peer].numel() > most]
        moves = [self._post(gloo.recv, received[peer], peer, tag) for peer in large]
        moves += [self._post(gloo.send, mine[peer], peer, tag) for peer in self.peers if mine[peer].numel() > most]
        if self._pending:
            self.await_headers()
        received[rank].copy_(mine[rank])
        for peer in set(self.peers) - set(large):
            received[peer].copy_(self._tensors[peer][_HEADER_NBYTES:][: received[peer].numel()])
        return arriving(partial(wait, moves, self._timeout_s), received)

    def _scratch_like(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Returns ``mine``, and memory like it for every other rank, which the exchange after the next uses again."""
        nbytes = -(-mine.nbytes // ROW_UNIT) * ROW_UNIT
        self._scratch.reverse()
        if self._scratch[0].numel() < len(self.peers) * nbytes:
            with torch.inference_mode(False):
                self._scratch[0] = torch.empty(len(self.peers) * nbytes, dtype=torch.uint8)
        rows = [self._scratch[0][at * nbytes :][: mine.nbytes] for at in range(len(self.peers))]
        return [*rows[: self._rank], mine, *rows[self._rank :]]

    def _post(self, start: Callable[..., dist.Work], x: torch.Tensor, peer: int, tag: int) -> dist.Work:
        """Begins a message of this call with a tag of its own. GroupFailed if the connection is broken.

        Other calls have other messages: ranks that disagree do not receive each other's.
        """
        try:
            work = start([x], peer, tag)
        except RuntimeError as error:
            raise GroupFailed(str(error), begin=time.monotonic()) from error
        if self._pending:
            self._under_way.append((peer, work))
        return work


def _behind_headers(letters: Tensors, dtype: torch.dtype, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Returns where a small tensor of each rank lies behind its header: this rank's before agreement, others' after."""
    ends = [_HEADER_NBYTES + length * dtype.itemsize for length in lengths]
    with torch.inference_mode(False):
        return [letter[_HEADER_NBYTES:end].view(dtype) for letter, end in zip(letters, ends, strict=True)]


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

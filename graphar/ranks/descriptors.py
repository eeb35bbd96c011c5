"""Passes file descriptors between the processes of a group, over Unix sockets between each pair of them.

A socket file is the only thing that the processes need in common: no namespace of process numbers or of IPC objects.
It lies in a directory that only its user may enter, and exists until all ranks have connected.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

DIRECTORY_SWITCH = "GRAPHAR_SOCKET_DIR"
_MOST_A_MESSAGE = 64  # descriptors; Linux takes at most 253
_LONGEST_PATH = 107  # bytes of a Unix socket's path, without the zero at its end
_WAIT_S = 10.0  # for a message that its sender is known to have sent
_RANK = struct.Struct("<I")  # the first message of a connection
_HEADER = struct.Struct("<QI")  # the number of the exchange, and how many descriptors the message has
_CREDENTIALS = struct.Struct("3i")  # process, user and group


class Channel:
    """Sockets between this process and the processes of the other ranks of a group.

    Making it binds a socket in :func:`directory`, whose path is ``address``; OSError, which says what to do, if that
    fails. Every rank then tells the others its address, calls :meth:`connect`, and meets them before it sends anything.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._sockets: dict[int, socket.socket] = {}  # by rank
        self.address = str(directory() / f"{os.getpid()}-{secrets.token_hex(8)}")
        self._listener = _socket()
        what, advice = f"no socket can be made in {Path(self.address).parent}", "name another directory in"
        with contextlib.ExitStack() as failing, _told(what, f"; {advice} {DIRECTORY_SWITCH}"):
            failing.callback(self._listener.close)
            with _reachable(self.address) as path:
                self._listener.bind(path)
            self._listener.listen(world_size)
            failing.pop_all()

    def connect(self, addresses: Sequence[str]) -> None:
        """Connects to the ranks above this one, whose sockets are bound. Does not wait for them."""
        for rank in range(self._rank + 1, self._world_size):
            made = self._sockets[rank] = _socket()
            what = f"the socket of rank {rank}, {addresses[rank]}, cannot be reached"
            advice = "ranks in containers must share a directory: name it in"
            with _told(what, f"; {advice} {DIRECTORY_SWITCH}"):
                with _reachable(_place_here(addresses[rank])) as path:
                    made.connect(path)
                made.sendall(_RANK.pack(self._rank))
            _check_user(made, rank)

    def _accept(self) -> None:
        """Accepts the connections of the ranks below this one, which have connected, and removes the socket file."""
        try:
            for _ in range(self._rank):
                made, _ = self._listener.accept()
                with contextlib.ExitStack() as failing:
                    failing.callback(made.close)
                    made.settimeout(_WAIT_S)
                    said = made.recv(_RANK.size)
                    if len(said) < _RANK.size:
                        raise OSError("a process connected to this rank's socket, and ended before it said its rank")
                    (rank,) = _RANK.unpack(said)
                    _check_user(made, rank)
                    self._sockets[rank] = made
                    failing.pop_all()
        finally:
            self._end_listening()

    def _end_listening(self) -> None:
        self._listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self.address)

    def send(self, exchange: int, descriptors: Sequence[int]) -> None:
        """Sends descriptors to every other rank, without waiting. ``exchange`` counts exchanges, failed ones too."""
        if self._listener.fileno() >= 0:
            self._accept()
        if len(self._sockets) < self._world_size - 1:
            raise OSError("the connections to the other ranks failed before")
        for rank, peer in self._sockets.items():
            for begin in range(0, len(descriptors), _MOST_A_MESSAGE):
                some = list(descriptors[begin : begin + _MOST_A_MESSAGE])
                with _told(f"sending file descriptors to rank {rank}"):
                    socket.send_fds(peer, [_HEADER.pack(exchange, len(some))], some)

    def receive(self, exchange: int, count: int) -> dict[int, list[int]]:
        """Returns the ``count`` descriptors that each other rank has sent in an exchange, by rank.

        Descriptors of earlier exchanges, which failed, are closed. The caller closes the others.
        """
        received: dict[int, list[int]] = {}
        try:
            for rank, peer in self._sockets.items():
                received[rank] = []
                while len(received[rank]) < count:
                    received[rank] += self._next(exchange, rank, peer)
        except BaseException:
            close_all([descriptor for of_rank in received.values() for descriptor in of_rank])
            raise
        return received

    def _next(self, exchange: int, rank: int, peer: socket.socket) -> list[int]:
        """Returns the descriptors of a rank's next message, or none if it is of an earlier exchange."""
        with _told(f"receiving file descriptors of rank {rank}"):
            header, descriptors, _, _ = socket.recv_fds(peer, _HEADER.size, _MOST_A_MESSAGE)
        if not header:
            raise OSError(f"receiving file descriptors of rank {rank}: it has closed its socket")
        its_exchange, sent = _HEADER.unpack(header)
        if its_exchange < exchange:
            close_all(descriptors)
            return []
        if len(descriptors) < sent:
            close_all(descriptors)
            raise OSError(f"receiving file descriptors of rank {rank}: this process may open no more (`ulimit -n`)")
        return descriptors

    def close(self) -> None:
        """Closes all sockets."""
        self._end_listening()
        for connected in self._sockets.values():
            connected.close()
        self._sockets = {}


def directory() -> Path:
    """Returns the directory of the sockets, which is made if it does not exist: mode 0700, of this process's user.

    It is the environment's GRAPHAR_SOCKET_DIR, or ``graphar-<user>`` in the directory for temporary files. OSError,
    which says what to do, if it cannot be made or another user may enter it.
    """
    user = os.geteuid()
    named = os.environ.get(DIRECTORY_SWITCH)
    path = Path(named).absolute() if named else Path(tempfile.gettempdir(), f"graphar-{user}")
    with _told(f"user {user} cannot make or find a directory of sockets", f"; name another in {DIRECTORY_SWITCH}"):
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != user or status.st_mode & 0o077:
        raise PermissionError(
            f"{path} is not trusted: it must be a directory of user {user} with mode 0700; name another in "
            f"{DIRECTORY_SWITCH}, such as a new one inside it"
        )
    return path


def _place_here(address: str) -> str:
    """Returns the path of a rank's socket in this process: containers may have the directory at different places."""
    here = directory() / Path(address).name
    return str(here) if here.exists() else address


def close_all(descriptors: Sequence[int]) -> None:
    """Closes file descriptors."""
    for descriptor in descriptors:
        os.close(descriptor)


@contextlib.contextmanager
def _told(what: str, advice: str = "") -> Iterator[None]:
    """Says in the OSError of a step what failed, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{what}: {error}{advice}") from error


@contextlib.contextmanager
def _reachable(path: str) -> Iterator[str]:
    """Yields a path of a socket that is short enough for one: a long one goes by a descriptor of its folder."""
    if len(os.fsencode(path)) <= _LONGEST_PATH:
        yield path
        return
    folder, name = os.path.split(path)
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # keeps the bounds of messages
    made.settimeout(_WAIT_S)
    return made


def _check_user(connected: socket.socket, rank: int) -> None:
    """Raises PermissionError unless the process of a rank belongs to this process's user."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    if user != os.geteuid():
        raise PermissionError(f"the process of rank {rank} belongs to user {user}, this one to user {os.geteuid()}")

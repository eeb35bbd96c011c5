"""File descriptors that processes pass to one another."""

import os
import resource
import socket
import stat
import tempfile
from pathlib import Path

import pytest

from graphar.ranks import descriptors
from graphar.ranks.descriptors import Channel


@pytest.fixture(autouse=True)
def folder(monkeypatch):
    """The directory of the sockets. Its path is short, so that a test can connect by it."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        path = Path(made, "sockets")
        monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(path))
        yield path


@pytest.fixture
def channels():
    """Makes the connected channels of some ranks, and closes them."""
    made = []

    def connect(world_size):
        made.extend(Channel(rank, world_size) for rank in range(world_size))
        for one in made:
            one.connect([each.address for each in made])
        return made

    yield connect
    for one in made:
        one.close()


def file_with(text):
    descriptor = os.memfd_create("test")
    os.write(descriptor, text.encode())
    return descriptor


def texts(received):
    """What the files of received descriptors hold, by rank; closes them."""
    found = {rank: [os.pread(one, 100, 0).decode() for one in ones] for rank, ones in received.items()}
    for ones in received.values():
        descriptors.close_all(ones)
    return found


def send_files(channel, exchange, words):
    files = [file_with(word) for word in words]
    channel.send(exchange, files)
    descriptors.close_all(files)


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_every_rank_gets_the_files_of_every_other_rank(channels, world_size):
    """One thread makes each step on all ranks in turn, so no step waits for another rank."""
    made = channels(world_size)

    for rank, one in enumerate(made):
        send_files(one, 1, [f"{rank} a", f"{rank} b"])

    for rank, one in enumerate(made):
        expected = {peer: [f"{peer} a", f"{peer} b"] for peer in range(world_size) if peer != rank}
        assert texts(one.receive(1, 2)) == expected


def test_more_files_than_one_message_takes_arrive_in_order(channels):
    a, b = channels(2)
    words = [str(number) for number in range(150)]

    for one in (a, b):
        send_files(one, 1, words)

    assert texts(b.receive(1, 150)) == {0: words}


def open_files():
    return len(os.listdir("/proc/self/fd"))


def test_files_of_an_exchange_that_failed_are_dropped(channels):
    a, b = channels(2)
    for one in (a, b):
        one.send(1, [])  # closes the socket that listened
    before = open_files()

    send_files(a, 2, ["of a failed exchange", "and another"])
    for one in (a, b):
        send_files(one, 3, ["of the next one"])

    assert texts(b.receive(3, 1)) == {0: ["of the next one"]}
    texts(a.receive(3, 1))
    assert open_files() == before


def lack_files(channel):
    """Receives where the process may open one file of three."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)  # files get the lowest numbers that are free
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, limits[1]))
    try:
        channel.receive(2, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# What rank 2 does, after which its exchange fails on rank 0, whose files of rank 1 have come.
FAILING = {
    "has ended": (lambda channel: channel.close(), lambda channel: channel.receive(2, 3), "it has closed its socket"),
    "is late": (lambda channel: None, lambda channel: channel.receive(2, 3), "timed out"),
    "sent too much": (lambda channel: send_files(channel, 2, "abc"), lack_files, "may open no more"),
}


@pytest.mark.parametrize("case", FAILING)
def test_files_of_an_exchange_that_fails_are_closed(channels, monkeypatch, case):
    act, receive, said = FAILING[case]
    made = channels(3)
    for one in made:
        one.send(1, [])
    for one in made[0]._sockets.values():
        one.settimeout(0.2)
    if case == "sent too much":
        made[0]._sockets = dict(reversed(made[0]._sockets.items()))
    before = open_files()
    send_files(made[1], 2, "abc")
    act(made[2])

    with pytest.raises(OSError, match=rf"receiving file descriptors of rank 2: .*{said}"):
        receive(made[0])

    ended = 2 if case == "has ended" else 0
    assert open_files() == before - ended


def test_no_socket_file_is_left_once_ranks_have_connected(channels, folder):
    made = channels(3)
    assert len(list(folder.iterdir())) == 3

    for one in made:
        one.send(1, [])

    assert list(folder.iterdir()) == []


def test_a_channel_that_was_never_used_leaves_a_directory_that_only_its_user_may_enter(folder):
    Channel(0, 2).close()

    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def link_elsewhere(folder):
    (folder.parent / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(folder.parent / "elsewhere")


def enter_by_all(mode):
    return lambda folder: (folder.mkdir(), folder.chmod(mode))


@pytest.mark.parametrize("make", [*map(enter_by_all, (0o755, 0o710, 0o777)), link_elsewhere])
def test_a_directory_that_others_may_enter_is_refused_and_so_is_a_link(folder, make):
    make(folder)

    with pytest.raises(PermissionError, match=r"is not trusted: .* with mode 0700; name another in GRAPHAR_SOCKET_DIR"):
        Channel(0, 2)


def test_a_directory_that_cannot_be_made_is_told_with_what_to_do(folder, monkeypatch):
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(folder / "a" / "b"))

    with pytest.raises(
        OSError, match=r"user \d+ cannot make or find .* No such file .*; name another in GRAPHAR_SOCKET"
    ):
        Channel(0, 2)


def test_a_socket_is_found_though_its_directory_has_another_path_on_its_rank(folder):
    made = [Channel(rank, 2) for rank in range(2)]
    made[0].connect([f"/another/place/{os.path.basename(one.address)}" for one in made])

    for one in made:
        send_files(one, 1, ["x"])

    assert texts(made[1].receive(1, 1)) == {0: ["x"]}
    for one in made:
        one.close()


def test_a_relative_directory_does_not_move_with_the_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", "relative")

    assert descriptors.directory() == tmp_path / "relative"


def test_a_path_that_is_too_long_for_a_socket_serves(monkeypatch, tmp_path, channels):
    deep = tmp_path / ("a" * 100)
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(deep))
    a, b = channels(2)

    for one in (a, b):
        send_files(one, 1, ["x"])

    assert [texts(one.receive(1, 1)) for one in (a, b)] == [{1: ["x"]}, {0: ["x"]}]
    assert list(deep.iterdir()) == []


def test_a_directory_without_room_is_told_with_what_to_do(monkeypatch):
    def refuse(self, address):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(descriptors.socket.socket, "bind", refuse)
    before = open_files()

    with pytest.raises(OSError, match=r"No space left on device; name another directory in GRAPHAR_SOCKET_DIR"):
        Channel(0, 2)
    assert open_files() == before


@pytest.mark.parametrize("absent", ["absent", "absent" * 30])
def test_a_socket_that_is_not_reached_is_told_with_what_containers_need(channels, folder, absent):
    before, one = open_files(), Channel(0, 2)

    with pytest.raises(OSError, match=r"the socket of rank 1, .* cannot be reached: .* must share a directory"):
        one.connect([one.address, str(folder / absent)])
    one.close()
    assert open_files() == before


def refuse_to_accept(monkeypatch, channel, peer):
    user = os.geteuid()
    monkeypatch.setattr(descriptors.os, "geteuid", lambda: user + 1)


def end_before_a_word(monkeypatch, channel, peer):
    peer.connect(channel.address)
    peer.close()


@pytest.mark.parametrize(
    ("act", "error", "said"),
    [
        (end_before_a_word, OSError, "a process connected to this rank's socket, and ended before it said its rank"),
        (refuse_to_accept, PermissionError, r"the process of rank 0 belongs to user \d+, this one to user"),
    ],
)
def test_a_connection_that_is_refused_is_closed(monkeypatch, folder, act, error, said):
    Channel(0, 2).close()
    before = open_files()
    other, peer = Channel(1, 2), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    act(monkeypatch, other, peer)
    if act is refuse_to_accept:
        peer.connect(other.address)
        peer.send((0).to_bytes(4, "little"))

    with pytest.raises(error, match=said):
        other.send(1, [])
    with pytest.raises(OSError, match="the connections to the other ranks failed before"):
        other.send(2, [])

    peer.close()
    assert open_files() == before
    assert list(folder.iterdir()) == []

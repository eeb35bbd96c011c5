"""Which ranks are on one host, by the names that they give it."""

import pytest

from graphar.ranks import hosts
from graphar.ranks.hosts import host, several_hosts


@pytest.fixture
def called(monkeypatch):
    """The name of this process's host, if the machine has such a name and GRAPHAR_SOCKET_DIR is such a directory."""

    def name(machine, directory=None):
        monkeypatch.setattr(hosts.socket, "gethostname", lambda: machine)
        monkeypatch.delenv("GRAPHAR_SOCKET_DIR", raising=False)
        if directory:
            monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(directory))
        return host()

    return name


def test_host_names_tell_hosts_apart(called):
    assert several_hosts([called("a"), called("a")]) is None
    said = several_hosts([called("a"), called("b")])
    assert said.startswith("the ranks are on 2 hosts by name, but on one machine; containers must share a directory: ")
    assert said.endswith("name it in GRAPHAR_SOCKET_DIR")


def test_a_common_directory_of_sockets_makes_one_host_of_two_names(called, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)

    assert several_hosts([called("a", tmp_path / "sockets"), called("b", tmp_path / "link" / "sockets")]) is None


def test_two_directories_are_two_hosts(called, tmp_path):
    assert several_hosts([called("a", tmp_path / "one"), called("a", tmp_path / "two")])


def test_a_directory_that_is_not_trusted_leaves_the_host_name(called, tmp_path):
    (tmp_path / "sockets").mkdir(mode=0o755)

    assert called("a", tmp_path / "sockets") == called("a")


def test_machines_with_one_host_name_are_several_hosts(called, monkeypatch, tmp_path):
    names = [called("a")]
    (tmp_path / "boot_id").write_text("another boot")
    monkeypatch.setattr(hosts, "_BOOT", tmp_path / "boot_id")

    assert several_hosts([*names, called("a")]) == "the ranks are on 2 hosts"

"""The disk cache: it loads exactly what was stored, or nothing."""

import hashlib
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from graphar.runtime import cache
from tests.processes import PROCESSES

KEY, OTHER_KEY = "a" * 64, "b" * 64
CONTENT = bytes(range(256)) * 16


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(path))
    cache._warn_once.cache_clear()
    return path


@pytest.fixture
def entry(directory):
    cache.store(KEY, CONTENT)
    return directory / KEY


def swap_with_another(entry):
    cache.store(OTHER_KEY, CONTENT)
    os.replace(entry.with_name(OTHER_KEY), entry)


def put_a_foreign_content_under_the_header(entry):
    header, _, content = entry.read_bytes().partition(b"\n")
    entry.write_bytes(header + b"\n" + content[::-1])


def put_an_entry_of_another_program(entry):
    digest = hashlib.sha256(CONTENT).hexdigest()
    entry.write_bytes(f"other {KEY} {digest}\n".encode() + CONTENT)


def in_its_place(put):
    """The damage that deletes an entry and puts something else there."""
    return lambda entry: (entry.unlink(), put(entry))


def bytes_changed(change):
    """The damage that changes the bytes of an entry."""
    return lambda entry: entry.write_bytes(change(entry.read_bytes()))


DAMAGES = {
    "truncated": bytes_changed(lambda data: data[:-1]),
    "truncated to the header": bytes_changed(lambda data: data.partition(b"\n")[0]),
    "empty": bytes_changed(lambda data: b""),
    "zeros": bytes_changed(lambda data: bytes(len(data))),
    "zeros at its end": bytes_changed(lambda data: data[:-512] + bytes(512)),
    "longer": bytes_changed(lambda data: data + b"\0"),
    "another last bit": bytes_changed(lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "something foreign": bytes_changed(lambda data: b"\x7fELF\x02\x01\x01" + bytes(100)),
    "a foreign content": put_a_foreign_content_under_the_header,
    "another key's entry": swap_with_another,
    "another program's entry": put_an_entry_of_another_program,
    "a link to a valid entry": lambda entry: entry.symlink_to(entry.rename(entry.with_name("elsewhere"))),
    "a dangling link": in_its_place(lambda entry: entry.symlink_to(entry.with_name("nowhere"))),
    "a named pipe": in_its_place(os.mkfifo),
    "writable by the group": lambda entry: entry.chmod(0o620),
    "writable by the world": lambda entry: entry.chmod(0o602),
}


def test_a_key_that_was_never_stored_loads_nothing():
    assert cache.load(KEY) is None


def test_the_last_store_wins():
    cache.store(KEY, b"first")
    cache.store(KEY, CONTENT)
    assert cache.load(KEY) == CONTENT


@pytest.mark.promise("The kernel cache returns what was stored or nothing, whoever has tampered with it.")
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_loads_nothing_until_a_store_repairs_it(entry, damage):
    damage(entry)
    assert cache.load(KEY) is None
    cache.store(KEY, CONTENT)
    assert cache.load(KEY) == CONTENT


def test_a_store_does_not_write_through_a_link(entry):
    target = entry.with_name("elsewhere")
    target.write_bytes(b"untouched")
    entry.unlink()
    entry.symlink_to(target)
    cache.store(KEY, CONTENT)
    assert target.read_bytes() == b"untouched"


def test_an_entry_of_another_user_loads_nothing(entry, monkeypatch):
    own = os.stat(entry)
    foreign = os.stat_result((*own[:4], own.st_uid + 1, *own[5:]))
    monkeypatch.setattr(os, "fstat", lambda descriptor: foreign)
    assert cache.load(KEY) is None


def test_the_directory_is_made_with_its_parents_for_its_owner_only(tmp_path, monkeypatch):
    directory = tmp_path / "not" / "yet" / "there"
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(directory))
    cache.store(KEY, CONTENT)
    assert cache.load(KEY) == CONTENT
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_directory_that_others_may_read_is_trusted(directory):
    directory.mkdir(mode=0o755)
    cache.store(KEY, CONTENT)
    assert cache.load(KEY) == CONTENT


def test_a_directory_of_another_user_is_refused_by_name(directory, monkeypatch):
    directory.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: directory.stat().st_uid + 1)
    with pytest.warns(RuntimeWarning, match=f"{directory} is not trusted: it must belong to the user"):
        cache.load(KEY)


def test_a_directory_that_cannot_be_made_gives_a_warning_and_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.warns(RuntimeWarning, match="cannot be made: Not a directory"):
        cache.store(KEY, CONTENT)


def test_an_entry_that_cannot_be_written_gives_a_warning_and_no_error_and_leaves_no_temporary_file(directory):
    (directory / KEY).mkdir(parents=True)
    directory.chmod(0o700)
    with pytest.warns(RuntimeWarning, match="cannot be written: Is a directory"):
        cache.store(KEY, CONTENT)
    assert os.listdir(directory) == [KEY]


def test_a_user_without_a_home_gets_a_warning_and_no_error(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("GRAPHAR_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.warns(RuntimeWarning, match="no home directory is known"):
        cache.store(KEY, CONTENT)


@pytest.mark.promise("The kernel cache returns what was stored or nothing, whoever has tampered with it.")
@pytest.mark.parametrize("mode", [0o770, 0o720, 0o707, 0o702])
@pytest.mark.parametrize("first", [cache.load, lambda key: cache.store(key, CONTENT)], ids=["load", "store"])
def test_a_directory_that_others_may_write_is_warned_of_once_and_nothing_is_stored_there(directory, mode, first):
    directory.mkdir()
    directory.chmod(mode)
    with pytest.warns(RuntimeWarning, match=f"{directory} is not trusted: group and world must not"):
        first(KEY)
    cache.store(KEY, CONTENT)  # a second warning would be an error
    assert os.listdir(directory) == []
    assert cache.load(KEY) is None


@pytest.mark.parametrize("of_xdg", [True, False])
def test_the_directory_is_in_the_xdg_cache_or_the_home_when_none_is_named(tmp_path, monkeypatch, of_xdg):
    monkeypatch.delenv("GRAPHAR_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg") if of_xdg else "")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    cache.store(KEY, CONTENT)
    assert os.listdir(tmp_path / ("xdg" if of_xdg else ".cache") / "graphar") == [KEY]


def store_and_load_often(directory, process):
    """The contents that were loaded. They may be of any process, since all store under one key."""
    os.environ["GRAPHAR_CACHE_DIR"] = directory
    loaded = set()
    for _ in range(100):
        cache.store(KEY, bytes([process]) * 65536)
        loaded.add(cache.load(KEY))
    return loaded


@pytest.mark.promise("The kernel cache returns what was stored or nothing, whoever has tampered with it.")
def test_sixteen_processes_at_once_never_see_half_an_entry(directory):
    with ProcessPoolExecutor(16, PROCESSES) as pool:
        loaded = set().union(*pool.map(store_and_load_often, [str(directory)] * 16, range(16)))

    assert len(loaded) > 1
    assert loaded <= {bytes([process]) * 65536 for process in range(16)}
    assert os.listdir(directory) == [KEY]


def test_a_survey_tells_entries_from_damaged_and_unfinished_ones(entry):
    cache.store(OTHER_KEY, CONTENT)
    DAMAGES["truncated"](entry)
    (entry.parent / "unfinished-x").touch()
    (entry.parent / "tuning").mkdir()

    assert cache.survey() == cache.Survey([OTHER_KEY], [KEY], ["unfinished-x"])


def test_a_survey_of_nothing_is_empty():
    assert cache.survey() == cache.Survey([], [], [])

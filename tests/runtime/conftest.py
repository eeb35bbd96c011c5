"""What several files of tests of the runtime begin with."""

import pytest

import graphar


@pytest.fixture
def pair():
    """A communicator of two ranks on the CPU."""
    with graphar.Communicator(devices=["cpu"] * 2) as communicator:
        yield communicator


def edit(path, old, new):
    """Replaces the only occurrence of a text in a file."""
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} must occur once in {path.name}"
    path.write_text(text.replace(old, new))


def line_of(path, text):
    """The number of the line in which a text of a file begins."""
    return path.read_text().partition(text)[0].count("\n") + 1

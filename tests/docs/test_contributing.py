"""Commands of contributing.md for an environment that exists, and what pytest says where it leaves out all tests."""

from __future__ import annotations

import shlex
from types import SimpleNamespace

import pytest

from tests import conftest
from tests.docs.test_numbers import rows_of
from tests.pages import FOLDER, ROOT


def test_commands_name_folders_and_marks_that_exist():
    rows = rows_of((FOLDER / "contributing.md").read_text().splitlines())
    words = [shlex.split(row["command"].strip("`"))[3:] for row in rows if "minutes" in row]

    assert len(words) > 4
    assert [one for command in words for one in command if "tests/" in one and not (ROOT / one).exists()] == []
    assert [command[command.index("-m") + 1] for command in words if "-m" in command] == ["host", "catalogue"]


def marked(*names):
    return SimpleNamespace(get_closest_marker=lambda name: name if name in names else None)


HOST, CATALOGUE, ANY = marked("host"), marked("catalogue"), marked()


@pytest.mark.parametrize(
    ("paths", "marks", "left_out", "said"),
    [
        (["tests/host"], "not host and not catalogue", [ANY, HOST], ["host"]),
        (["tests"], "not host and not catalogue", [ANY, HOST], []),
        (["tests/host", "tests/runtime"], "not host and not catalogue", [CATALOGUE, HOST], ["host", "catalogue"]),
        (["tests/host"], "host", [ANY, HOST], []),
        (["tests/host"], "not host and not catalogue", [], []),
    ],
    ids=["a folder", "all tests", "two folders", "left out by -k", "none"],
)
def test_a_run_that_names_a_folder_says_how_to_run_the_tests_that_it_left_out(paths, marks, left_out, said):
    lines = []
    config = SimpleNamespace(args=paths, getini=lambda name: ["tests"], getoption=lambda name: marks)

    conftest.pytest_terminal_summary(SimpleNamespace(stats={"deselected": left_out}, write_line=lines.append), config)

    assert lines == [f"tests marked '{mark}' were left out: add `-m {mark}` to run them" for mark in said]

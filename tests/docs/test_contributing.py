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
    ("stats", "said"),
    [
        ({"deselected": [HOST, HOST, ANY]}, ["2 of these tests are marked 'host': add `-m host` to run them"]),
        ({"deselected": [CATALOGUE]}, ["1 of these tests are marked 'catalogue': add `-m catalogue` to run them"]),
        *(({"deselected": [HOST], which: [ANY]}, []) for which in ("passed", "error")),
        ({}, []),
    ],
)
def test_a_run_that_leaves_out_all_tests_says_how_to_run_them(stats, said):
    lines = []

    conftest.pytest_terminal_summary(SimpleNamespace(stats=stats, write_line=lines.append))

    assert lines == said

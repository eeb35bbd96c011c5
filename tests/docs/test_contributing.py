"""Commands of contributing.md for an environment that exists, and what pytest says where it leaves out all tests."""

import shlex
from types import SimpleNamespace

from tests import conftest
from tests.docs.test_numbers import rows_of
from tests.pages import FOLDER, ROOT

DEFAULT = "not host and not catalogue"  # -m in pyproject.toml


def test_commands_name_folders_and_marks_that_exist():
    rows = rows_of((FOLDER / "contributing.md").read_text().splitlines())
    words = [shlex.split(row["command"].strip("`"))[3:] for row in rows if "minutes" in row]

    assert len(words) > 4
    assert [one for command in words for one in command if "tests/" in one and not (ROOT / one).exists()] == []
    assert [command[command.index("-m") + 1] for command in words if "-m" in command] == ["host", "catalogue"]


def test_the_table_of_folders_names_those_that_exist():
    rows = rows_of((FOLDER / "contributing.md").read_text().splitlines())
    folders = [name.strip("`/, ") for row in rows for name in row.get("folder in `tests/`", "").split()]

    assert len(folders) > 10
    assert [name for name in folders if not (ROOT / "tests" / name).is_dir()] == []


def test_a_run_that_names_a_folder_says_how_to_run_the_tests_that_it_left_out():
    def said(paths, marks, *left_out):
        lines = []
        items = [SimpleNamespace(get_closest_marker=lambda name, own=own: name == own or None) for own in left_out]
        config = SimpleNamespace(args=paths, getini=lambda name: ["tests"], getoption=lambda name: marks)
        reporter = SimpleNamespace(stats={"deselected": items}, write_line=lines.append)
        conftest.pytest_terminal_summary(reporter, config)
        return lines

    assert said(["tests/host"], DEFAULT, "", "host") == ["tests marked 'host' were left out: add `-m host` to run them"]
    assert len(said(["tests/host", "tests/runtime"], DEFAULT, "catalogue", "host")) == 2
    assert said(["tests"], DEFAULT, "host") == said(["tests/host"], "host", "host") == said(["a"], DEFAULT) == []

"""noxfile.py and .ci/run with a stand-in for nox: every test belongs to a session, and what fails fails the session."""

import contextlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.conftest import APART

CHECKOUT = Path(__file__).parents[1]
SESSIONS = re.findall(r"@nox\.session.*\ndef (\w+)", (CHECKOUT / "noxfile.py").read_text())
ALL = Path("tests")
PARTS = ["tests", "docs", "catalogue", "host"]


class Failed(Exception):
    """A command of a session failed."""


class Quit(Exception):
    """A session says that it failed."""


class Session:
    """What a session is given: it runs nothing, and its command ``failing`` fails."""

    def __init__(self, name, folder, failing=None):
        self.name, self.folder, self.failing = name, folder, failing
        self.posargs, self.commands, self.logged, self.notified, self.environments = [], [], [], [], []

    def run(self, *command, external=False, env=None):  # without success_codes, which would pass over failures
        self.commands.append(list(command))
        self.environments.append(env)
        if len(self.commands) - 1 == self.failing:
            raise Failed

    def install(self, *what):
        pass

    def create_tmp(self):
        return str(self.folder)

    def chdir(self, folder):
        return contextlib.nullcontext()

    def log(self, text):
        self.logged.append(text)

    def notify(self, session):
        self.notified.append(session)

    def error(self, text):
        raise Quit(text)

    def skip(self, text):
        raise AssertionError(f"skipped: {text}")


@pytest.fixture
def noxfile(monkeypatch, tmp_path):
    nox = ModuleType("nox")
    nox.session = lambda *function, **how: function[0] if function else lambda decorated: decorated
    nox.options, nox.command, nox.Session = SimpleNamespace(), SimpleNamespace(CommandFailed=Failed), Session
    monkeypatch.setitem(sys.modules, "nox", nox)
    spec = importlib.util.spec_from_file_location("stand_in_noxfile", CHECKOUT / "noxfile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "has_gpu", lambda: True)
    monkeypatch.setattr(module, "find_sanitizer", lambda: "compute-sanitizer")
    monkeypatch.setattr(module, "only_wheel", lambda folder: folder)
    monkeypatch.setattr(module, "check_contents", lambda *wheels: None)
    monkeypatch.setenv("CXX", "g++")
    return module


def run(noxfile, name, folder, failing=None):
    session = Session(name, folder, failing)
    getattr(noxfile, name)(session)
    return session


def selected(command):
    """The paths that a command gives to pytest, and its expression of marks."""
    paths = [Path(one) for one in command if one.partition("/")[0] == "tests"]
    return paths, command[command.index("-m", 3) + 1] if "-m" in command[3:] else ""


def marks_of(file):
    """The marks of tests that need a session of their own; an empty one for the tests without."""
    text = file.read_text()
    found = {mark for mark in ("host", "catalogue") if f"pytest.mark.{mark}" in text}
    whole = re.search(r"^pytestmark = .*pytest\.mark\.host", text, re.MULTILINE)
    return found if whole else found | {""}


@pytest.mark.parametrize("name", ["checks", "full"])
def test_every_file_of_tests_belongs_to_a_session(noxfile, tmp_path, name):
    commands = [one for one in run(noxfile, name, tmp_path).commands if "pytest" in one]
    for file in sorted((CHECKOUT / "tests").rglob("test_*.py")):
        path, is_apart = file.relative_to(CHECKOUT), any(one in (file, *file.parents) for one in APART)
        for mark in marks_of(file):
            runs = [paths for paths, marks in map(selected, commands) if marks == mark]
            is_run = any(one in (path, *path.parents) for paths in runs for one in paths if one != ALL or not is_apart)
            assert is_run, f"{path}, marked {mark!r}"


def test_the_full_run_has_the_whole_of_what_has_a_sample_and_the_other_checks(noxfile, tmp_path):
    short, full = (run(noxfile, name, tmp_path) for name in ("checks", "full"))
    assert [one for one in full.commands if "--whole" in one] == [
        [*one, "--whole"] for one in short.commands if selected(one)[1]
    ]
    assert full.notified == ["lint", "newest", "package"]
    assert len(full.commands) == len(short.commands)


def test_the_nightly_run_is_the_full_one_and_the_tests_with_the_oldest_and_the_newest_torch(noxfile, tmp_path):
    nightly = run(noxfile, "nightly", tmp_path)

    told = [(*command[4:], *env.values()) for command, env in zip(nightly.commands, nightly.environments, strict=True)]
    assert told == [("full", "2.13.0"), ("tests", "apart", "2.11.0"), ("tests", "apart", "2.15.0")]
    with pytest.raises(Quit, match=r"failed: full with torch 2\.13\.0$"):
        run(noxfile, "nightly", tmp_path, failing=0)


def commands_of(name):
    """How many commands a session has, at least; counted in its text, and in that of its parts."""
    return 1 if name not in ("checks", "full") else len(PARTS)


@pytest.mark.parametrize("name", SESSIONS)
def test_a_session_fails_if_any_of_its_commands_does(noxfile, tmp_path, name):
    count = len(run(noxfile, name, tmp_path).commands)
    assert count >= commands_of(name)
    for failing in range(count):
        with pytest.raises((Failed, Quit)):
            run(noxfile, name, tmp_path, failing)


@pytest.mark.parametrize("name", ["checks", "full"])
def test_a_part_that_fails_is_named_and_leaves_none_of_the_others_out(noxfile, tmp_path, name):
    session = Session(name, tmp_path, failing=0)
    with pytest.raises(Quit, match=r"failed: tests$"):
        getattr(noxfile, name)(session)
    assert session.logged == [f"{name}: {part}" for part in PARTS]
    assert len(session.commands) == len(run(noxfile, name, tmp_path).commands)


def test_what_a_sanitizer_finds_is_an_error(noxfile, tmp_path):
    commands = run(noxfile, "sanitize", tmp_path).commands
    assert [one[one.index("--tool") + 1] for one in commands] == ["memcheck", "racecheck"]
    assert all(one[one.index("--error-exitcode") + 1] == "1" for one in commands)


def test_nox_alone_runs_the_tests_and_lint(noxfile):
    assert noxfile.nox.options.sessions == ["tests", "lint"]


@pytest.mark.parametrize(
    ("stand_in", "code"),
    [("exit 0", 0), ("exit 1", 1), ("touch new_file", 1), ('[[ "$*" == "-s lint checks newest package" ]]', 0)],
    ids=["what passes", "what fails", "a file that tests leave", "lint, checks, newest and package"],
)
def test_the_script_of_ci_fails_if_nox_does_or_a_file_changed(tmp_path, stand_in, code):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((CHECKOUT / ".ci" / "run").read_text())
    subprocess.run(["git", "init", "--quiet", str(tmp_path)], check=True)
    with_nox = tmp_path.with_name(f"{tmp_path.name}_bin")
    with_nox.mkdir()
    (with_nox / "nox").write_text(f"#!/usr/bin/env bash\n{stand_in}\n")
    (with_nox / "nox").chmod(0o700)
    environment = os.environ | {"PATH": f"{with_nox}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode == code, done.stderr

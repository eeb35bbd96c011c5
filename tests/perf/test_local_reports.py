"""Where perf writes: measuring changes no committed file, and the tests of committed reports pass after it."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from perf import __main__ as program
from perf import machine
from tests.perf.samples import CPU

ROOT = Path(__file__).parents[2]
CHECKOUT = ("graphar", "cuda_src", "perf", "reports", "tests", "docs")
SHORT = ("-m", "perf", "allreduce", "--world-size", "2", "--max-nbytes", "2K")
OF_COMMITTED_REPORTS = ("tests/docs/test_numbers.py", "tests/docs/test_readme.py", "tests/perf/test_pages.py")


def git_ignores() -> list[str]:
    return [line.rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what git has of this checkout."""
    copy, ignored = tmp_path / "checkout", shutil.ignore_patterns(*git_ignores())
    for name in CHECKOUT:
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy(path, copy)
    return copy


def contents(checkout: Path) -> dict[Path, str]:
    """The files that git would see, with their digests."""
    ignored = shutil.ignore_patterns(*git_ignores())
    found = {}
    for folder, folders, names in os.walk(checkout):
        folders[:] = set(folders) - ignored(folder, folders)
        for name in set(names) - ignored(folder, names):
            path = Path(folder, name)
            found[path.relative_to(checkout)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def python(checkout: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )


def test_the_tests_of_committed_reports_pass_after_a_measurement_which_changes_no_file_of_git(checkout):
    before = contents(checkout)

    measured = python(checkout, *SHORT)
    tested = python(checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", *OF_COMMITTED_REPORTS)

    assert measured.returncode == 0, measured.stderr
    assert tested.returncode == 0, tested.stdout[-4000:]
    assert contents(checkout) == before
    (page,) = (checkout / "build" / "reports").glob("*/index.html")
    assert (page.parent / "allreduce.json").exists()


def test_a_named_folder_is_used_and_one_that_cannot_be_made_ends_perf_before_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda: CPU)
    (tmp_path / "file").write_text("")

    assert program.folder_of(program.parse(["--out", str(tmp_path / "mine")]), CPU) == tmp_path / "mine" / "cpu"
    with pytest.raises(SystemExit, match=r"--out: .*file"):
        program.main(["--out", str(tmp_path / "file"), "allreduce"])

"""What changed since the newest commit that is an hour older than the last one."""

import os
import subprocess

import pytest

from tests.changes import any_changed, changed, included

NOW = 1_700_000_000


@pytest.fixture
def checkout(tmp_path):
    """A folder, and a function that commits files, by their seconds before now."""

    def git(*arguments, at=NOW):
        identity = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        dates = {"GIT_AUTHOR_DATE": f"{at} +0000", "GIT_COMMITTER_DATE": f"{at} +0000"}
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, env=os.environ | identity | dates)

    def commit(seconds_ago, **files):
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "--quiet", "--message", "some", at=NOW - seconds_ago)

    git("init", "--quiet")
    return tmp_path, commit


def test_what_the_last_hour_of_commits_changed_and_what_is_not_committed(checkout):
    folder, commit = checkout
    commit(9000, old="1", older="1", new="1")
    commit(7000, old="2")
    commit(1800, new="2")
    commit(0, added="1")
    (folder / "untracked").write_text("")
    assert changed(folder) == {"new", "added", "untracked"}
    (folder / "older").write_text("2")
    changed.cache_clear()
    assert changed(folder) == {"new", "added", "untracked", "older"}


def test_files_and_folders(checkout):
    folder, commit = checkout
    commit(9000, old="1")
    (folder / "cuda_src").mkdir()
    (folder / "cuda_src" / "new").write_text("")
    commit(0)
    assert any_changed(["cuda_src/new"], folder)
    assert any_changed(["old", "cuda_src/"], folder)
    assert not any_changed(["old", "cuda"], folder)


def test_all_may_have_changed_if_no_commit_is_older_or_there_is_none(checkout, tmp_path_factory, monkeypatch):
    folder, commit = checkout
    commit(0, new="1")
    assert changed(folder) is None
    assert any_changed(["any"], folder)
    elsewhere = tmp_path_factory.mktemp("no_checkout")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(elsewhere.parent))  # which may itself lie in a checkout
    assert any_changed(["any"], elsewhere)


def test_a_file_changes_with_what_it_includes():
    found = included("allreduce/one_shot.cu")
    assert {"cuda_src/allreduce/one_shot.cu", "cuda_src/device/pack.cuh", "cuda_src/device/ptx/ptx.cuh"} <= found
    assert "cuda_src/allreduce/two_shot_push.cu" not in found

"""What changed since the newest commit that is an hour older than the last one, by git."""

import functools
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]
CUDA_SRC = "cuda_src"
AN_HOUR_S = 3600


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@functools.cache
def changed(folder: Path = CHECKOUT) -> frozenset[str] | None:
    """The changed files, by path below the checkout, uncommitted ones too. None: all may be, since git does not say."""
    try:
        at = int(_git(folder, "log", "-1", "--format=%ct"))
        base = _git(folder, "rev-list", "-1", f"--before={at - AN_HOUR_S}", "HEAD")
        if not base:
            return None
        new = _git(folder, "ls-files", "--others", "--exclude-standard", "--full-name")
        return frozenset([*_git(folder, "diff", "--name-only", "--no-renames", base).splitlines(), *new.splitlines()])
    except (OSError, subprocess.CalledProcessError):
        return None


def any_changed(files: Iterable[str], folder: Path = CHECKOUT) -> bool:
    """Whether one of these files changed, or may have. A path that ends in a slash stands for all files below it."""
    found = changed(folder)
    if found is None:
        return True
    return any(one in found or (one.endswith("/") and any(path.startswith(one) for path in found)) for one in files)


@functools.cache
def included(file: str, folder: Path = CHECKOUT / CUDA_SRC) -> frozenset[str]:
    """A file of cuda_src, and what it includes, directly or not: paths below the checkout."""
    found, left = set(), [file]
    while left:
        path = left.pop()
        if path not in found and (folder / path).is_file():
            found.add(path)
            left += re.findall(r'^ *# *include "(.+)"', (folder / path).read_text(), re.MULTILINE)
    return frozenset(f"{folder.name}/{path}" for path in found)

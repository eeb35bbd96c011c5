"""The distributions that graphar requires, from pyproject.toml or the installed metadata."""

from __future__ import annotations

import functools
import re
import tomllib
from importlib import metadata
from pathlib import Path

PROJECT = "graphar-nvlink"


@functools.cache
def requirements() -> dict[str, str]:
    """Returns the version specifier of each required distribution and of "python": ">=13,<14"; "" allows any."""
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if checkout.is_file():
        project = tomllib.loads(checkout.read_text())["project"]
        python, needed = project["requires-python"], project["dependencies"]
    else:
        python, needed = metadata.metadata(PROJECT)["Requires-Python"], metadata.requires(PROJECT) or []
    split = [re.findall(r"^([\w.-]+)\s*(.*)", line)[0] for line in needed if "extra ==" not in line]
    return {"python": python} | dict(split)


def meets(version: str, specifier: str) -> bool:
    """Whether ``specifier`` allows a version. Raises ValueError for rules other than >= and <."""
    allowed, mine = [], _numbers(version)
    for rule in filter(None, specifier.replace(" ", "").split(",")):
        if rule.startswith(">="):
            allowed.append(mine >= _numbers(rule[2:]))
        elif rule.startswith("<") and rule[1].isdigit():
            allowed.append(mine < _numbers(rule[1:]))
        else:
            raise ValueError(f"{specifier} has a rule other than >= and <")
    return all(allowed)


def install(*names: str) -> str:
    """Returns the pip command that installs the distributions ``names`` in the versions that graphar requires."""
    return "python -m pip install " + " ".join(f"'{name}{requirements()[name]}'" for name in names)


def _numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version without trailing zeros, for comparison: "2.13.0+cpu" is (2, 13)."""
    numbers = [int(part) for part in re.findall(r"^\d+(?:\.\d+)*", version)[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

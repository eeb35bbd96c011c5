"""What graphar needs installed, as pyproject.toml says it."""

from __future__ import annotations

import functools
import re
import tomllib
from importlib import metadata
from pathlib import Path

PROJECT = "graphar-nvlink"


@functools.cache
def requirements() -> dict[str, str]:
    """For each distribution that is needed, and for "python", which versions will do: ">=13,<14"; "" is any."""
    checkout = Path(__file__).parents[2] / "pyproject.toml"
    if checkout.is_file():
        project = tomllib.loads(checkout.read_text())["project"]
        python, needed = project["requires-python"], project["dependencies"]
    else:
        python, needed = metadata.metadata(PROJECT)["Requires-Python"], metadata.requires(PROJECT) or []
    split = (re.match(r"([\w.-]+)\s*(.*)", one).groups() for one in needed if "extra ==" not in one)
    return {"python": python} | dict(split)


def meets(version: str, specifier: str) -> bool:
    """Whether a version is one that ``specifier``, of which only >= and < are known, allows."""
    mine = _numbers(version)
    for rule in filter(None, specifier.replace(" ", "").split(",")):
        if rule.startswith(">="):
            if mine < _numbers(rule[2:]):
                return False
        elif rule.startswith("<") and rule[1].isdigit():
            if mine >= _numbers(rule[1:]):
                return False
        else:
            raise ValueError(f"{specifier} has a rule other than >= and <")
    return True


def install(*names: str) -> str:
    """The command that installs what graphar needs of the distributions ``names``."""
    return "python -m pip install " + " ".join(f"'{name}{requirements()[name]}'" for name in names)


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version without zeros at its end, as tuples compare: "2.13.0+cpu" is (2, 13)."""
    numbers = [int(part) for part in re.match(r"\d+(\.\d+)*", version)[0].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)

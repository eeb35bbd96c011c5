"""The package's layers: each package uses only those below it, and no import goes around in a circle."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "graphar"

# From the ground up. What stands in one row may be used by everything above it, and by its own package.
LAYERS = (
    ("errors",),
    ("numerics",),
    ("reference",),
    ("plan",),
    ("ranks",),
    ("runtime",),
    ("matmul",),
    ("ops",),
    ("graph",),
    ("communicator", "nn"),
    ("integrations",),
    ("fsdp",),
    ("ddp",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
FLOOR = {name: floor for floor, names in enumerate(LAYERS) for name in names}
MAX_ROOT_ENTRIES = 16


def modules():
    return sorted(ROOT.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {name_of(path) for path in modules()}


def imports_of(path):
    """The modules of graphar that a file imports, anywhere in it: in a function or for types alone counts, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in found:
            if name == "graphar" or name.startswith("graphar."):
                yield module_of(name.removeprefix("graphar").removeprefix("."))


def module_of(name):
    """The module that a dotted name lies in: ``plan.call`` for ``plan.call.Call``."""
    while name and name not in NAMES:
        name = name.rpartition(".")[0]
    return name or "__init__"


def package_of(module):
    return module.partition(".")[0]


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_from_its_package_and_those_below(path):
    mine = package_of(name_of(path))

    above = [name for name in imports_of(path) if package_of(name) != mine and FLOOR[package_of(name)] >= FLOOR[mine]]

    assert above == []


def test_no_imports_go_around_in_a_circle():
    graph = {name_of(path): set(imports_of(path)) - {name_of(path), "__init__"} for path in modules()}

    try:
        list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"a circle of imports: {error.args[1]}")


def test_the_root_of_the_package_has_few_entries():
    entries = [path.name for path in ROOT.iterdir() if not path.name.startswith("__")]

    assert len(entries) <= MAX_ROOT_ENTRIES, sorted(entries)

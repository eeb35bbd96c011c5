"""The package's layers: each package uses only those below it, and no import goes around in a circle."""

import ast
import itertools
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

import graphar  # noqa: F401 (registers the ops)

ROOT = Path(__file__).parents[1] / "graphar"

# From the ground up. What stands in one row may be used by everything above it, and by its own package.
LAYERS = (
    ("errors",),
    ("numerics",),
    ("reference",),
    ("plan",),
    ("ranks",),
    ("runtime",),
    ("product",),
    ("ops",),
    ("graph",),
    ("simulator",),
    ("communicator", "nn"),
    ("integrations",),
    ("fsdp",),
    ("ddp",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
FLOOR = {name: floor for floor, names in enumerate(LAYERS) for name in names}
MAX_TEST_FILES_OUTSIDE_FOLDERS = 12
MAX_ROOT_ENTRIES = 19  # 16 packages and modules, and `__init__.py`, `__main__.py` and `py.typed`
MAX_INNER_IMPORTS = 8
MAX_SCHEMAS = 36
MAX_LINES = {"graphar": 31_910, "cuda_src": 8_740, "tests": 64_680, "perf": 14_360}  # what comes in takes out as much
LIMITS = {
    **{f"lines of code in `{folder}/`": most for folder, most in MAX_LINES.items()},
    "entries of `graphar/`": MAX_ROOT_ENTRIES,
    "imports of graphar's modules inside functions": MAX_INNER_IMPORTS,
    "dispatcher schemas": MAX_SCHEMAS,
}  # as the rows of contributing.md begin

# What functions may import besides graphar's own modules: optional packages, and parts of torch that are slow to
# import or not in every build.
IMPORTED_LATE = {"cuda", "importlib", "nvtx", "pynvml", "rich", "sglang", "shtab", "torch", "vllm"}


def modules():
    return sorted(ROOT.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


NAMES = {name_of(path) for path in modules()}


def imports_of(path):
    """The modules of graphar that a file imports, anywhere in it: in a function or for types alone counts, too."""
    for name in itertools.chain.from_iterable(names_imported_in(ast.parse(path.read_text()))):
        if is_own(name):
            yield module_of(name.removeprefix("graphar").removeprefix("."))


def names_imported_in(tree):
    """For each import in a syntax tree, the names that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            yield [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield [one.value for one in node.args if isinstance(one, ast.Constant)]


def is_own(name):
    return name.partition(".")[0] == "graphar"


def inner_imports():
    """The imports in functions of graphar: for each, the module that it is in and the names."""
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield from ((name_of(path), names) for names in names_imported_in(node))


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


@pytest.mark.parametrize("folder", MAX_LINES)
def test_a_folder_has_no_more_code_than_its_limit(folder):
    files = [one for one in (ROOT.parent / folder).rglob("*.*") if one.suffix in (".py", ".cu", ".cuh", ".cpp", ".hpp")]
    assert len(files) > 40
    assert sum(len(one.read_text().splitlines()) for one in files) <= MAX_LINES[folder]


def test_the_root_of_the_package_has_few_entries():
    """Counts what `ls graphar` shows in a fresh checkout."""
    entries = {path.name for path in ROOT.iterdir()} - {"__pycache__"}

    assert len(entries) <= MAX_ROOT_ENTRIES, sorted(entries)


def test_few_files_of_tests_lie_outside_the_folders_that_mirror_the_package():
    files = sorted(path.name for path in Path(__file__).parent.glob("test_*.py"))

    assert len(files) <= MAX_TEST_FILES_OUTSIDE_FOLDERS, files


def test_few_functions_import_modules_of_graphar():
    """Counts import statements, and calls of import_module with a name, in the functions of all modules."""
    own = [(module, names) for module, names in inner_imports() if any(map(is_own, names))]

    assert len(own) <= MAX_INNER_IMPORTS, own


def test_what_else_functions_import_is_optional_or_slow():
    others = {name.partition(".")[0] for _, names in inner_imports() for name in names if not is_own(name)}

    assert others <= IMPORTED_LATE


def test_the_dispatcher_has_few_schemas_of_graphar():
    """Counts every form of an op, such as `allreduce_list_out`: exporters, passes and traces meet each by its name."""
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("graphar::")]

    assert len(names) <= MAX_SCHEMAS, sorted(names)


def test_the_pages_have_these_limits_and_all_packages():
    limits, map_ = ((ROOT.parent / "docs" / "pages" / page).read_text() for page in ("contributing.md", "internals.md"))
    rows = {line.split(" | ")[0]: line.split(" | ")[1] for line in limits.splitlines() if line.startswith("| ")}
    told = {what: rows[next(row for row in rows if row.startswith(f"| {what}"))].replace(",", "") for what in LIMITS}

    assert told == {what: str(most) for what, most in LIMITS.items()}
    assert [one for one in FLOOR if "__" not in one and f"`{one}" not in map_] == []

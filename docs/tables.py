"""Tables of docs/ that are made from the code's own data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path

from graphar.numerics.codecs import codec
from graphar.plan.algorithms import COMPRESSING, Algorithm
from graphar.plan.scratch import MIB
from graphar.plan.select import algorithms_of
from graphar.plan.sizes import format_nbytes
from graphar.plan.tables import shipped_table

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
MEMORY_WORLD_SIZES = (2, 4, 8)
MEASURED = "nvidia_h200"


def markdown(header: Iterable[str], lines: Iterable[Iterable[str]], right: int = 0) -> str:
    """A table whose last columns, so many, are numbers."""
    header = list(header)
    rule = ["---:" if at >= len(header) - right else "---" for at in range(len(header))]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


# ---- memory ---------------------------------------------------------------------------------------------------------


def memory() -> str:
    """The scratch of each algorithm that `auto`, a codec, a norm or a fused matmul takes, on each GPU."""
    header = ["algorithm", "op", *(f"{n} GPUs" for n in MEMORY_WORLD_SIZES), "largest tensor, 4 GPUs"]
    lines = []
    for one, limit in what_auto_takes(4).items():
        sizes = [f"{round(one.row.scratch_nbytes(n) / MIB)} MB" for n in MEMORY_WORLD_SIZES]
        lines.append([f"`{one.value}`", one.op, *sizes, format_nbytes(limit) if limit else "any"])
    return markdown(header, lines, right=len(header) - 2)


def what_auto_takes(world_size: int) -> dict[Algorithm, int | None]:
    """By algorithm, the largest tensor, or part, it is taken for; None: any."""
    table = shipped_table(MEASURED)
    rows = [*table.rows[world_size], *table.parts["reducescatter"], *table.parts["allgather"]]
    found = {Algorithm(row["algorithm"]): row["max_nbytes"] for row in rows}
    quantized = [one for op in ("allreduce", "reducescatter") for one in algorithms_of(codec("int8"), op)]
    of_matmul = [one for one in Algorithm if one.row.folder == "matmul"]
    norms = [one for one in Algorithm if one.row.folder == "norm"]
    compressing = [one for op, one in COMPRESSING.items() if table.lossless.least(op, world_size) is not None]
    return found | {one: one.row.limit(world_size) for one in (*compressing, *quantized, *of_matmul, *norms)}


# ---- promises -------------------------------------------------------------------------------------------------------


def promises() -> str:
    """The promises, with the tests that are marked with each."""
    marked = tests_of_promises()
    lines = []
    for promise in promises_of_page():
        tests = [may_break(path.relative_to(TESTS).as_posix(), name) for path, name in marked.get(promise, [])]
        lines.append([promise, "<br>".join(tests)])
    return markdown(["promise", "tests, in `tests/`"], lines)


def may_break(path: str, name: str) -> str:
    """The name of a test, whose line may break after each word."""
    return f"<code>{path}::{name.replace('_', '_<wbr>')}</code>"


def promises_of_page() -> list[str]:
    return re.findall(r"^- (.*)$", (ROOT / "docs" / "pages" / "promises.md").read_text(), re.MULTILINE)


def tests_of_promises() -> dict[str, list[tuple[Path, str]]]:
    """By promise, the file and the name of each test with the mark ``promise``; read from the source, not imported."""
    found: dict[str, list[tuple[Path, str]]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                for promise in filter(None, map(promise_of, node.decorator_list)):
                    found.setdefault(promise, []).append((path, node.name))
    return found


def promise_of(decorator: ast.expr) -> str:
    """The text of `pytest.mark.promise("...")`; an empty string for any other decorator."""
    if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise":
        return ast.literal_eval(decorator.args[0])
    return ""

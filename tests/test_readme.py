"""What the README and the tuning tables say is what the committed reports say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from graphar.numerics.codecs import codec
from graphar.plan.algorithms import Algorithm
from graphar.plan.scratch import MIB
from graphar.plan.select import algorithms_of
from graphar.plan.sizes import format_nbytes
from graphar.plan.tables import shipped_table

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TABLES = sorted((ROOT / "graphar" / "plan" / "tables").glob("*.json"))


def test_every_row_of_the_readmes_table_is_a_row_of_the_report_it_names():
    path, body = re.search(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", README, re.DOTALL).groups()
    report = (ROOT / path).read_text().splitlines()
    rows = body.strip().splitlines()
    assert len(rows) > 5
    assert [row for row in rows if row not in report] == []


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


def what_auto_takes(world_size: int) -> dict[Algorithm, int | None]:
    """By algorithm, the largest tensor or part it takes it for; None: any."""
    table = shipped_table("nvidia_h200")
    rows = [*table.rows[world_size], *table.parts["reducescatter"], *table.parts["allgather"]]
    found = {Algorithm(row["algorithm"]): row["max_nbytes"] for row in rows}
    quantized = [one for op in ("allreduce", "reducescatter") for one in algorithms_of(codec("int8"), op)]
    of_matmul = [one for one in Algorithm if one.row.folder == "matmul"]
    norms = [one for one in Algorithm if one.op == "allreduce_residual_rmsnorm"]
    return found | {one: one.row.limit(world_size) for one in (*quantized, *of_matmul, *norms)}


def test_the_memory_of_every_kernel_that_auto_takes_is_told():
    body = re.search(r"\*\*Memory\.\*\* .*?\n\n", README, re.DOTALL)[0].replace("\n", " ")
    told = re.findall(r"`(\w+)` (\d+) MB(?:, (?:for \S+ )?to (\d+ [KM]B))?", body)
    assert {name: (int(mib), limit) for name, mib, limit in told} == {
        one.value: (round(one.row.scratch(4).nbytes / MIB), format_nbytes(limit) if limit else "")
        for one, limit in what_auto_takes(4).items()
    }


def test_every_promise_names_tests_that_exist():
    rows = re.search(r"tests that hold it\n\n(.*?)\n\n", README, re.DOTALL)[1].splitlines()[2:]
    named = [re.findall(r"`([\w/]+\.py)::(\w+)`", row) for row in rows]
    assert len(rows) > 20
    assert [row for row, tests in zip(rows, named, strict=True) if not tests] == []
    missing = [
        f"{file}::{test}"
        for file, test in {pair for tests in named for pair in tests}
        if not re.search(rf"^def {test}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE)
    ]
    assert missing == []


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_measured_tuning_table_names_a_committed_report(path):
    table = json.loads(path.read_text())
    assert table["machine"]
    assert table["report"] is None or (ROOT / table["report"]).exists()


# How each topic's JSON marks a row whose result was wrong, by the list that holds the row. Where it marks none, a wrong
# result ends the run, or nothing is summed.
MARKS = {
    "allreduce": {"rows": lambda row: row["wrong"]},
    "nvlink": {"rows": lambda row: row["wrong"]},
    "quantized": {"times": lambda row: row["wrong"], "errors": lambda row: not 0 <= row["relative_l2"] < 1},
    "lossless": {},
    "norms": {"rows": lambda row: row["wrong"]},
    "prefetch": {"rows": lambda row: row["wrong"]},
    "fused": {"rows": lambda row: row["wrong"], "timelines": lambda timeline: timeline["wrong"]},
    "model": {"rows": lambda row: row["wrong"]},
    "training": {"rows": lambda row: not row["outcome"]["same_bits"]},
    "throughput": {"rows": lambda row: not row["same_bits"]},
    "compile": {},
}
REPORTS = sorted((ROOT / "reports").glob("*/*.json"))


def test_every_topic_has_a_committed_report():
    assert {path.stem for path in REPORTS} == MARKS.keys()


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_row_of_a_committed_report_is_wrong(path):
    report = json.loads(path.read_text())

    lists = [name for name, rows in report.items() if rows and isinstance(rows, list) and isinstance(rows[0], dict)]
    marks = MARKS[report["topic"]]
    assert lists
    assert not marks or set(lists) <= marks.keys()
    for name, is_wrong in marks.items():
        assert [row for row in report[name] if is_wrong(row)] == []

"""The README is short, functions and promises are those of the code, and what tuning tables refer to is there."""

import ast
import inspect
import json
import math
import re
from pathlib import Path

import pytest

import graphar
from docs import tables
from graphar.plan.scratch import MIB
from graphar.plan.sizes import format_nbytes
from perf.files import to_json
from perf.report import read, topics
from tests.docs.test_numbers import cells, rows_of
from tests.perf.samples import REPORTS as SAMPLES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
FUNCTIONS = (ROOT / "docs" / "pages" / "functions.md").read_text()
TABLES = sorted((ROOT / "graphar" / "plan" / "tables").glob("*.json"))
MOST_LINES = 120
OPS = {name for name in graphar.__all__ if inspect.isfunction(getattr(graphar, name))}


def test_it_is_short():
    assert len(README.splitlines()) <= MOST_LINES


def test_every_link_leads_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README) + re.findall(r'(?:src|srcset)="([^"]+)"', README)

    assert len(targets) > 20
    assert [one for one in targets if not one.startswith("http") and not (ROOT / one).exists()] == []


def calls_of(page):
    """The calls in a page's table of functions."""
    rows = [row for row in rows_of(page.splitlines()) if "a call" in row]
    return [ast.parse(code).body[0].value for row in rows for code in re.findall(r"`(\w+\.\w+\(.*?\))`", row["a call"])]


@pytest.mark.parametrize("page", [README, FUNCTIONS], ids=["README", "functions"])
def test_functions_take_the_calls_that_tables_show(page):
    calls = [call for call in calls_of(page) if call.func.value.id == "graphar"]

    assert len(calls) > 6
    for call in calls:
        function = getattr(graphar, call.func.attr)
        inspect.signature(function).bind(*call.args, **{keyword.arg: keyword.value for keyword in call.keywords})


def test_every_op_is_in_the_table_of_functions():
    assert OPS - {call.func.attr for call in calls_of(FUNCTIONS)} == {"compile_pass", "disable", "is_available"}


def test_the_matrix_of_ops_and_options_is_that_of_the_signatures():
    page = (ROOT / "docs" / "pages" / "api" / "ops.md").read_text()
    rows = [row for row in rows_of(page.splitlines()) if "op" in row]
    options = [name for name in rows[0] if name.startswith("`")]
    told = {row["op"].strip("`"): [name.strip("`") for name in options if row[name]] for row in rows}

    expected = {}
    for op in told:
        taken = inspect.signature(getattr(graphar, op)).parameters
        # The residual of a norm is an operand, and has no default.
        optional = [name for name, one in taken.items() if one.default is not inspect.Parameter.empty]
        expected[op] = [name.strip("`") for name in options if name.strip("`") in optional]
    assert told == expected
    assert len(options) == 4
    assert told.keys() == {op for op in OPS if "timeout_s" in inspect.signature(getattr(graphar, op)).parameters}
    parameters = {op: inspect.signature(getattr(graphar, op)).parameters for op in told}
    assert {row["op"].strip("`") for row in rows if row["FP8 result"]} == {
        op for op, taken in parameters.items() if "out_dtype" in taken and "a_scale" not in taken
    }
    assert {row["op"].strip("`") for row in rows if row["FP8 operands"]} == {
        op for op, taken in parameters.items() if "a_scale" in taken
    }


def test_the_memory_of_every_kernel_that_auto_takes_is_told():
    body = tables.memory().splitlines()
    told = {row["algorithm"].strip("`"): (row["4 GPUs"], row["largest tensor, 4 GPUs"]) for row in rows_of(body)}

    assert cells(body[0])[2:5] == ["2 GPUs", "4 GPUs", "8 GPUs"]
    assert told == {
        one.value: (f"{round(one.row.scratch(4).nbytes / MIB)} MB", format_nbytes(limit) if limit else "any")
        for one, limit in tables.what_auto_takes(4).items()
    }
    assert told["two_shot_push"] == ("256 MB", "64 MB")
    assert "<!-- generated: memory -->" in (ROOT / "docs" / "pages" / "semantics.md").read_text()


def test_every_promise_has_tests_and_every_mark_is_a_promise():
    promises, marked = tables.promises_of_page(), tables.tests_of_promises()

    assert len(promises) > 20
    assert sorted(promises) == sorted(marked)
    assert len(set(promises)) == len(promises)


def test_the_page_of_promises_names_the_tests_of_all_of_them_in_order():
    rows = list(rows_of(tables.promises().splitlines()))

    assert [row["promise"] for row in rows] == tables.promises_of_page()
    assert all("::test_" in row["tests, in `tests/`"] for row in rows)


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_measured_tuning_table_names_a_committed_report(path):
    table = json.loads(path.read_text())
    assert table["machine"]
    assert table["report"] is None or (ROOT / table["report"]).exists()


# How each topic's JSON marks a row whose result was wrong, by the list that holds the row. In a list without marks, a
# wrong result would have ended the run, or nothing is summed.
OF_ROWS = ["allreduce", "fp8", "fused_fp8", "gathered", "host", "latency", "leaves", "matmul", "norm_gradients"]
OF_ROWS += ["alltoall", "beside", "losses", "norms", "slow_links", "suspend"]
MARKS = {name: {"rows": lambda row: row["wrong"]} for name in OF_ROWS} | {
    "quantized": {"times": lambda row: row["wrong"], "errors": lambda row: not 0 <= row["relative_l2"] < 1},
    "lossless": {"rows": lambda row: any(row.get("wrong", {}).values())},
    "fused": {"rows": lambda row: row["wrong"]},
    "model": dict.fromkeys(("rows", "generations", "sequences"), lambda row: row["wrong"]),
    "training": {"rows": lambda row: not row["outcome"]["same_bits"]},
    "convergence": {"rows": lambda row: not row["outcome"]["same_bits"]},
    "throughput": {"rows": lambda row: not row["same_bits"]},
    "fsdp": {"rows": lambda row: not all(map(math.isfinite, row["losses"]))},
    "compile": {},
}
REPORTS = sorted((ROOT / "reports").glob("*/*.json"))


def test_every_topic_has_marks_and_every_committed_report_a_topic():
    assert MARKS.keys() == {topic.name for topic in topics()}
    assert {path.stem for path in REPORTS} <= MARKS.keys()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_marks_are_of_the_rows_that_perf_writes(sample):
    written = to_json(sample)

    for name, is_wrong in MARKS[sample.name].items():
        assert not any(is_wrong(row) for row in written[name])


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_row_of_a_committed_report_is_wrong(path):
    report = json.loads(path.read_text())

    lists = [name for name, rows in report.items() if rows and isinstance(rows, list) and isinstance(rows[0], dict)]
    marks = MARKS[report["topic"]]
    assert lists
    assert not marks or set(lists) <= marks.keys()
    (topic,) = [topic for topic in topics() if topic.name == report["topic"]]
    assert marks.keys() - set(topic.added_fields) <= report.keys()
    assert read(path.parent, topic).report.wrong() == []
    for name, is_wrong in marks.items():
        assert [row for row in report.get(name, ()) if is_wrong(row)] == []

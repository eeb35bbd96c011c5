"""What the README and the tuning tables say is what the committed reports say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TABLES = sorted((ROOT / "graphar" / "tuning").glob("*.json"))


def test_every_row_of_the_readmes_table_is_a_row_of_the_report_it_names():
    path, body = re.search(r"<!-- table: (\S+) -->\n(.*?)<!-- end of table -->", README, re.DOTALL).groups()
    report = (ROOT / path).read_text().splitlines()
    rows = body.strip().splitlines()
    assert len(rows) > 5
    assert [row for row in rows if row not in report] == []


def test_every_link_of_the_readme_leads_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target


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


def test_no_row_of_a_committed_report_is_wrong():
    reports = sorted((ROOT / "reports").glob("*/allreduce.json"))
    assert reports
    for report in reports:
        rows = json.loads(report.read_text())["rows"]
        assert [row for row in rows if row["wrong"]] == []

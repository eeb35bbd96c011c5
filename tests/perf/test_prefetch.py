"""perf prefetch: what is measured on the CPU, and what the report says prefetching is worth."""

from __future__ import annotations

import pytest

from perf import __main__ as program
from perf.report import read
from perf.topics import prefetch
from perf.topics.prefetch import METHODS, Prefetch
from tests.perf.samples import prefetch_rows as rows


def test_a_run_on_the_cpu_is_reported(tmp_path, monkeypatch, forked_ranks):
    monkeypatch.setattr(prefetch, "CPU_ROWS", (3,))

    assert program.main(["prefetch", "--out", str(tmp_path)]) == 0

    found = read(tmp_path / "cpu", Prefetch).report
    assert [(row.m, row.method, row.wrong) for row in found.rows] == [(3, method, 0) for method in METHODS]
    assert found.skipped == []
    assert "All 5 results were verified: none is wrong." in (tmp_path / "cpu" / "prefetch.md").read_text()


@pytest.mark.parametrize(
    ("wrong", "end"), [(0, "| 10 | 12 | 9 | 0.75 |"), (1, "| 12 **(1 WRONG)** | 9 **(1 WRONG)** | - |")]
)
def test_the_ratio_is_with_prefetching_over_without_and_missing_where_a_result_was_wrong(wrong, end):
    (section,) = Prefetch(rows(2.0, 2.5, 10.0, 12.0, 9.0, wrong=wrong)).sections()

    assert section.body[0].endswith(end)


def test_prefetching_that_helps_lies_below_one():
    (section,) = Prefetch(rows(2.0, 2.5, 10.0, 12.0, 12.0) + rows(2.0, 2.5, 10.0, 12.0, 6.0, m=64)).sections()

    (plot,) = section.figures
    assert [(line.name, line.points) for line in plot.lines] == [("N = 7168", [(16, 1.0), (64, 0.5)])]
    glance = Prefetch(rows(2.0, 2.5, 10.0, 12.0, 9.0)).glance()
    assert (glance.headline, glance.words) == (
        "0.75",
        "time of an all-reduce and a matmul with prefetching / without it",
    )

"""perf prefetch: what is measured on the CPU, and what the report says was gained."""

from __future__ import annotations

import pytest

from perf import __main__ as program
from perf import files, prefetch
from perf.prefetch import METHODS, PrefetchRow


def rows(*times: float, wrong: int = 0) -> list[PrefetchRow]:
    return [
        PrefetchRow(method, 4, 16, 7168, 8192, {"median": us, "p10": us, "p90": us}, wrong)
        for method, us in zip(METHODS, times, strict=True)
    ]


def test_a_run_on_the_cpu_is_reported(tmp_path, monkeypatch, forked_ranks):
    monkeypatch.setattr(prefetch, "CPU_ROWS", (3,))

    assert program.main(["prefetch", "--out", str(tmp_path)]) == 0

    (folder,) = tmp_path.iterdir()
    found, skipped = prefetch.found_in(files.read(folder, "prefetch"))
    assert [(row.m, row.method, row.wrong) for row in found] == [(3, method, 0) for method in METHODS]
    assert skipped == []
    assert "5 rows, every one verified." in (folder / "prefetch.md").read_text()


@pytest.mark.parametrize(("wrong", "end"), [(0, "| 12.00 | 10.50 | 1.50 us (15%) |"), (1, "| wrong | wrong | - |")])
def test_what_was_gained_is_a_share_of_the_matmul_and_nothing_where_a_result_was_wrong(wrong, end):
    assert prefetch.comparison(rows(2.0, 2.5, 10.0, 12.0, 10.5, wrong=wrong)).endswith(end)

"""perf slow_links: hosts whose links are as slow as they should be, and the report."""

from __future__ import annotations

import shutil

import pytest

from graphar.plan.sizes import MB
from perf.harness import slow_network
from perf.topics import slow_links
from perf.topics.slow_links import SlowLinks, SlowPlan
from tests.perf.samples import slow_row


def test_sums_between_hosts_are_right_and_take_as_long_as_their_links():
    if reason := slow_network.why_not():
        pytest.skip(reason)
    report = SlowLinks()

    for message in report.measure(SlowPlan((2,), ("100mbit",), (MB,), (), 1)):
        report.take(message)

    assert [row.method for row in report.rows] == ["gloo", "exact", *slow_links.CODECS]
    assert [row.wrong for row in report.rows] == [0] * 7
    by_method = {row.method: row.median / 1e6 for row in report.rows}
    least = MB * 8 / 100e6 * 0.7  # the first 256 KB pass at once
    assert by_method["gloo"] > least < by_method["exact"]
    assert by_method["int4"] < by_method["gloo"]


def test_without_the_tools_the_report_says_so(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda tool: None)

    (said,) = SlowLinks().measure(SlowPlan((2,), ("1gbit",), (MB,), (), 1))

    assert said == "slow links: needs unshare, nsenter, ip, tc"


def test_sums_are_compared_with_gloo_and_steps_have_the_documents_columns():
    rows = [slow_row("gloo", 400.0), slow_row("int4", 100.0), slow_row("int8", 200.0, wrong=3)]
    rows += [
        slow_row(method, time, case="resnet", samples=8, loss=1.5)
        for method, time in (("gloo", 500.0), ("4 bits", 250.0))
    ]
    sums, steps = SlowLinks(rows).sections()

    assert sums.title == "All-reduces, 2 ranks, 1gbit/s"
    assert sums.body[0].splitlines()[-1] == "| 32 MB | 400 (1.00) | 100 (0.25) | 200 **(WRONG)** (-) |"
    assert steps.body[0].splitlines()[-1] == "| 4 bits | 250 | 32.00 | 2.00 | 0.50 | 1.500 |"
    assert SlowLinks(rows).glance().ratios == {"32 MB, 2 ranks, 1gbit/s": 0.25}


def test_a_size_that_takes_too_long_at_a_rate_is_left_out():
    took = [nbytes * 8 / slow_links.bits_a_second("100mbit") for nbytes in slow_links.SIZES]

    assert [seconds <= slow_links.MOST_SECONDS for seconds in took] == [True, True, True, False]

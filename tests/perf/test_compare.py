"""perf --compare and perf report: what counts as a regression."""

from __future__ import annotations

import json

import pytest

from perf import __main__ as program
from perf import machine
from perf.compare import compare, identity
from perf.harness.cases import Case, make_row
from perf.report import Report
from perf.topics.allreduce import AllReduce
from perf.topics.fused import Fused
from tests.perf.samples import CPU, MACHINE, REPORTS, fused_row


def rows(times_us, method="graphar", nbytes=2048, wrong=0, mode="graph"):
    case = Case(world_size=4, form="process", mode=mode, dtype="bfloat16", nbytes=nbytes)
    return [make_row(case, method, times_us, wrong)]


def test_a_row_regresses_beyond_its_spread_and_three_percent():
    compared = compare(rows([10.0, 10.1, 10.2]), rows([11.0, 11.1, 11.2]))

    assert compared.regressions == ["graphar, 4 ranks, bfloat16, graph, process, 2 KB: 11.1 us, before 10.1 us (+9.9%)"]
    assert str(compared).startswith("1 of 1 rows are regressions of graphar's:\n- graphar, 4 ranks")


@pytest.mark.parametrize(
    "now",
    [[10.25, 10.3, 10.35], [9.0, 12.0, 14.0], [9.0, 9.0, 9.0]],
    ids=["within three percent", "within the spread", "faster"],
)
def test_noise_and_gains_are_no_regressions(now):
    compared = compare(rows([10.0, 10.1, 10.2]), rows(now))

    assert (compared.compared, compared.regressions) == (1, [])
    assert str(compared) == "No regression of graphar's in 1 rows."


def test_slower_peers_are_counted_and_not_blamed_on_graphar():
    compared = compare(rows([10.0], "nccl"), rows([20.0], "nccl"))

    assert (compared.regressions, compared.slower_peers) == ([], 1)
    assert "1 rows of peers are slower" in str(compared)


def test_rows_that_one_run_alone_has_are_not_compared():
    assert compare(rows([1.0]), rows([9.0], nbytes=8192)).compared == 0


def test_times_of_wrong_results_are_not_compared():
    wrong = rows([1.0], wrong=3)

    assert compare(wrong, rows([9.0])).compared == 0
    assert compare(rows([1.0]), wrong).compared == 0


def test_layers_of_a_fused_matmul_are_told_apart():
    before, now = (
        Fused([fused_row("graphar", 10.0, m=1), fused_row("graphar", m2, m=2)]).timed() for m2 in (20.0, 30.0)
    )

    assert compare(before, now).regressions == ["graphar, 4 ranks, 2 x 8192 x 2048: 30 us, before 20 us (+50.0%)"]


@pytest.mark.parametrize("report", [topic for topic in REPORTS if topic.has_spread], ids=lambda topic: topic.name)
def test_a_topic_whose_runs_can_be_compared_has_times_with_a_spread(report):
    timed = report.timed()

    assert len({identity(row) for row in timed}) == len(timed) > 0
    assert all(row.time_us.keys() in ({"median", "p10", "p90"}, {"median", "p10", "p99"}) for row in timed)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs the command with a sweep that finds ``times_us``, and one of 10 us in the folder ``earlier``."""
    monkeypatch.setattr(machine, "describe", lambda: CPU)
    write(tmp_path / "earlier", CPU, [10.0])

    def run(times_us, folder="earlier"):
        monkeypatch.setattr(Report, "run", lambda self, options, folder, block, command: write(folder, block, times_us))
        return program.main(["allreduce", "--out", str(tmp_path), "--compare", str(tmp_path / folder)])

    return run


def write(folder, block, times_us, wrong=0):
    AllReduce(rows=rows(times_us, wrong=wrong, mode="cpu")).write(folder, block, "python -m perf")
    return 0


def test_a_regression_makes_the_command_fail(measured, capsys):
    assert measured([20.0]) == 1
    assert "before 10 us (+100.0%)" in capsys.readouterr().out


def test_without_one_it_succeeds(measured):
    assert measured([10.1]) == 0


def test_nothing_to_compare_with_ends_it_before_it_measures(measured):
    with pytest.raises(SystemExit, match=r"--compare: .*none"):
        measured([10.0], "none")


def test_another_machine_is_refused(measured, tmp_path):
    write(tmp_path / "other", MACHINE, [10.0])

    with pytest.raises(SystemExit, match="other is of another machine: h200x4, and this is a CPU"):
        measured([10.0], "other")


def report_on(folder, *more):
    return program.main(["report", str(folder), *map(str, more)])


def test_a_report_is_told_again_and_its_page_is_made_if_asked_for(tmp_path, capsys):
    write(tmp_path, MACHINE, [10.0])
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}

    assert report_on(tmp_path) == 0
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    capsys.readouterr()
    assert report_on(tmp_path, "--write") == 0

    text = capsys.readouterr().out
    assert text.startswith("# 4x NVIDIA H200")
    assert "All-reduce\nAll 1 results were verified: none is wrong." in text
    assert text.endswith(f"page: {tmp_path / 'index.html'}\n")


def test_a_wrong_result_in_a_report_makes_the_command_fail(tmp_path, capsys):
    write(tmp_path, MACHINE, [10.0], wrong=1)

    assert report_on(tmp_path) == 1
    assert "WRONG RESULTS: 1 of 1 (graphar at bfloat16, cpu, process, 2 KB)." in capsys.readouterr().out


@pytest.mark.parametrize(("now", "status"), [([20.0], 1), ([10.1], 0)])
def test_two_reports_are_compared(tmp_path, capsys, now, status):
    write(tmp_path / "earlier", MACHINE, [10.0])
    write(tmp_path / "now", MACHINE, now)

    assert report_on(tmp_path / "now", "--compare", tmp_path / "earlier", "--json") == status

    content = json.loads(capsys.readouterr().out)
    (compared,) = content["comparisons"]
    assert [stored["topic"] for stored in content["reports"]] == ["allreduce"]
    assert (compared["compared"], len(compared["regressions"])) == (1, status)


@pytest.mark.parametrize(
    ("machine", "reason"), [(MACHINE | {"gpu_count": 8}, "is of another machine"), (None, "has no report to compare")]
)
def test_what_cannot_be_compared_is_said(tmp_path, capsys, machine, reason):
    write(tmp_path / "now", MACHINE, [10.0])
    if machine:
        write(tmp_path / "earlier", machine, [10.0])

    assert report_on(tmp_path / "now", "--compare", tmp_path / "earlier") == 1
    assert reason in capsys.readouterr().err


def test_every_topic_says_a_word(tmp_path, capsys):
    for report in REPORTS:
        report.write(tmp_path, MACHINE, "python -m perf")

    assert report_on(tmp_path, "--json") == 0

    reports = json.loads(capsys.readouterr().out)["reports"]
    assert [said["topic"] for said in reports] == [report.name for report in REPORTS]
    assert all(len(said["verdict"]) > 10 and "**" not in said["verdict"] for said in reports)

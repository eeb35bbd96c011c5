"""What all topics of perf share: rows are stored and shown, ratios have one direction, and reports name errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from perf.md import method_table, number
from perf.ratios import best_peer, of_best_peer, ratio
from perf.report import ENDED, Glance, Timing, read
from perf.topics.fused import Fused
from perf.topics.quantized import ErrorRow, Quantized
from tests.perf.samples import MACHINE, REPORTS, fused_row, row
from tests.test_layers import names_imported_in


def test_only_the_registry_and_topics_import_topics():
    below = [path for path in (Path(__file__).parents[2] / "perf").rglob("*.py") if path.parent.name != "topics"]
    imported = {path.name: list(names_imported_in(ast.parse(path.read_text()))) for path in below}

    assert [path for path, names in imported.items() if "'perf.topics" in str(names)] == ["report.py"]


def test_a_row_goes_to_the_list_of_its_kind_and_a_string_to_what_was_skipped(capsys):
    report, error = Quantized(), ErrorRow("int4", "normal", 4, 4.5, 0.1, 0.2, 0.99)

    for message in (row("nccl"), error, "vllm: no such package"):
        report.take(message)

    assert (report.times, report.errors, report.skipped) == ([row("nccl")], [error], ["vllm: no such package"])
    shown = capsys.readouterr()
    assert (shown.out.count("nccl"), shown.err) == (1, "# not measured: vllm: no such package\n")


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_every_report_says_a_word_in_markdown(report):
    text = report.markdown(MACHINE, "python -m perf one")

    assert text.startswith(f"# {report.title}\n\n4x NVIDIA H200, driver 580.1, CUDA 13.0")
    assert report.verdict() in text
    assert "| --- |" in text
    assert text.endswith("## How to reproduce\n\n```\npython -m perf one\n```\n")
    assert "WRONG" not in text
    glance = report.glance()
    assert glance.headline
    assert glance.words


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("sample", REPORTS, ids=lambda report: report.name)
def test_a_run_that_is_ended_leaves_the_rows_before_or_else_an_earlier_report(sample, count, tmp_path, monkeypatch):
    topic, rows = type(sample), sample._rows()[0]

    def ended(self, plan):
        yield from rows[:count]
        raise KeyboardInterrupt

    for name, stand_in in (("plan", lambda *_: None), ("count", lambda *_: None), ("measure", ended)):
        monkeypatch.setattr(topic, name, stand_in)
    for earlier in (None, sample):
        if earlier:
            earlier.write(tmp_path, MACHINE, "python -m perf")
        with pytest.raises(KeyboardInterrupt):
            topic().run(None, tmp_path, MACHINE, "python -m perf")

        stored, text = read(tmp_path, topic).report, (tmp_path / f"{topic.name}.md").read_text()
        if earlier and not count:
            assert stored == earlier
            continue
        assert stored.skipped == [ENDED]
        assert stored._rows() == ([rows[:1]] if count else [])
        assert f"## Not measured\n\n- {ENDED}" in text


def test_a_ratio_is_the_time_over_the_others():
    assert ratio(row(time_us=5.0), row("nccl", 20.0)) == 0.25
    assert ratio(row(time_us=5.0, wrong=1), row("nccl", 20.0)) is None
    assert ratio(None, row("nccl", 20.0)) is None


def test_the_best_peer_is_the_fastest_that_is_right_and_not_graphars():
    rows = {"graphar": row(time_us=8.0), "nccl": row("nccl", 20.0), "vllm": row("vllm", 10.0)}

    assert best_peer(rows.values()).method == "vllm"
    assert of_best_peer({2048: rows, 8192: {"nccl": row("nccl")}}) == {2048: 0.8}
    assert best_peer([row()]) is None


def test_a_table_of_methods_ends_in_the_best_peer_and_the_ratio():
    cases = {
        "a": {"graphar": row(time_us=10.0), "nccl": row("nccl", 250.0)},
        "b": {"nccl": row("nccl", 2.345, wrong=7)},
    }

    assert method_table("case", cases).splitlines() == [
        "| case | graphar (us) | nccl (us) | best peer | of_best_peer |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| a | 10 | 250 | nccl | 0.04 |",
        "| b | - | 2.35 **(7 WRONG)** | - | - |",
    ]


@pytest.mark.parametrize(("value", "text"), [(1.2345, "1.23"), (99.94, "99.9"), (1234.5, "1234"), (None, "-")])
def test_numbers_have_three_digits(value, text):
    assert number(value) == text


def test_what_lies_within_noise_is_no_shortfall():
    assert Glance("a peer", {"one": 1.02, "other": 0.5}).shortfall == ""
    assert Glance("a peer", {"one": 1.04, "other": 0.5}).shortfall == "1 of 2 cases; the worst is 1.04 (one)"
    assert Glance("a peer", {"one": 0.5}).headline == "0.50"


def test_a_verdict_names_what_is_wrong_once_and_not_all_of_it():
    rows = [fused_row("graphar", 1.0, wrong=1, m=m) for m in range(8)]

    assert Fused(rows[:1] * 2).verdict() == "**WRONG RESULTS: 2 of 2 (graphar at 0 x 8192 x 2048).**"
    assert Fused(rows).verdict().endswith("graphar at 5 x 8192 x 2048 and 2 more).**")


def test_rows_of_graphars_are_known_by_their_method():
    assert [row(name).is_own for name in ("graphar", "graphar:one_shot", "nccl")] == [True, True, False]
    assert fused_row("matmul+graphar", 1.0).is_own
    assert not fused_row("matmul", 1.0).is_peer
    assert issubclass(type(row()), Timing)

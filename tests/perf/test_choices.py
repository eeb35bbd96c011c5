"""What the reports say of the choices of "auto", and that committed ones say of no loss that is not known."""

from __future__ import annotations

from pathlib import Path

import pytest

from perf import pages
from perf.choices import choice_table, choices
from perf.ratios import NOISE, by_method
from perf.report import StoredReport, read_all
from perf.topics.allreduce import IS_VARIANT, AllReduce
from perf.topics.fused import Fused
from tests.perf.samples import MACHINE, fused_row, row

MB = 1 << 20
FOLDERS = sorted(path for path in (Path(__file__).parents[2] / "reports").iterdir() if path.is_dir())
# The losses of "auto" in committed reports of GPUs beyond NOISE, and why each stands. A new report replaces its lines.
SINCE = "the report is older than the table, which takes the fastest variant"
SAME = "auto takes the fastest variant: these are two timings of the same kernels"
OF_H200 = "an H100 goes by the shapes that were timed on an H200"
EQUAL = "timed in turn, with the sum behind them, torch's matmul and graphar's take equally long"
WAVES = "from a wave of tiles on graphar's matmul is taken, and these tiles leave the last wave half empty"
ONE_THRESHOLD = "the table has one threshold for all K, and with another K tiles are faster, or as fast"
ANY_N = "the table has one threshold for all N, and at 2048 rows of wider weights chunks are slower"
ONE_SIZE = "chunks win at these rows alone: tiles do with half and twice as many, and with another N"
KNOWN = {
    ("h100x1", "matmul", "256 x 2560 x 8192"): OF_H200,
    ("h100x1", "matmul", "768 x 7168 x 2048"): WAVES,
    ("h100x1", "matmul", "2048 x 7168 x 2048"): WAVES,
    ("h200x1", "matmul", "768 x 7168 x 2048"): WAVES,
    ("h200x2", "fused", "graphar, M = 256, K = 4096, 2 ranks"): EQUAL,
    ("h200x2", "fused", "graphar_int8, M = 2048, K = 4096, 2 ranks"): ONE_THRESHOLD,
    ("h200x2", "fused", "graphar_int8, M = 16384, K = 14336, 2 ranks"): SAME,
    ("h200x2", "fused_fp8", "graphar, M = 64, K = 4096, scales of blocks, 2 ranks"): ONE_THRESHOLD,
    ("h200x2", "gathered", "graphar, M = 2048, N = 5120, 2 ranks"): ONE_SIZE,
    ("h200x4", "fused", "graphar, M = 512, K = 7168, 4 ranks"): ONE_THRESHOLD,
    ("h200x4", "gathered", "graphar, M = 2048, N = 2560, 4 ranks"): ANY_N,
    ("h200x4", "fused_fp8", "graphar, M = 16, K = 2048, scales of blocks, 4 ranks"): SAME,
    ("h200x4", "fused_fp8", "graphar, M = 512, K = 7168, scales of blocks, 4 ranks"): ONE_THRESHOLD,
    ("h200x4", "fused_fp8", "graphar, M = 512, K = 7168, scales of rows, 4 ranks"): ONE_THRESHOLD,
}
ROWS = [
    row("graphar", 10.0),
    row("graphar:one_shot_push", 10.1),
    row("graphar:two_shot_push", 8.0, wrong=1),
    row("graphar:two_shot_lossless", 5.0),
    row("nccl", 9.0),
    row("graphar", 22.0, nbytes=MB),
    row("graphar:one_shot_push", 30.0, nbytes=MB),
    row("graphar:two_shot_push@66", 20.0, nbytes=MB),
]


def found_in(rows):
    return choices(by_method(rows, lambda case_row: case_row.nbytes), IS_VARIANT)


def test_a_choice_is_compared_with_the_fastest_right_variant():
    chosen = found_in(ROWS)

    assert [(case, choice.variant.method, f"{choice.loss:.2f}") for case, choice in chosen.items()] == [
        ((2048, "graphar"), "graphar:one_shot_push", "0.99"),
        ((MB, "graphar"), "graphar:two_shot_push@66", "1.10"),
    ]


def test_a_wrong_choice_and_a_choice_without_variants_are_not_compared():
    assert found_in([row("graphar", 10.0, wrong=1), row("graphar:one_shot_push", 9.0)]) == {}
    assert found_in([row("graphar", 10.0), row("nccl", 9.0)]) == {}
    assert choice_table("size", {}) == []
    assert AllReduce().loss_of_auto() == ""


def test_a_report_of_all_reduces_has_a_table_of_choices_and_says_the_largest_loss():
    report = AllReduce(rows=ROWS)

    (section, *_) = report.sections()
    (body,) = [part for part in section.body if "of_best_variant" in part]
    assert body.splitlines()[2:] == [
        "| 2 KB | graphar | 10 | graphar:one_shot_push | 10.1 | 0.99 |",
        "| 1 MB | graphar | 22 | graphar:two_shot_push@66 | 20 | 1.10 |",
    ]
    where = "1 MB, 4 ranks, bfloat16, in CUDA graphs (one process per rank)"
    loss = f"1.10 (graphar, {where}: `graphar:two_shot_push@66` is fastest)"
    assert report.findings()[-1] == f"The time of `auto` / the fastest variant's time is at most {loss}."


def test_fused_ops_are_compared_with_variants_of_the_same_codec():
    rows = [fused_row("graphar", 64.7), fused_row("graphar:tiles", 57.3), fused_row("matmul+graphar", 60.0)]
    rows += [fused_row("graphar_int8", 70.0), fused_row("graphar:tiles_int8", 50.0)]
    report = Fused(rows)

    assert report.loss_of_auto() == "1.40 (graphar_int8, M = 4096, K = 2048, 4 ranks: `graphar:tiles_int8` is fastest)"
    text = report.markdown(MACHINE, "a command")
    assert "| 4096 | graphar | 64.7 | graphar:tiles | 57.3 | 1.13 |" in text
    assert "| 4096 | graphar_int8 | 70 | graphar:tiles_int8 | 50 | 1.40 |" in text


def test_the_summary_of_a_folder_has_the_largest_losses():
    text = pages.summary(
        [StoredReport(AllReduce(rows=ROWS), MACHINE, "a command"), StoredReport(Fused([]), MACHINE, "another")]
    )

    allreduce, fused = [line for line in text.splitlines() if line.startswith("| [")]
    assert "| 1.10 (graphar, 1 MB, " in allreduce
    assert fused.endswith("| - |")


def losses_in(folder):
    """The losses beyond NOISE that a folder's reports tell, by topic and case."""
    for stored in read_all(folder):
        name = stored.report.name
        for case, choice in stored.report.losses():
            if choice.loss > NOISE:
                yield (
                    (folder.name, name, case if name == "matmul" else f"{choice.auto.method}, {case}"),
                    round(choice.loss, 3),
                )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_committed_reports_tell_of_no_loss_that_is_not_known_with_its_cause(folder):
    """The tables are for GPUs, so that reports of CPUs are left out."""
    losses = {} if folder.name == "cpu" else dict(losses_in(folder))

    unknown = {key: loss for key, loss in losses.items() if key not in KNOWN}
    assert not unknown, "mend the choice (graphar/plan/tables, or the rule), or add the case to KNOWN with its cause"
    gone = [key for key in KNOWN if key[0] == folder.name and key not in losses]
    assert not gone, "these losses are gone: remove them from KNOWN"

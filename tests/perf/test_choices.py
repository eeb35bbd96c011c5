"""What the reports say of the choices of "auto"."""

from __future__ import annotations

from perf.choices import choice_table, choices, largest_loss
from perf.page import build
from perf.report import StoredReport, by_method
from perf.topics.allreduce import IS_VARIANT, AllReduce
from perf.topics.fused import Fused
from tests.perf.samples import MACHINE, fused_row, row

MB = 1 << 20
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
    return choices(by_method(rows, lambda one: one.nbytes), IS_VARIANT)


def test_a_choice_is_compared_with_the_fastest_right_variant():
    found = found_in(ROWS)

    assert [(case, one.variant.method, f"{one.loss:.2f}") for case, one in found.items()] == [
        ((2048, "graphar"), "graphar:one_shot_push", "0.99"),
        ((MB, "graphar"), "graphar:two_shot_push@66", "1.10"),
    ]


def test_a_wrong_choice_and_a_choice_without_variants_are_not_compared():
    assert found_in([row("graphar", 10.0, wrong=1), row("graphar:one_shot_push", 9.0)]) == {}
    assert found_in([row("graphar", 10.0), row("nccl", 9.0)]) == {}
    assert choice_table("size", {}) == []
    assert largest_loss({}) == ""


def test_a_report_of_all_reduces_has_a_table_of_choices_and_says_the_largest_loss():
    found = AllReduce(rows=ROWS)

    (section, *_) = found.sections()
    (body,) = [one for one in section.body if "of_best_variant" in one]
    assert body.splitlines()[2:] == [
        "| 2 KB | graphar | 10 | graphar:one_shot_push | 10.1 | 0.99 |",
        "| 1 MB | graphar | 22 | graphar:two_shot_push@66 | 20 | 1.10 |",
    ]
    where = "1 MB, 4 ranks, bfloat16, in CUDA graphs (one process per rank)"
    loss = f"1.10 (graphar, {where}: `graphar:two_shot_push@66` is fastest)"
    assert found.findings()[-1] == f"The time of `auto` / the fastest variant's time is at most {loss}."


def test_fused_ops_are_compared_with_variants_of_the_same_codec():
    rows = [fused_row("graphar", 64.7), fused_row("graphar:tiles", 57.3), fused_row("matmul+graphar", 60.0)]
    rows += [fused_row("graphar_int8", 70.0), fused_row("graphar:tiles_int8", 50.0)]
    found = Fused(rows)

    assert found.loss_of_auto() == "1.40 (graphar_int8, M = 4096, K = 2048, 4 ranks: `graphar:tiles_int8` is fastest)"
    text = found.markdown(MACHINE, "a command")
    assert "| 4096 | graphar | 64.7 | graphar:tiles | 57.3 | 1.13 |" in text
    assert "| 4096 | graphar_int8 | 70 | graphar:tiles_int8 | 50 | 1.40 |" in text


def test_the_summary_of_a_folder_has_the_largest_losses():
    text = build.summary(
        [StoredReport(AllReduce(rows=ROWS), MACHINE, "a command"), StoredReport(Fused([]), MACHINE, "another")]
    )

    allreduce, fused = [line for line in text.splitlines() if line.startswith("| [")]
    assert "| 1.10 (graphar, 1 MB, " in allreduce
    assert fused.endswith("| - |")

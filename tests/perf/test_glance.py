"""What a folder's first screen says of each topic, in report.md too, and the plots of the lesser topics."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from graphar.numerics.codecs import codec
from graphar.plan.sizes import GB, MB
from perf import lossless, norms, report
from perf.fused.report import Findings as FusedFindings
from perf.fused.sweep import FusedRow
from perf.lossless import LosslessRow
from perf.norms import NormRow
from perf.page import allreduce, build, dots, front, glance, models
from perf.page.plot import Axis
from perf.prefetch import PREFETCHED, SEQUENCE, PrefetchRow
from perf.quantized.errors import ErrorRow
from perf.quantized.report import Findings as QuantizedFindings
from perf.throughput.report import Findings as ThroughputFindings
from perf.throughput.report import ThroughputRow, Way
from tests.perf.test_report import MACHINE, row
from tests.perf.test_schema import FOUND

TENTHS = {"p10": 1.0, "p90": 9.0}


def normed(method, tokens, time_us, wrong=0):
    return NormRow(method, 2, tokens, 8192, TENTHS | {"median": time_us}, wrong)


def hinted(method, m, time_us):
    return PrefetchRow(method, 2, m, 5120, 8192, TENTHS | {"median": time_us}, 0)


def stepped(model, way, step_ms):
    return ThroughputRow(model, "img", 1000, 10, 2, 32, 64, way, 20, step_ms, 0.5, True)


NORMS = [normed("graphar", 1, 4.0), normed("nccl + norm", 1, 12.0), normed("flashinfer_one_shot", 1, 6.0)]
NORMS += [normed("graphar", 8, 10.0), normed("nccl + norm", 8, 9.0), normed("graphar + norm", 8, 5.0)]
STEPS = [
    stepped(model, way, step_ms)
    for model, exact in (("resnet50", 2.0), ("vit_base", 2.5))
    for way, step_ms in ((Way("alone"), 1.5), (Way("flattened"), 3.0), (Way("nccl"), 2.0), (Way("graphar"), exact))
]


# ---- at a glance ----------------------------------------------------------------------------------------------------


def test_a_topic_comes_to_the_range_of_graphars_speed_and_its_worst_case():
    found = glance.norms((NORMS, []))

    assert found.headline == "0.90x to 1.50x"
    assert found.words == "the speed of the best of 2 others, by tokens"
    assert found.shortfall == "slower in 1 of 2, at worst 0.90x: 8 tokens, 2 ranks"


def test_what_lies_within_noise_is_no_shortfall():
    assert glance.Glance("a peer", {"one": 0.98, "other": 2.0}).shortfall == ""


def test_a_wrong_result_has_no_speed():
    wrong = [normed("graphar", 1, 4.0, wrong=1), normed("nccl + norm", 1, 12.0)]

    assert glance.norms((wrong, [])).headline == ""


@pytest.mark.parametrize(
    ("found", "headline", "words"),
    [
        (
            glance.allreduce(report.Findings([row(time_us=10.0), row("nccl", 20.0)])),
            "2.00x",
            "the speed of NCCL, by size, 4 ranks",
        ),
        (
            glance.quantized(
                QuantizedFindings(
                    [row("graphar_int8", 10.0, nbytes=GB), row("nccl", 20.0, nbytes=GB)],
                    errors=[ErrorRow("int8", "normal", 4, 8.5, 0.008, 0.2, 0.99)],
                )
            ),
            "2.00x",
            "the speed of NCCL from 16 MB up, by codec, 4 ranks; relative errors of normal data: int8 0.008",
        ),
        (
            glance.lossless([LosslessRow("normal", 2, GB, 12.06, 80.0, 64.0)]),
            "1.25x",
            "the speed of sending all 16 bits, by size and kind of data",
        ),
        (
            glance.prefetch(([hinted(SEQUENCE, 1, 6.0), hinted(PREFETCHED, 1, 5.0)], [])),
            "1.20x",
            "the speed of the same all-reduce and matmul without the hint",
        ),
        (
            glance.fused(
                FusedFindings(
                    [
                        FusedRow(name, 2, 1, 2, 3, {"median": time_us, "p10": 1.0, "p99": 9.0}, 0)
                        for name, time_us in (("graphar", 4.0), ("matmul", 1.0), ("matmul+nccl", 6.0))
                    ]
                )
            ),
            "1.50x",
            "the speed of matmul+nccl, by rows",
        ),
        (
            glance.model(FOUND["model"][1]),
            "1.33x",
            "the speed of a step with NCCL, by the fastest exact way",
        ),
        (
            glance.training(FOUND["training"][1].rows),
            "1 of 1",
            "ways to round gradients that train as exact ones do, within noise",
        ),
        (
            glance.throughput(ThroughputFindings(STEPS)),
            "0.80x to 1.00x",
            "the speed of a training step with DistributedDataParallel over NCCL, exact gradients, by model",
        ),
        (
            glance.nvlink(FOUND["nvlink"][1]),
            "77%",
            "of the links' raw rate at 2 KB between 4 ranks, of which the protocol is 0%",
        ),
    ],
    ids=["allreduce", "quantized", "lossless", "prefetch", "fused", "model", "training", "throughput", "nvlink"],
)
def test_each_topic_has_a_figure_and_words(found, headline, words):
    assert (found.headline, found.words) == (headline, words)


# ---- report.md ------------------------------------------------------------------------------------------------------


def test_a_folder_has_its_first_screen_in_markdown_too(tmp_path):
    report.write(tmp_path, MACHINE, report.Findings([row(time_us=40.0), row("nccl", 20.0)]), "python -m perf allreduce")
    norms.write(tmp_path, MACHINE, NORMS, [], "python -m perf norms")

    build.write(tmp_path)

    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# graphar on 4x NVIDIA H200\n\n4x NVIDIA H200, driver 580.1, CUDA 13.0")
    assert "- **40 us** for 2 KB between 4 ranks, 0.5x the speed of NCCL\n" in text
    assert "- 4 ranks, in CUDA graphs: slower at 2 KB (2.00x the time of nccl).\n" in text
    assert "| [All-reduce, residual and RMSNorm as one op](norms.md) | **0.90x to 1.50x** the speed" in text
    assert "- Matmul and all-reduce as one op: `python -m perf fused`\n" in text


def test_a_wrong_result_of_any_topic_stands_on_the_first_screen_in_red(tmp_path):
    norms.write(tmp_path, MACHINE, [normed("graphar", 1, 4.0, wrong=7)], [], "python -m perf norms")

    text = build.write(tmp_path).read_text()

    first_screen = text[: text.index("<section")]
    assert '<b class="wrong">wrong</b> <strong>WRONG RESULTS: graphar at 1 tokens.</strong>' in first_screen
    assert "**wrong** **WRONG RESULTS: graphar at 1 tokens.**" in (tmp_path / "report.md").read_text()


def test_a_machine_without_gpus_says_that_its_times_are_not_the_kernels(tmp_path):
    block = MACHINE | dict.fromkeys(("gpu", "driver", "nccl"), None) | {"gpu_count": 0}
    lossless.write(tmp_path, block, lossless.Findings([LosslessRow("normal", 4, 0, 12.06)]), "python -m perf lossless")

    text = build.write(tmp_path).read_text()

    assert "<strong>This machine has no two GPUs</strong>" in text
    assert "nothing to compare with" not in text


def test_where_many_sizes_are_slower_the_worst_is_named():
    found = report.Findings(
        [
            one
            for at in range(6)
            for one in (row(time_us=30.0 + at, nbytes=2048 << 2 * at), row("nccl", 20.0, nbytes=2048 << 2 * at))
        ]
    )

    assert front.shortfalls(found) == [
        "4 ranks, in CUDA graphs: slower at 6 of 6 sizes, at worst 2 MB (1.75x the time of nccl)."
    ]


# ---- plots ----------------------------------------------------------------------------------------------------------


def test_the_links_nominal_rate_is_what_their_counters_were_held_against():
    sent = {"raw_tx_nbytes": 239_062_500, "raw_share": 0.5, "links": []}
    one = row(time_us=50.0, nbytes=16 * MB)

    assert allreduce.nominal_rate([one, replace(one, nvlink=sent)]) == pytest.approx(478.125)
    assert allreduce.nominal_rate([one]) is None


def test_a_hint_that_gains_lies_above_the_line():
    rows = [hinted(SEQUENCE, m, 6.0) for m in (1, 16)] + [hinted(PREFETCHED, m, 6.0 / m**0.25) for m in (1, 16)]

    ((plot,),) = models.prefetch((rows, [])).values()

    assert plot.lines[0].points == [(1, 1.0), (16, 2.0)]


def test_steps_stand_in_rows_by_model_with_what_communication_adds():
    gain, shares = models.throughput(
        ThroughputFindings([*STEPS, stepped("vit_base", Way("graphar", codec("int4")), 4.0)])
    )[""]

    assert [(dot.row, dot.way, dot.value) for dot in gain.dots] == [
        ("resnet50", "exact", 1.0),
        ("vit_base", "exact", 0.8),
        ("vit_base", "4 bits", 0.5),
    ]
    assert [(dot.row, dot.way, dot.value) for dot in shares.dots[:2]] == [
        ("resnet50", "flattened", 0.5),
        ("resnet50", "nccl", 0.25),
    ]


def test_dots_lie_where_their_values_are_and_wrong_ones_are_red():
    ones = [dots.Dot("a", "x", 1.0, "one"), dots.Dot("b", "x", 3.0, "three", wrong=True)]

    drawn = dots.render(dots.Dots("d", [("x", "own")], ones, Axis("v"), (2.0, "two")))

    circles = re.findall(r'<circle( class="wrong")? cx="([\d.]+)" cy="([\d.]+)"', drawn)
    (rule,) = re.findall(r'class="rule" d="M([\d.]+) ', drawn)
    assert [circle[0] for circle in circles] == ["", ' class="wrong"']
    assert dots.LEFT <= float(circles[0][1]) < float(rule) < float(circles[1][1]) <= dots.RIGHT
    assert float(circles[0][2]) < float(circles[1][2])
    assert dots.render(dots.Dots("d", [], [], Axis("v"))) == ""


def test_overlap_is_the_time_over_that_of_both_halves():
    rows = [
        FusedRow(name, 2, 1, 2, 3, {"median": time_us, "p10": 1.0, "p99": 9.0}, 0)
        for name, time_us in (("graphar", 6.0), ("matmul", 3.0), ("allreduce", 5.0))
    ]

    ((_, plot),) = models.fused(FusedFindings(rows)).values()

    assert {line.name: line.points for line in plot.lines} == {
        "graphar, best": [(1, 0.75)],
        "the longer floor": [(1, 0.625)],
    }

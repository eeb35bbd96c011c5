"""perf fp8: shapes, what is verified, a measurement with stand-ins for the GPU, and the report."""

from __future__ import annotations

import argparse
from functools import partial

import pytest
import torch

from graphar.numerics import fp8_products
from perf import __main__ as program
from perf import machine
from perf.report import read
from perf.topics import fp8 as topic
from perf.topics import matmul
from perf.topics.fp8 import (
    BF16,
    BLOCKS,
    METHODS,
    ROWS,
    SHAPES,
    TORCH,
    TORCH_BLOCKS,
    Scaled,
    count_wrong,
    make_operands,
    multiply,
)
from perf.topics.matmul import NEEDED
from tests.perf.samples import MACHINE
from tests.perf.samples import scaled_row as row

SMALL, FEW, MANY = (24, 16, 512), (16, 8192, 7168), (4096, 8192, 7168)  # M, N, K


def test_shapes_of_decode_and_of_more_rows_are_measured_unless_others_are_named():
    assert {m for m, *_ in SHAPES} >= {1, 16, 64, 8192}
    assert Scaled.plan(argparse.Namespace(shapes=None), 1) == SHAPES
    assert Scaled.plan(argparse.Namespace(shapes=[SMALL]), 4) == [SMALL]


def test_without_a_gpu_it_is_said_what_is_needed(tmp_path, no_gpus):
    with pytest.raises(SystemExit, match="matmul kernel needs a GPU of sm_90a"):
        program.main(["fp8", "--out", str(tmp_path)])


# ---- the measurement ------------------------------------------------------------------------------------------------


def scaled(a, w, out, *, a_scale, w_scale):
    """Stands in for graphar's kernel."""
    return out.copy_(fp8_products.scaled_linear(a, w, a_scale, w_scale))


def scaled_by_torch(a, w, a_scale, w_scale, *, out_dtype, out):
    """Stands in for torch._scaled_mm."""
    assert out.dtype == out_dtype
    if w_scale.shape[0] > 1:  # of blocks
        assert a_scale.stride(0) == 1
        w_scale = w_scale.t()
    return scaled(a, w.t(), out, a_scale=a_scale, w_scale=w_scale)


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a GPU."""
    times = iter(range(1, 10**6))
    monkeypatch.setattr(topic.gemm, "matmul", lambda a, w, out: torch.mm(a, w.t(), out=out))
    monkeypatch.setattr(topic.scaled_gemm, "scaled_matmul", scaled)
    monkeypatch.setattr(topic.scaled_gemm, "why_not", lambda a, w, out: "")
    monkeypatch.setattr(torch, "_scaled_mm", scaled_by_torch)
    monkeypatch.setattr(matmul.launcher, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(matmul, "missing_software", lambda: "")
    monkeypatch.setattr(topic, "capture", lambda run: run)
    monkeypatch.setattr(topic.ranks_of, "raise_clocks", lambda device: None)
    monkeypatch.setattr(topic.ranks_of, "graph_time_us", lambda launch: 20.0 * next(times))
    monkeypatch.setattr(topic.ranks_of, "run", lambda processes, work: work(0, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    on_cpu = partial(make_operands, device=torch.device("cpu"))
    monkeypatch.setattr(topic, "make_operands", lambda shape, device: on_cpu(shape))


def test_every_method_is_timed_in_turn_and_right(gpu):
    found = list(Scaled().measure([SMALL]))

    assert [(one.method, one.wrong, one.shape) for one in found] == [(name, 0, SMALL) for name in METHODS]
    turns = len(METHODS) * (1 + topic.REPEATS // 2)  # after a warm-up; of the median
    assert [one.median for one in found] == [turns + at + 1 for at in range(len(METHODS))]
    assert len(found) == Scaled.count([SMALL])


@pytest.mark.parametrize("method", [TORCH, TORCH_BLOCKS, ROWS, BLOCKS])
@pytest.mark.parametrize("which", [0, 1])
def test_a_result_with_another_scale_is_wrong(gpu, method, which):
    given = make_operands(SMALL, torch.device("cpu"))
    launch = partial(multiply, method, given, 1)
    scale = given.scales(method)[which]

    assert count_wrong(method, launch, given, 1) == 0
    kept = scale.clone()

    def with_another():
        scale[0, 0] *= 1.5
        launch()
        scale.copy_(kept)

    assert count_wrong(method, with_another, given, 1) > 0


def test_a_launch_that_computes_nothing_leaves_nothing_right(gpu):
    given = make_operands(SMALL, torch.device("cpu"))

    assert count_wrong(BF16, lambda: None, given.in_bf16(), 1) == given.out.numel()


def test_scales_of_blocks_that_torch_refuses_are_told(gpu, monkeypatch):
    def refusing(a, w, a_scale, w_scale, **keywords):
        if w_scale.shape[0] > 1:
            raise RuntimeError("Invalid scaling configuration.\nMore.")
        return scaled_by_torch(a, w, a_scale, w_scale, **keywords)

    monkeypatch.setattr(torch, "_scaled_mm", refusing)

    told, *found = Scaled().measure([SMALL])

    assert told == f"24 x 16 x 512: {TORCH_BLOCKS}: Invalid scaling configuration."
    assert [one.method for one in found] == [method for method in METHODS if method != TORCH_BLOCKS]


def test_a_run_is_reported(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "describe", lambda: MACHINE | {"gpu_count": 1})

    assert program.main(["fp8", "--shapes", "24x16x512", "--out", str(tmp_path)]) == 0

    assert len(read(tmp_path / "h200x1", Scaled).report.rows) == len(METHODS)
    assert "All 5 results were verified: none is wrong." in (tmp_path / "h200x1" / "fp8.md").read_text()


@pytest.mark.parametrize(
    ("name", "stand_in", "told"),
    [
        ("matmul.missing_software", lambda: "NVRTC cannot be loaded", "NVRTC cannot be loaded"),
        ("matmul.launcher.architecture", lambda device: "sm_80", NEEDED),
        ("fp8.scaled_gemm.why_not", lambda a, w, out: "misaligned", "24 x 16 x 512: misaligned"),
    ],
)
def test_what_cannot_be_measured_is_told(gpu, monkeypatch, name, stand_in, told):
    monkeypatch.setattr(f"perf.topics.{name}", stand_in)

    assert list(Scaled().measure([SMALL])) == [told]


# ---- the report -----------------------------------------------------------------------------------------------------


def report(wrong=0):
    times = {FEW: (20.0, 19.0, 25.0, 19.0, 38.0), MANY: (200.0, 180.0, 240.0, 216.0, 360.0)}
    return Scaled(
        [
            row(method, time, shape, wrong=wrong if method == ROWS else 0)
            for shape, of_shape in times.items()
            for method, time in zip(METHODS, of_shape, strict=True)
        ]
    )


def test_a_table_has_the_times_and_their_ratios():
    (section,) = report().sections()

    assert section.body[0].splitlines()[2:] == [
        "| 16 x 8192 x 7168 | 20 | 19 | 25 | 19 | 38 | 0.95 | 0.76 | 1.00 | 0.50 |",
        "| 4096 x 8192 x 7168 | 200 | 180 | 240 | 216 | 360 | 0.90 | 0.90 | 1.20 | 0.50 |",
    ]
    assert [mark.value for mark in section.figures[0].marks] == [0.95, 0.9]


def test_the_findings_are_the_means_and_the_worst_of_few_rows_and_of_more():
    found = report().findings()

    assert len(found) == 8
    assert found[:2] == [
        "rows/torch over 1 shape of fewer than 64 rows: geometric mean 0.950, at worst 0.95 (16 x 8192 x 7168).",
        "rows/torch over 1 shape of 64 rows or more: geometric mean 0.900, at worst 0.90 (4096 x 8192 x 7168).",
    ]


def test_a_glance_is_the_ratio_to_torch():
    assert report().glance().headline == "0.90 to 0.95"


def test_a_wrong_result_is_named_and_compared_with_nothing():
    found = report(wrong=3)

    assert found.wrong() == [f"{ROWS} at 16 x 8192 x 7168", f"{ROWS} at 4096 x 8192 x 7168"]
    assert {one.split()[0] for one in found.findings()} == {"blocks/torch"}
    assert found.glance().headline == "-"


def test_a_report_without_rows_has_no_figures():
    found = Scaled(skipped=[NEEDED])

    assert (found.glance().headline, found.findings(), found.sections()) == ("-", [], [])

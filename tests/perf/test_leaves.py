"""perf leaves: shapes, what is verified, a measurement with stand-ins for the GPU, and the report."""

from __future__ import annotations

import argparse
from functools import partial

import pytest
import torch

from graphar.numerics import leaf_tree
from perf import __main__ as program
from perf import machine
from perf.report import read
from perf.topics import leaves as topic
from perf.topics import matmul
from perf.topics.leaves import METHODS, PLAIN, SHAPES, TORCH, TREE, Leaves, count_wrong, tree_of_leaves
from perf.topics.matmul import NEEDED, make_operands
from tests.perf.samples import MACHINE
from tests.perf.samples import leaves_row as row

SMALL, FEW, MANY = (24, 16, 512), (16, 8192, 7168), (4096, 8192, 7168)  # M, N, K


def test_shapes_of_layers_with_a_long_k_are_measured_unless_others_are_named():
    assert {k for *_, k in SHAPES} == {4096, 7168, 8192, 14336}
    assert {m for m, *_ in SHAPES} >= {1, 16, 64, 8192}
    assert Leaves.plan(argparse.Namespace(shapes=None), 1) == SHAPES
    assert Leaves.plan(argparse.Namespace(shapes=[SMALL]), 4) == [SMALL]


def test_without_a_gpu_it_is_said_what_is_needed(tmp_path, no_gpus):
    with pytest.raises(SystemExit, match="matmul kernel needs a GPU of sm_90a"):
        program.main(["leaves", "--out", str(tmp_path)])


# ---- the measurement ------------------------------------------------------------------------------------------------


def product(a, w, out=None, *, leaves=1, out_dtype=None):
    """Stands in for graphar's kernel."""
    found = leaf_tree.in_leaves(a, w, leaves).to(out_dtype or a.dtype)
    return found if out is None else out.copy_(found)


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a GPU."""
    times = iter(range(1, 10**6))
    monkeypatch.setattr(topic.gemm, "matmul", product)
    monkeypatch.setattr(topic.gemm, "why_not", lambda a, w, out, leaves: "")
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
    found = list(Leaves().measure([SMALL]))

    assert [(one.method, one.wrong, one.shape) for one in found] == [(name, 0, SMALL) for name in METHODS]
    turns = len(METHODS) * (1 + topic.REPEATS // 2)  # after a warm-up; of the median
    assert [one.median for one in found] == [turns + at + 1 for at in range(len(METHODS))]
    assert len(found) == Leaves.count([SMALL])


def test_leaves_must_have_the_bits_of_the_tree(gpu):
    given = make_operands(SMALL, torch.device("cpu"))
    right = tree_of_leaves(given, 0)

    def launch(flips):
        given.out.copy_(right)
        given.out.view(torch.int16)[3, 5] ^= flips

    assert right.equal(product(given.a, given.weight(0), leaves=8))
    for flips, wrong in ((0, {}), (1, {TREE: 1})):
        launches = dict.fromkeys((TORCH, TREE), partial(launch, flips))
        assert count_wrong(launches, given, 1) == {TORCH: 0, TREE: 0} | wrong


def test_a_launch_that_computes_nothing_leaves_nothing_right(gpu):
    given = make_operands(SMALL, torch.device("cpu"))

    assert count_wrong({PLAIN: lambda: None}, given, 1) == {PLAIN: given.out.numel()}


def test_a_run_is_reported(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "describe", lambda: MACHINE | {"gpu_count": 1})

    assert program.main(["leaves", "--shapes", "24x16x512", "--out", str(tmp_path)]) == 0

    assert len(read(tmp_path / "h200x1", Leaves).report.rows) == len(METHODS)
    assert "All 3 results were verified: none is wrong." in (tmp_path / "h200x1" / "leaves.md").read_text()


@pytest.mark.parametrize(
    ("name", "stand_in", "told"),
    [
        ("missing_software", lambda: "NVRTC cannot be loaded", "NVRTC cannot be loaded"),
        ("launcher.architecture", lambda device: "sm_80", NEEDED),
        ("gemm.why_not", lambda a, w, out, leaves: f"not in {leaves}", "24 x 16 x 512: not in 8"),
    ],
)
def test_what_cannot_be_measured_is_told(gpu, monkeypatch, name, stand_in, told):
    monkeypatch.setattr(f"perf.topics.matmul.{name}", stand_in)

    assert list(Leaves().measure([SMALL])) == [told]


# ---- the report -----------------------------------------------------------------------------------------------------


def report(wrong=0):
    times = {FEW: (20.0, 19.0, 18.0), MANY: (200.0, 210.0, 220.0)}
    return Leaves(
        [
            row(method, time, shape, wrong=wrong if method == TREE else 0)
            for shape, of_shape in times.items()
            for method, time in zip(METHODS, of_shape, strict=True)
        ]
    )


def test_a_table_has_the_times_and_their_ratios():
    (section,) = report().sections()

    assert section.body[0].splitlines()[2:] == [
        "| 16 x 8192 x 7168 | 20 | 19 | 18 | 0.95 | 0.90 |",
        "| 4096 x 8192 x 7168 | 200 | 210 | 220 | 1.05 | 1.10 |",
    ]
    assert [mark.value for mark in section.figures[0].marks] == [0.9, 1.1]


def test_the_findings_are_the_means_and_the_worst_of_few_rows_and_of_more():
    assert report().findings() == [
        "leaves/torch over 1 shape of up to 64 rows: geometric mean 0.900, at worst 0.90 (16 x 8192 x 7168).",
        "leaves/torch over 1 shape of more rows: geometric mean 1.100, at worst 1.10 (4096 x 8192 x 7168).",
    ]


def test_a_glance_is_the_ratio_to_torch():
    assert report().glance().headline == "0.90 to 1.10"


def test_a_wrong_result_is_named_and_compared_with_nothing():
    found = report(wrong=3)

    assert found.wrong() == [f"{TREE} at 16 x 8192 x 7168", f"{TREE} at 4096 x 8192 x 7168"]
    assert (found.findings(), found.glance().headline) == ([], "-")


def test_a_report_without_rows_has_no_figures():
    found = Leaves(skipped=[NEEDED])

    assert (found.glance().headline, found.findings(), found.sections()) == ("-", [], [])

"""perf matmul: shapes and calls, what is verified, a measurement with stand-ins for the GPU, and the report."""

from __future__ import annotations

import argparse
import csv
from dataclasses import replace
from functools import partial

import pytest
import torch

from graphar.plan.policy import MeasuredMatmul
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import MATMUL_TILES, MatmulTile
from perf import __main__ as program
from perf import machine
from perf.report import read, timed_rows
from perf.topics import matmul as topic
from perf.topics.matmul import (
    METHODS,
    NEEDED,
    SHAPES,
    TILES,
    TORCH,
    Matmul,
    MatmulRow,
    Operands,
    calls_of,
    count_wrong,
    exact,
    is_far,
    limit_of,
    make_operands,
    name_of,
    shape_of,
)
from tests.perf.samples import MACHINE
from tests.perf.samples import matmul_row as row

SMALL = (24, 16, 320)  # M, N, K
FIRST, *_, LAST = TILES


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_88_shapes_are_measured_unless_others_are_named():
    assert len(set(SHAPES)) == len(SHAPES) == 88
    assert SHAPES[0] == (64, 8192, 2048)
    assert SHAPES[-1] == (8192, 1024, 8192)
    assert Matmul.plan(argparse.Namespace(shapes=None), 1) == SHAPES
    assert Matmul.plan(argparse.Namespace(shapes=[SMALL]), 4) == [SMALL]


def test_without_a_gpu_it_is_said_what_is_needed(tmp_path, no_gpus):
    with pytest.raises(SystemExit, match="matmul kernel needs a GPU of sm_90a"):
        program.main(["matmul", "--out", str(tmp_path)])


@pytest.mark.parametrize("gpu_count", [1, 2])
def test_a_quick_run_measures_few_shapes_with_any_number_of_gpus(gpu_count):
    options = program.parse(program.quick(["matmul", "--quick"], gpu_count))

    assert options.shapes == [(64, 8192, 2048), (4096, 8192, 2048)]


@pytest.mark.parametrize("text", ["4096x8192", "0x8x8", "8x8x", "8x8x8x8", "-1x8x8"])
def test_a_shape_is_three_positive_numbers(text):
    assert shape_of("4096x8192x2048") == (4096, 8192, 2048)
    with pytest.raises(ValueError, match=text):
        shape_of(text)


def test_every_tile_has_a_name_of_its_own():
    assert list(TILES.values()) == list(MATMUL_TILES)
    assert name_of(MatmulTile(128, 192, stages=4)) == "128x192x4"
    assert name_of(MatmulTile(64, 128, stages=8, cluster=2)) == "64x128x8c2"


@pytest.mark.parametrize(("shape", "calls"), [((64, 8192, 2048), 20), ((768, 8192, 7168), 11), ((8192, 8192, 7168), 5)])
def test_a_graph_of_large_products_has_fewer_calls(shape, calls):
    assert calls_of(shape) == calls


def test_calls_use_weights_in_turn_that_exceed_the_cache_together(monkeypatch):
    monkeypatch.setattr(topic, "CYCLED_NBYTES", 3 * 2 * 16 * 320)

    given = make_operands(SMALL, torch.device("cpu"))

    assert len(given.weights) == 4
    assert [given.weight(call) is given.weights[call % 4] for call in range(9)] == [True] * 9
    assert not given.weights[0].equal(given.weights[1])
    assert (given.a.shape, given.weight(0).shape, given.out.shape) == ((24, 320), (16, 320), (24, 16))


def test_there_are_no_more_weights_than_calls():
    assert len(make_operands(SMALL, torch.device("cpu")).weights) == calls_of(SMALL) == 20


# ---- what is right --------------------------------------------------------------------------------------------------


@pytest.fixture
def given():
    return make_operands(SMALL, torch.device("cpu"))


def product(a, weight):
    """The product, rounded once."""
    return (a.double() @ weight.double().t()).bfloat16()


def far(method, found, given):
    """Which elements of a product with the first weight are wrong."""
    value, magnitude = exact(given.a, given.weight(0))
    return is_far(found, value, limit_of(method, given.a.shape[1], value, magnitude))


def test_a_product_is_compared_with_the_sum_of_its_terms_and_of_their_magnitudes(given):
    value, magnitude = exact(given.a, given.weight(0))

    terms = given.a.double()[:, None] * given.weight(0).double()
    torch.testing.assert_close(value, terms.sum(-1))
    torch.testing.assert_close(magnitude, terms.abs().sum(-1))


def test_the_limit_is_a_rounding_and_sums_in_fp32():
    value, magnitude = (torch.tensor([one], dtype=torch.float64) for one in (-2.0, 2.0**10))

    limit = limit_of(FIRST, 2048, value, magnitude)

    of_sums = 128 * 2**-22 * 2**10  # 1/32
    assert limit.item() == of_sums + 2**-8 * (2 + of_sums)
    assert limit_of(TORCH, 2048, value, magnitude).item() == limit.item() + 2**-8 * 2**10


@pytest.mark.parametrize("method", [TORCH, FIRST])
def test_a_product_that_is_rounded_once_is_right(given, method):
    assert not far(method, product(given.a, given.weight(0)), given).any()


def test_torch_may_add_partial_products_that_are_rounded_and_graphar_may_not(given):
    parts = [product(*pair) for pair in zip(given.a.chunk(16, 1), given.weight(0).chunk(16, 1), strict=True)]
    found = sum(parts[1:], parts[0])

    assert not far(TORCH, found, given).any()
    assert far(FIRST, found, given).any()


@pytest.mark.parametrize("method", [TORCH, FIRST])
def test_a_product_without_a_few_columns_is_wrong(given, method):
    found = product(given.a[:, :-16], given.weight(0)[:, :-16])

    assert far(method, found, given).sum() > found.numel() / 2


def test_an_element_that_is_not_a_number_is_wrong(given):
    found = product(given.a, given.weight(0))
    found[3, 5] = torch.nan

    assert far(TORCH, found, given).nonzero().tolist() == [[3, 5]]


CALLS = 2


def launch_of(given: Operands, change=lambda out: None):
    """A stand-in for the replay of a graph."""

    def launch():
        given.out.copy_(product(given.a, given.weight(CALLS - 1)))
        change(given.out)

    return launch


def flip(out):
    out.view(torch.int16)[3, 5] ^= 1


@pytest.mark.parametrize(
    ("odd", "wrong"),
    [
        (TORCH, {}),  # within its limit
        (LAST, {LAST: 1}),
        (FIRST, dict.fromkeys(TILES, 1)),  # it is beyond its limit, and the others differ from it
    ],
)
def test_tiles_must_have_the_same_bits(given, odd, wrong):
    launches = {method: launch_of(given, flip if method == odd else lambda out: None) for method in METHODS}

    assert count_wrong(launches, given, CALLS) == dict.fromkeys(METHODS, 0) | wrong


@pytest.mark.parametrize("idle", [TORCH, LAST])
def test_a_launch_that_computes_nothing_leaves_nothing_right(given, idle):
    launches = {method: (lambda: None) if method == idle else launch_of(given) for method in METHODS}

    assert count_wrong(launches, given, CALLS)[idle] == given.out.numel()


def test_results_are_those_of_the_last_calls_weight(given):
    launches = dict.fromkeys(METHODS, launch_of(given))

    assert count_wrong(launches, given, CALLS + 1)[TORCH] > given.out.numel() / 2


# ---- the measurement ------------------------------------------------------------------------------------------------

TAKEN = list(TILES)[3]


def table_with(ratio):
    """A table with such a ratio of graphar's time to torch's at the measured shape."""
    table = shipped_table("default")
    measured = MeasuredMatmul(*SMALL, ratio)
    return replace(table, matmul=replace(table.matmul, own_from_rows=1, against_torch=(measured,)))


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a GPU. Returns the calls of graphar's kernel as tiles."""
    tiles, times = [], iter(range(1, 10**6))

    def matmul(a, w, out, *, tile):
        tiles.append(tile)
        return out.copy_(product(a, w))

    monkeypatch.setattr(topic.gemm, "matmul", matmul)
    monkeypatch.setattr(topic.gemm, "why_not", lambda a, w, out: "")
    monkeypatch.setattr(topic.gemm, "default_tile", lambda device, *shape: {(*SMALL, 7): TILES[TAKEN]}[shape])
    monkeypatch.setattr(topic.launcher, "sm_count", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA B999")
    monkeypatch.setattr(topic, "find_table", lambda name: {"NVIDIA B999": table_with(1.0)}[name])
    monkeypatch.setattr(topic.launcher, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(topic, "missing_software", lambda: "")
    monkeypatch.setattr(topic, "capture", lambda run: run)
    monkeypatch.setattr(topic.ranks_of, "raise_clocks", lambda device: None)
    monkeypatch.setattr(topic.ranks_of, "graph_time_us", lambda launch: 20.0 * next(times))
    monkeypatch.setattr(topic.ranks_of, "run", lambda processes, work: work(0, 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    on_cpu = partial(make_operands, device=torch.device("cpu"))
    monkeypatch.setattr(topic, "make_operands", lambda shape, device: on_cpu(shape))
    return tiles


def test_every_method_is_timed_in_turn_and_the_tile_taken_is_marked(gpu):
    found = list(Matmul().measure([SMALL]))

    assert [(one.method, one.wrong, one.shape, one.sms) for one in found] == [(name, 0, SMALL, 7) for name in METHODS]
    assert [one.method for one in found if one.is_taken] == [TAKEN]
    assert [one.method for one in found if one.is_auto] == [TAKEN]
    turns = len(METHODS) * (1 + topic.REPEATS // 2)  # after a warm-up; of the median
    assert [one.median for one in found] == [turns + at + 1 for at in range(len(METHODS))]
    assert len(found) == Matmul.count([SMALL])
    assert set(gpu) == set(MATMUL_TILES)


def test_torchs_matmul_is_marked_where_auto_takes_it(gpu, monkeypatch):
    monkeypatch.setattr(topic, "find_table", lambda name: table_with(1.5))

    found = list(Matmul().measure([SMALL]))

    assert [one.method for one in found if one.is_taken] == [TAKEN]
    assert [one.method for one in found if one.is_auto] == [TORCH]


def test_a_run_is_reported(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "describe", lambda: MACHINE | {"gpu_count": 1})

    assert program.main(["matmul", "--shapes", "24x16x320", "--out", str(tmp_path)]) == 0

    folder = tmp_path / "h200x1"
    assert len(read(folder, Matmul).report.rows) == 1 + len(MATMUL_TILES)
    assert "All 13 results were verified: none is wrong." in (folder / "matmul.md").read_text()
    with (folder / "matmul.csv").open() as lines:
        assert {one["sms"] for one in csv.DictReader(lines)} == {"7"}


def test_a_wrong_tile_fails_the_run(gpu, monkeypatch, tmp_path):
    multiply = topic.gemm.matmul

    def matmul(a, w, out, *, tile):
        multiply(a, w, out, tile=tile)
        if tile == TILES[LAST]:
            flip(out)

    monkeypatch.setattr(machine, "describe", lambda: MACHINE | {"gpu_count": 1})
    monkeypatch.setattr(topic.gemm, "matmul", matmul)

    assert program.main(["matmul", "--shapes", "24x16x320", "--out", str(tmp_path)]) == 1


def test_another_gpu_is_told_once(gpu, monkeypatch):
    monkeypatch.setattr(topic.launcher, "architecture", lambda device: "sm_80")

    assert list(Matmul().measure([SMALL, SMALL])) == [NEEDED]


def test_missing_software_is_told(gpu, monkeypatch):
    monkeypatch.setattr(topic, "missing_software", lambda: "NVRTC cannot be loaded")

    assert list(Matmul().measure([SMALL])) == ["NVRTC cannot be loaded"]


def test_a_shape_that_the_kernel_refuses_is_told_and_the_others_are_measured(gpu, monkeypatch):
    refused = (24, 12, 320)
    monkeypatch.setattr(topic.gemm, "why_not", lambda a, w, out: "12 columns" if out.shape[1] == 12 else "")

    found = list(Matmul().measure([refused, SMALL]))

    assert found[0] == "24 x 12 x 320: 12 columns"
    assert [one.method for one in found[1:]] == list(METHODS)


# ---- the report -----------------------------------------------------------------------------------------------------

LOW, WIDE = "graphar:64x64x12", "graphar:128x256x4c2"
FEW, MANY = (64, 8192, 2048), (4096, 8192, 2048)  # less than a wave of 132 SMs, and more


def shape_rows(shape, of_torch, low, wide, auto=WIDE, **more):
    """Rows of a shape, of which the wide tile is taken."""
    return [
        row(TORCH, of_torch, shape, is_auto=auto == TORCH),
        row(LOW, low, shape),
        row(WIDE, wide, shape, is_taken=True, is_auto=auto == WIDE, **more),
    ]


def report(auto=(TORCH, WIDE), **more):
    few, many = auto
    return Matmul(
        [*shape_rows(FEW, 10.0, 8.0, 16.0, few, **more), *shape_rows(MANY, 200.0, 400.0, 180.0, many, **more)]
    )


def test_a_table_has_the_taken_and_the_best_tile_what_auto_takes_and_their_ratios():
    taken, _ = report().sections()

    assert taken.body[0].splitlines()[0] == (
        "| M x N x K | torch (us) | taken | taken (us) | best | best (us) | auto | taken/torch | best/torch "
        "| taken/best | auto/better | taken (TFLOP/s) |"
    )
    assert taken.body[0].splitlines()[2:] == [
        "| 64 x 8192 x 2048 | 10 | 128x256x4c2 | 16 | 64x64x12 | 8 | torch.mm | 1.60 | 0.80 | 2.00 | 1.00 | 134 |",
        "| 4096 x 8192 x 2048 | 200 | 128x256x4c2 | 180 | 128x256x4c2 | 180 | 128x256x4c2 | 0.90 | 0.90 | 1.00 | 1.00 "
        "| 764 |",
    ]


def test_another_table_has_every_tile():
    _, tiles = report().sections()

    assert tiles.body[0].splitlines()[0] == "| M x N x K | 64x64x12 (us) | 128x256x4c2 (us) |"
    assert tiles.body[0].splitlines()[2:] == ["| 64 x 8192 x 2048 | 8 | 16 |", "| 4096 x 8192 x 2048 | 400 | 180 |"]


def test_the_findings_are_means_and_the_worst_over_all_shapes_and_over_those_of_a_wave():
    assert report().findings() == [
        "taken/torch over 2 shapes: geometric mean 1.200, at worst 1.60 (64 x 8192 x 2048).",
        "taken/torch over 1 shape of at least one wave: geometric mean 0.900, at worst 0.90 (4096 x 8192 x 2048).",
        "best/torch over 2 shapes: geometric mean 0.849, at worst 0.90 (4096 x 8192 x 2048).",
        "best/torch over 1 shape of at least one wave: geometric mean 0.900, at worst 0.90 (4096 x 8192 x 2048).",
        "taken/best over 2 shapes: geometric mean 1.414, at worst 2.00 (64 x 8192 x 2048).",
        "taken/best over 1 shape of at least one wave: geometric mean 1.000, at worst 1.00 (4096 x 8192 x 2048).",
        "auto/better over 2 shapes: geometric mean 1.000, at worst 1.00 (64 x 8192 x 2048).",
        "auto/better over 1 shape of at least one wave: geometric mean 1.000, at worst 1.00 (4096 x 8192 x 2048).",
        "The time of `auto` / the faster of torch's and graphar's is at most 1.00 "
        "(torch.mm, 64 x 8192 x 2048: `torch.mm` is fastest).",
    ]


@pytest.mark.parametrize("shape", [FEW, MANY])
def test_shapes_that_are_alike_have_one_sentence_for_each_ratio(shape):
    found = Matmul(shape_rows(shape, 10.0, 10.0, 10.0)).findings()

    assert [one.split(" over ")[1][:8] for one in found[:-1]] == ["1 shape:"] * 4
    assert found[-1].startswith("The time of `auto` / the faster of torch's and graphar's is at most 1.00")


def test_a_glance_is_the_ratio_of_the_tile_taken_to_torch():
    glance = report().glance()

    assert glance.words == "graphar's time of a matmul / torch's, by shape, geometric mean 1.200"
    assert glance.headline == "0.90 to 1.60"
    assert glance.shortfall == "1 of 2 cases; the worst is 1.60 (64 x 8192 x 2048)"


def test_the_loss_of_auto_is_that_against_the_faster_of_torchs_and_graphars():
    worse, found = report((WIDE, WIDE)), report((TORCH, TORCH))

    assert worse.loss_of_auto() == f"1.60 ({WIDE}, 64 x 8192 x 2048: `{TORCH}` is fastest)"
    assert found.loss_of_auto() == f"1.11 ({TORCH}, 4096 x 8192 x 2048: `{WIDE}` is fastest)"
    assert (
        worse.findings()[-1]
        == f"The time of `auto` / the faster of torch's and graphar's is at most {worse.loss_of_auto()}."
    )
    assert "| torch.mm | 0.90 | 0.90 | 1.00 | 1.11 | 764 |" in found.sections()[0].body[0]


def test_a_report_without_rows_has_no_figures():
    found = Matmul(skipped=[NEEDED])

    assert (found.glance().headline, found.findings(), found.sections(), found.loss_of_auto()) == ("-", [], [], "")


def test_a_wrong_tile_is_named_and_compared_with_nothing():
    found = report(wrong=3)

    assert found.wrong() == [f"{WIDE} at {one}" for one in ("64 x 8192 x 2048", "4096 x 8192 x 2048")]
    assert found.sections()[0].body[0].splitlines()[3] == (
        "| 4096 x 8192 x 2048 | 200 | 128x256x4c2 | 180 **(3 WRONG)** | 64x64x12 | 400 | 128x256x4c2 | - | 2.00 "
        "| - | - | - |"
    )
    assert [chart.marks for chart in found.sections()[0].figures] == [[], []]
    assert [one.split(" ")[0] for one in found.findings()] == ["best/torch"] * 2
    assert (found.glance().headline, found.loss_of_auto()) == ("-", "")


def test_a_shape_that_was_ended_early_is_shown_without_ratios():
    found = Matmul([row(TORCH, 10.0, FEW)])

    assert (
        found.sections()[0].body[0].splitlines()[2]
        == "| 64 x 8192 x 2048 | 10 | - | - | - | - | - | - | - | - | - | - |"
    )


def test_charts_have_a_row_for_each_weight_and_tell_waves_apart():
    of_torch, of_best = report().sections()[0].figures

    assert [(mark.row, mark.name, mark.value) for mark in of_torch.marks] == [
        ("8192 x 2048", "less", 1.6),
        ("8192 x 2048", "at least one wave", 0.9),
    ]
    assert of_torch.marks[0].hint == "64 x 8192 x 2048: 1.60, 128x256x4c2 taken, 64x64x12 best"
    assert (of_best.title, [mark.value for mark in of_best.marks]) == ("taken/best by N x K", [2.0, 1.0])


def test_times_of_two_runs_are_told_apart_by_method_and_shape():
    found = [one.identity for one in timed_rows(report().rows)]

    assert found[0] == ("torch.mm", "1 rank", "64 x 8192 x 2048")
    assert len(set(found)) == 6


def test_a_line_says_which_tile_is_taken():
    lines = [Matmul().line(one) for one in shape_rows(FEW, 10.0, 8.0, 16.0)]

    assert [line.endswith(", taken, auto") for line in lines] == [False, False, True]
    assert Matmul().line(shape_rows(FEW, 10.0, 8.0, 16.0, TORCH)[0]).endswith("wrong, auto")
    assert "64x64x12" in lines[1]
    assert "8.00 us      0 wrong" in lines[1]


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu(1)
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
)
def test_every_method_is_measured_and_verified_in_graphs_on_a_gpu():
    found = list(Matmul().measure([(200, 1096, 1032)]))

    assert [one.method for one in found if isinstance(one, MatmulRow)] == list(METHODS)
    assert [one for one in found if one.wrong or one.median <= 0] == []
    assert sum(one.is_taken for one in found) == 1
    assert sum(one.is_auto for one in found) == 1

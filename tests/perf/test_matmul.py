"""perf matmul: tiles, what "auto" takes, and the report. test_products.py has what it shares with other topics."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from graphar.plan.policy import MeasuredMatmul
from graphar.plan.tables import shipped_table
from graphar.plan.tiles import MATMUL_TILES, MatmulTile
from perf import __main__ as program
from perf import machine
from perf.topics import matmul as topic
from perf.topics.matmul import TILES, TORCH, Matmul, MatmulRow, name_of
from tests.perf import test_products
from tests.perf.samples import MACHINE
from tests.perf.samples import matmul_row as row
from tests.perf.test_products import SMALL, gpu, operands, rounded

__all__ = ("gpu", "operands")  # fixtures
METHODS = tuple(Matmul.columns)
FIRST, *_, LAST = TILES
TAKEN = list(TILES)[3]
CALLS = 2


def test_every_tile_has_a_name_of_its_own():
    assert list(TILES.values()) == list(MATMUL_TILES)
    assert name_of(MatmulTile(128, 192, stages=4)) == "128x192x4"
    assert name_of(MatmulTile(64, 128, stages=8, cluster=2)) == "64x128x8c2"


def launch_of(operands, change=lambda out: None):
    """A stand-in for the replay of a graph."""

    def launch():
        operands.out.copy_(rounded(operands.a, operands.weight(CALLS - 1)))
        change(operands.out)

    return launch


def flip(out):
    out.view(torch.int16)[3, 5] ^= 2  # more than a rounding


@pytest.mark.parametrize(
    ("odd", "wrong"),
    [
        (TORCH, {}),  # within its limit
        (LAST, {LAST: 1}),
        (FIRST, dict.fromkeys(TILES, 1)),  # it is beyond its limit, and the others differ from it
    ],
)
def test_tiles_must_have_the_same_bits(operands, odd, wrong):
    launches = {method: launch_of(operands, flip if method == odd else lambda out: None) for method in METHODS}

    assert Matmul.count_wrong(launches, operands, CALLS) == dict.fromkeys(METHODS, 0) | wrong


def table_with(ratio):
    """A table with such a ratio of graphar's time to torch's at the measured shape."""
    table = shipped_table("default")
    measured = MeasuredMatmul(*SMALL, ratio)
    return replace(table, matmul=replace(table.matmul, own_from_rows=1, against_torch=(measured,)))


@pytest.fixture
def tiles(gpu, monkeypatch):
    """Stands in for a GPU whose table prefers graphar's matmul. Returns the tiles of the calls of its kernel."""
    tiles = []

    def matmul(a, w, out, *, tile):
        tiles.append(tile)
        return test_products.multiply(a, w, out)

    monkeypatch.setattr(topic.gemm, "matmul", matmul)
    monkeypatch.setattr(topic.gemm, "default_tile", lambda device, *shape: {(*SMALL, 7): TILES[TAKEN]}[shape])
    monkeypatch.setattr(topic, "find_table", lambda name: {"NVIDIA B999": table_with(1.0)}[name])
    return tiles


def test_the_tile_taken_is_marked_and_every_tile_is_called(tiles):
    rows = list(Matmul().measure([SMALL]))

    assert [row.method for row in rows if row.is_taken] == [TAKEN]
    assert [row.method for row in rows if row.is_auto] == [TAKEN]
    assert {row.sms for row in rows} == {7}
    assert set(tiles) == set(MATMUL_TILES)


def test_torchs_matmul_is_marked_where_auto_takes_it(tiles, monkeypatch):
    monkeypatch.setattr(topic, "find_table", lambda name: table_with(1.5))

    rows = list(Matmul().measure([SMALL]))

    assert [row.method for row in rows if row.is_taken] == [TAKEN]
    assert [row.method for row in rows if row.is_auto] == [TORCH]


@pytest.mark.parametrize(("odd", "status"), [(None, 0), (LAST, 1)])
def test_a_wrong_tile_fails_the_run(tiles, monkeypatch, tmp_path, odd, status):
    multiply = topic.gemm.matmul

    def matmul(a, w, out, *, tile):
        multiply(a, w, out, tile=tile)
        if tile == TILES.get(odd):
            flip(out)

    monkeypatch.setattr(machine, "describe", lambda: MACHINE | {"gpu_count": 1})
    monkeypatch.setattr(topic.gemm, "matmul", matmul)

    assert program.main(["matmul", "--shapes", "24x16x512", "--out", str(tmp_path)]) == status
    written = json.loads((tmp_path / "h200x1" / "matmul.json").read_text())
    assert {row["sms"] for row in written["rows"]} == {7}


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
    sentences = Matmul(shape_rows(shape, 10.0, 10.0, 10.0)).findings()

    assert [sentence.split(" over ")[1][:8] for sentence in sentences[:-1]] == ["1 shape:"] * 4
    assert sentences[-1].startswith("The time of `auto` / the faster of torch's and graphar's is at most 1.00")


def test_a_glance_is_the_ratio_of_the_tile_taken_to_torch():
    glance = report().glance()

    assert glance.words == "graphar's time of a matmul / torch's, by shape, geometric mean 1.200"
    assert glance.headline == "0.90 to 1.60"
    assert glance.shortfall == "1 of 2 cases; the worst is 1.60 (64 x 8192 x 2048)"


def test_the_loss_of_auto_is_that_against_the_faster_of_torchs_and_graphars():
    worse, better = report((WIDE, WIDE)), report((TORCH, TORCH))

    assert worse.loss_of_auto() == f"1.60 ({WIDE}, 64 x 8192 x 2048: `{TORCH}` is fastest)"
    assert better.loss_of_auto() == f"1.11 ({TORCH}, 4096 x 8192 x 2048: `{WIDE}` is fastest)"
    assert (
        worse.findings()[-1]
        == f"The time of `auto` / the faster of torch's and graphar's is at most {worse.loss_of_auto()}."
    )
    assert "| torch.mm | 0.90 | 0.90 | 1.00 | 1.11 | 764 |" in better.sections()[0].body[0]


def test_a_wrong_tile_is_named_and_compared_with_nothing():
    made = report(wrong=3)

    assert made.wrong() == [f"{WIDE} at {shape}" for shape in ("64 x 8192 x 2048", "4096 x 8192 x 2048")]
    assert made.sections()[0].body[0].splitlines()[3] == (
        "| 4096 x 8192 x 2048 | 200 | 128x256x4c2 | 180 **(3 WRONG)** | 64x64x12 | 400 | 128x256x4c2 | - | 2.00 "
        "| - | - | - |"
    )
    assert made.ratio_chart().marks == []
    assert [sentence.split(" ")[0] for sentence in made.findings()] == ["best/torch"] * 2
    assert (made.glance().headline, made.loss_of_auto()) == ("-", "")


def test_a_shape_that_was_ended_early_is_shown_without_ratios():
    report = Matmul([row(TORCH, 10.0, FEW)])

    assert (
        report.sections()[0].body[0].splitlines()[2]
        == "| 64 x 8192 x 2048 | 10 | - | - | - | - | - | - | - | - | - | - |"
    )


def test_a_line_says_which_tile_is_taken():
    lines = [Matmul().line(row) for row in shape_rows(FEW, 10.0, 8.0, 16.0)]

    assert [line.endswith(", taken, auto") for line in lines] == [False, False, True]
    assert Matmul().line(shape_rows(FEW, 10.0, 8.0, 16.0, TORCH)[0]).endswith("wrong, auto")
    assert "64x64x12" in lines[1]
    assert "8.00 us      0 wrong" in lines[1]


@pytest.mark.gpu(1)
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
)
def test_every_method_is_measured_and_verified_in_graphs_on_a_gpu():
    rows = list(Matmul().measure([(200, 1096, 1032)]))

    assert [row.method for row in rows if isinstance(row, MatmulRow)] == list(METHODS)
    assert [row for row in rows if row.wrong or row.median <= 0] == []
    assert sum(row.is_taken for row in rows) == 1
    assert sum(row.is_auto for row in rows) == 1

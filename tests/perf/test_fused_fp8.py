"""perf fused_fp8: what it measures, what it takes for wrong, and the report."""

from __future__ import annotations

import json

import pytest
import torch

from graphar.numerics.fp8_products import BLOCK
from perf import __main__ as program
from perf.fusion import Trial
from perf.harness.ranks import InProcessRanks
from perf.peers.fp8_matmuls import (
    CPU_METHODS,
    CUDA_METHODS,
    OF_BLOCKS,
    OF_ROWS,
    SCALES,
    Fp8Layer,
    Fp8Plan,
    own_product,
    scaled_mm,
)
from perf.peers.matmuls import Variant
from perf.topics.fused_fp8 import FusedFp8, count_wrong, most_lost
from tests.perf.samples import fused_fp8_row as row

CPU = torch.device("cpu")
LAYERS = {scales: Fp8Layer(2, 16, 136, 256, scales) for scales in SCALES}
every_format = pytest.mark.parametrize("scales", SCALES)


def test_layers_have_whole_blocks_of_k_on_any_number_of_ranks_in_both_formats():
    layers = list(Fp8Plan("cuda", 3, (1, 64), 8192, (8192, 28672), CUDA_METHODS).layers())

    assert {layer.k for layer in layers} == {21 * BLOCK, 74 * BLOCK}
    assert [layer.scales for layer in layers] == [OF_ROWS] * 4 + [OF_BLOCKS] * 4
    assert str(layers[0]) == "3 ranks, 1 x 8192 x 2688, scales of rows"


@every_format
def test_operands_are_the_same_each_time_and_others_on_each_rank(scales):
    first, again, other = (LAYERS[scales].operands(rank, CPU) for rank in (0, 0, 1))

    for tensor, same, another in zip(first, again, other, strict=True):
        assert torch.equal(tensor.float(), same.float())
        assert not torch.equal(tensor.float(), another.float())


@every_format
def test_products_are_about_as_large_as_one(scales):
    assert 0.8 < own_product(*LAYERS[scales].operands(0, CPU)).float().std() < 1.4


def test_scales_of_blocks_lie_as_torch_needs_them():
    *_, a_scale, w_scale = LAYERS[OF_BLOCKS].operands(0, CPU)

    assert (a_scale.shape, a_scale.stride()) == ((16, 2), (1, 16))
    assert (w_scale.shape, w_scale.stride()) == ((2, 2), (2, 1))


class One(InProcessRanks):
    device = CPU

    def gather(self, data, window):
        return [data[window]]


def wrong_of(call, exact, scales=OF_ROWS, summed=True):
    layer = LAYERS[scales]
    trial = Trial(Variant("one", call, exact=exact, summed=summed), layer, layer.operands(0, CPU))
    return count_wrong(trial, trial.make_launch(), One(1))


@every_format
def test_the_ops_own_product_is_right(scales):
    assert wrong_of(own_product, exact=True, scales=scales) == 0


@pytest.mark.parametrize("summed", [True, False])
def test_torchs_product_is_near_enough(summed):
    assert wrong_of(scaled_mm, exact=False, summed=summed) == 0


@pytest.mark.parametrize(("exact", "factor", "wrong"), [(True, 1.01, 1), (False, 1.01, 0), (False, 1.2, 1)])
def test_an_element_that_is_off_is_counted(exact, factor, wrong):
    def call(*operands):
        product = own_product(*operands)
        product.view(-1)[product.abs().argmax()] *= factor
        return product

    assert wrong_of(call, exact) == wrong


@every_format
def test_another_kernel_may_lose_a_share_of_the_magnitudes_of_the_terms(scales):
    a, w, a_scale, w_scale = LAYERS[scales].operands(0, CPU)
    if scales == OF_BLOCKS:
        a_scale, w_scale = a_scale.repeat_interleave(BLOCK, 1), w_scale.repeat_interleave(BLOCK, 0)[: len(w)]
        w_scale = w_scale.repeat_interleave(BLOCK, 1)
    terms = (a.double() * a_scale)[:, None] * (w.double() * w_scale)[None]

    lost = most_lost(*LAYERS[scales].operands(0, CPU))

    assert torch.allclose(lost.double(), terms.abs().sum(-1) / 2048, rtol=1e-5)


@pytest.mark.usefixtures("forked_ranks")
def test_the_report_of_a_machine_without_gpus(tmp_path):
    arguments = ["--rows", "4", "--columns", "64", "--features", "256", "--scales", *SCALES]
    assert program.main(["fused_fp8", *arguments, "--out", str(tmp_path)]) == 0

    content = json.loads((tmp_path / "cpu" / "fused_fp8.json").read_text())
    methods = {scales: {row["method"] for row in content["rows"] if row["scales"] == scales} for scales in SCALES}
    assert methods[OF_ROWS] == set(CPU_METHODS)
    assert methods[OF_BLOCKS] == {name for name in CPU_METHODS if not name.startswith("scaled_mm")}
    assert all("4 x 64 x 128, scales of blocks: Invalid scaling" in message for message in content["skipped"])
    text = (tmp_path / "cpu" / "fused_fp8.md").read_text()
    assert f"All {len(content['rows'])} results were verified: none is wrong." in text


ROWS = [
    row("scaled_mm", 200.0),
    row("allreduce", 300.0),
    row("scaled_mm+nccl", 540.0),
    row("scaled_mm+symm_two_shot", 500.0),
    row("scaled_mm+graphar", 450.0),
    row("graphar", 400.0),
    row("graphar:none", 440.0),
    row("graphar:tiles", 400.0),
    row("scaled_mm+nccl", 500.0, scales="blocks"),
    row("graphar", 600.0, scales="blocks"),
]


def test_a_format_has_its_own_tables_and_finding():
    report = FusedFp8(ROWS)

    assert [section.title for section in report.sections()] == [
        "Scales of rows, 4 ranks, N = 8192, K = 2048",
        "Scales of blocks, 4 ranks, N = 8192, K = 2048",
    ]
    rows, blocks = (f"M = 4096, K = 2048, scales of {scales}, 4 ranks" for scales in SCALES)
    assert report.findings() == [
        f"graphar / best peer over 1 case of scales of rows: geometric mean 0.800, at worst 0.80 ({rows}).",
        f"graphar / best peer over 1 case of scales of blocks: geometric mean 1.200, at worst 1.20 ({blocks}).",
        "The time of `auto` / the fastest variant's time is at most 1.00"
        f" (graphar, {rows}: `graphar:tiles` is fastest).",
    ]
    assert report.glance().headline == "0.80 to 1.20"


def test_a_comparison_has_floors_the_best_of_each_side_and_what_was_hidden():
    (line,) = FusedFp8(ROWS[:8]).sections()[0].body[0].splitlines()[2:]

    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:6] == ["4096", "200", "300", "450", "scaled_mm+symm_two_shot", "500"]
    assert cells[6:] == ["400", "graphar", "400", "0.80", "0.89", "50"]

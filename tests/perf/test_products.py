"""Topics that compare matmuls on one GPU, with stand-ins for the GPU: what is measured, verified and reported."""

from __future__ import annotations

import argparse
from functools import partial

import pytest
import torch

from graphar.numerics import fp8_products, leaf_tree
from perf import __main__ as program
from perf import machine, products
from perf.harness.verify import exceeds
from perf.products import NEEDED, bf16_operands, calls_of, exact, limit_of, shape_of
from perf.report import read
from perf.topics import fp8, leaves, matmul
from tests.perf.samples import MACHINE, product_row

TOPICS = [matmul.Matmul, leaves.Leaves, fp8.Scaled]
SMALL = (24, 16, 512)  # M, N, K
CPU = torch.device("cpu")

each_topic = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
may_split_or_not = pytest.mark.parametrize("may_split", [True, False])


def rounded(a, weight):
    """The product, rounded once."""
    return (a.double() @ weight.double().t()).bfloat16()


def multiply(a, w, out=None, *, tile=None, leaves=1, out_dtype=None, a_scale=None, w_scale=None):
    """Stands in for graphar's kernels."""
    if a_scale is not None:
        return scaled(a, w, out, a_scale, w_scale)
    product = leaf_tree.in_leaves(a, w, leaves) if leaves > 1 or out_dtype else a.double() @ w.double().t()
    product = product.to(out_dtype or a.dtype)
    return product if out is None else out.copy_(product)


def scaled(a, w, out, a_scale, w_scale):
    return out.copy_(fp8_products.scaled_linear(a, w, a_scale, w_scale))


def scaled_by_torch(a, w, a_scale, w_scale, *, out_dtype, out):
    """Stands in for torch._scaled_mm."""
    assert out.dtype == out_dtype
    if w_scale.shape[0] > 1:  # of blocks
        assert a_scale.stride(0) == 1
        w_scale = w_scale.t()
    return scaled(a, w.t(), out, a_scale, w_scale)


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a GPU. Each launch takes 20 us more than the one before."""
    times = iter(range(1, 10**6))
    monkeypatch.setattr(matmul.gemm, "matmul", multiply)
    monkeypatch.setattr(matmul.gemm, "why_not", lambda a, w, out, leaves=1: "")
    monkeypatch.setattr(matmul.gemm, "default_tile", lambda device, *shape: next(iter(matmul.TILES.values())))
    monkeypatch.setattr(torch, "_scaled_mm", scaled_by_torch)
    monkeypatch.setattr(products.launcher, "sm_count", lambda device: 7)
    monkeypatch.setattr(products.launcher, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(products, "missing_software", lambda: "")
    monkeypatch.setattr(products, "capture", lambda run: run)
    monkeypatch.setattr(products.ranks_of, "raise_clocks", lambda device: None)
    monkeypatch.setattr(products.ranks_of, "graph_time_us", lambda launch: 20.0 * next(times))
    monkeypatch.setattr(products.ranks_of, "run", lambda processes, work: work(0, 0))
    for name, stand_in in (
        ("set_device", lambda device: None),
        ("empty_cache", lambda: None),
        ("current_device", lambda: 0),
        ("get_device_name", lambda device: "NVIDIA B999"),
    ):
        monkeypatch.setattr(torch.cuda, name, stand_in)
    for topic in TOPICS:
        monkeypatch.setattr(topic, "operands", partial(lambda make, shape, device: make(shape, CPU), topic.operands))


@each_topic
def test_all_shapes_are_measured_unless_others_are_named(topic):
    assert len(set(topic.shapes)) == len(topic.shapes)
    assert topic.plan(argparse.Namespace(shapes=None), 1) == topic.shapes
    assert topic.plan(argparse.Namespace(shapes=[SMALL]), 4) == [SMALL]


def test_shapes_are_those_of_layers():
    assert len(matmul.SHAPES) == 88
    assert (matmul.SHAPES[0], matmul.SHAPES[-1]) == ((64, 8192, 2048), (8192, 1024, 8192))
    assert {k for *_, k in leaves.SHAPES} == {4096, 7168, 8192, 14336}
    assert all({m for m, *_ in shapes} >= {1, 16, 64, 8192} for shapes in (leaves.SHAPES, fp8.SHAPES))


@pytest.mark.parametrize("gpu_count", [1, 2])
def test_a_quick_run_measures_few_shapes_with_any_number_of_gpus(gpu_count):
    options = program.parse(program.quick(["matmul", "--quick"], gpu_count))

    assert options.shapes == [(64, 8192, 2048), (4096, 8192, 2048)]


@pytest.mark.parametrize("text", ["4096x8192", "0x8x8", "8x8x", "8x8x8x8", "-1x8x8"])
def test_a_shape_is_three_positive_numbers(text):
    assert shape_of("4096x8192x2048") == (4096, 8192, 2048)
    with pytest.raises(ValueError, match=text):
        shape_of(text)


@pytest.mark.parametrize(("shape", "calls"), [((64, 8192, 2048), 20), ((768, 8192, 7168), 11), ((8192, 8192, 7168), 5)])
def test_a_graph_of_large_products_has_fewer_calls(shape, calls):
    assert calls_of(shape) == calls


def test_calls_use_weights_in_turn_that_exceed_the_cache_together(monkeypatch):
    monkeypatch.setattr(products, "CYCLED_NBYTES", 3 * 2 * 16 * 512)

    operands = bf16_operands(SMALL, CPU)

    assert len(operands.weights) == 4
    assert [operands.weight(call) is operands.weights[call % 4] for call in range(9)] == [True] * 9
    assert not operands.weights[0].equal(operands.weights[1])
    assert (operands.a.shape, operands.weight(0).shape, operands.out.shape) == ((24, 512), (16, 512), (24, 16))


def test_there_are_no_more_weights_than_calls():
    assert len(bf16_operands(SMALL, CPU).weights) == calls_of(SMALL) == 20


@pytest.fixture
def operands():
    return bf16_operands(SMALL, CPU)


def far(result, operands, may_split):
    """Which elements of a product with the first weight are wrong."""
    value, magnitude = exact(operands.a, operands.weight(0))
    return exceeds(result, value, limit_of(operands.a.shape[1], value, magnitude, may_split))


def test_a_product_is_compared_with_the_sum_of_its_terms_and_of_their_magnitudes(operands):
    value, magnitude = exact(operands.a, operands.weight(0))

    terms = operands.a.double()[:, None] * operands.weight(0).double()
    torch.testing.assert_close(value, terms.sum(-1))
    torch.testing.assert_close(magnitude, terms.abs().sum(-1))


def test_the_limit_is_a_rounding_and_sums_in_fp32():
    value, magnitude = (torch.tensor([number], dtype=torch.float64) for number in (-2.0, 2.0**10))

    limit = limit_of(2048, value, magnitude, may_split=False)

    of_sums = 128 * 2**-22 * 2**10  # 1/32
    assert limit.item() == of_sums + 2**-8 * (2 + of_sums)
    assert limit_of(2048, value, magnitude, may_split=True).item() == limit.item() + 2**-8 * 2**10


@may_split_or_not
def test_a_product_that_is_rounded_once_is_right(operands, may_split):
    assert not far(rounded(operands.a, operands.weight(0)), operands, may_split).any()


def test_torch_may_add_partial_products_that_are_rounded_and_graphar_may_not(operands):
    pairs = zip(operands.a.chunk(16, 1), operands.weight(0).chunk(16, 1), strict=True)
    first, *others = [rounded(*chunks) for chunks in pairs]
    result = sum(others, first)

    assert not far(result, operands, may_split=True).any()
    assert far(result, operands, may_split=False).any()


@may_split_or_not
def test_a_product_without_a_few_columns_is_wrong(operands, may_split):
    result = rounded(operands.a[:, :-16], operands.weight(0)[:, :-16])

    assert far(result, operands, may_split).sum() > result.numel() / 2


def test_an_element_that_is_not_a_number_is_wrong(operands):
    result = rounded(operands.a, operands.weight(0))
    result[3, 5] = torch.nan

    assert far(result, operands, may_split=True).nonzero().tolist() == [[3, 5]]


@each_topic
def test_a_launch_that_computes_nothing_leaves_nothing_right(gpu, topic):
    operands = topic.operands(SMALL, CPU)
    launches = {method: lambda: None for method in topic.columns}

    assert topic.count_wrong(launches, operands, 1) == dict.fromkeys(topic.columns, operands.out.numel())


@each_topic
def test_results_are_those_of_the_last_calls_weight(gpu, topic):
    operands = topic.operands(SMALL, CPU)
    launches = {method: partial(topic.multiply, method, operands, 1) for method in topic.columns}

    assert set(topic.count_wrong(launches, operands, 2).values()) == {0}
    assert min(topic.count_wrong(launches, operands, 3).values()) > operands.out.numel() / 2


@pytest.mark.parametrize("method", [fp8.TORCH, fp8.TORCH_BLOCKS, fp8.ROWS, fp8.BLOCKS])
@pytest.mark.parametrize("which", [0, 1])
def test_a_result_with_another_scale_is_wrong(gpu, method, which):
    operands = fp8.Scaled.operands(SMALL, CPU)
    launch = partial(fp8.Scaled.multiply, method, operands, 0)
    scale = operands.scales(method)[which]

    assert fp8.Scaled.count_wrong({method: launch}, operands, 1) == {method: 0}
    kept = scale.clone()

    def with_another():
        scale[0, 0] *= 1.5
        launch()
        scale.copy_(kept)

    assert fp8.Scaled.count_wrong({method: with_another}, operands, 1)[method] > 0


def test_leaves_must_have_the_bits_of_the_tree(gpu, operands):
    right = leaves.tree_of_leaves(operands, 0)

    def launch(flips):
        operands.out.copy_(right)
        operands.out.view(torch.int16)[3, 5] ^= flips

    assert right.equal(multiply(operands.a, operands.weight(0), leaves=8))
    for flips, wrong in ((0, {}), (1, {leaves.TREE: 1})):
        launches = dict.fromkeys((leaves.TORCH, leaves.TREE), partial(launch, flips))
        assert leaves.Leaves.count_wrong(launches, operands, 1) == {leaves.TORCH: 0, leaves.TREE: 0} | wrong


@each_topic
def test_every_method_is_timed_in_turn_and_right(gpu, topic):
    rows = list(topic().measure([SMALL]))

    assert [(row.method, row.wrong, row.shape) for row in rows] == [(name, 0, SMALL) for name in topic.columns]
    turns = len(topic.columns) * (1 + products.REPEATS // 2)  # after a warm-up; of the median
    assert [row.median for row in rows] == [turns + at + 1 for at in range(len(topic.columns))]
    assert len(rows) == topic.count([SMALL])


@each_topic
def test_a_run_is_reported(gpu, topic, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "describe", lambda: MACHINE | {"gpu_count": 1})

    assert program.main([topic.name, "--shapes", "24x16x512", "--out", str(tmp_path)]) == 0

    folder, count = tmp_path / "h200x1", len(topic.columns)
    assert len(read(folder, topic).report.rows) == count
    assert f"All {count} results were verified: none is wrong." in (folder / f"{topic.name}.md").read_text()


@each_topic
@pytest.mark.parametrize(
    ("name", "stand_in", "told"),
    [("launcher.architecture", lambda device: "sm_80", NEEDED), ("missing_software", lambda: "no NVRTC", "no NVRTC")],
)
def test_what_no_shape_can_be_measured_without_is_told_once(gpu, topic, monkeypatch, name, stand_in, told):
    monkeypatch.setattr(f"perf.products.{name}", stand_in)

    assert list(topic().measure([SMALL, SMALL])) == [told]


@each_topic
def test_a_shape_that_the_kernel_refuses_is_told_and_the_others_are_measured(gpu, topic, monkeypatch):
    refused = (24, 12, 512)
    monkeypatch.setattr(topic, "why_not", lambda operands: "12 columns" if operands.out.shape[1] == 12 else "")

    first, *others = topic().measure([refused, SMALL])

    assert first == "24 x 12 x 512: 12 columns"
    assert [row.method for row in others] == list(topic.columns)


def test_scales_of_blocks_that_torch_refuses_are_told(gpu, monkeypatch):
    def refusing(a, w, a_scale, w_scale, **keywords):
        if w_scale.shape[0] > 1:
            raise RuntimeError("Invalid scaling configuration.\nMore.")
        return scaled_by_torch(a, w, a_scale, w_scale, **keywords)

    monkeypatch.setattr(torch, "_scaled_mm", refusing)

    told, *rows = fp8.Scaled().measure([SMALL])

    assert told == f"24 x 16 x 512: {fp8.TORCH_BLOCKS}: Invalid scaling configuration."
    assert [row.method for row in rows] == [method for method in fp8.METHODS if method != fp8.TORCH_BLOCKS]


FEW, MANY = (16, 8192, 7168), (4096, 8192, 7168)
TIMES = {
    leaves.Leaves: {FEW: (20.0, 19.0, 18.0), MANY: (200.0, 210.0, 220.0)},
    fp8.Scaled: {FEW: (20.0, 19.0, 25.0, 19.0, 38.0), MANY: (200.0, 180.0, 240.0, 216.0, 360.0)},
}


def report(topic, wrong_method=None):
    """A report of few rows and of many. Results of ``wrong_method`` are wrong."""
    return topic(
        [
            product_row(method, time, shape, wrong=3 if method == wrong_method else 0)
            for shape, of_shape in TIMES[topic].items()
            for method, time in zip(topic.columns, of_shape, strict=True)
        ]
    )


@pytest.mark.parametrize(
    ("topic", "lines", "marks"),
    [
        (
            leaves.Leaves,
            [
                "| 16 x 8192 x 7168 | 20 | 19 | 18 | 0.95 | 0.90 |",
                "| 4096 x 8192 x 7168 | 200 | 210 | 220 | 1.05 | 1.10 |",
            ],
            [0.9, 1.1],
        ),
        (
            fp8.Scaled,
            [
                "| 16 x 8192 x 7168 | 20 | 19 | 25 | 19 | 38 | 0.95 | 0.76 | 1.00 | 0.50 |",
                "| 4096 x 8192 x 7168 | 200 | 180 | 240 | 216 | 360 | 0.90 | 0.90 | 1.20 | 0.50 |",
            ],
            [0.95, 0.9],
        ),
    ],
)
def test_a_table_has_the_times_and_their_ratios(topic, lines, marks):
    (section,) = report(topic).sections()

    assert section.body[0].splitlines()[2:] == lines
    assert [mark.value for mark in report(topic).ratio_chart().marks] == marks


def test_the_findings_are_the_means_and_the_worst_of_few_rows_and_of_more():
    assert report(leaves.Leaves).findings() == [
        "leaves/torch over 1 shape of up to 64 rows: geometric mean 0.900, at worst 0.90 (16 x 8192 x 7168).",
        "leaves/torch over 1 shape of more rows: geometric mean 1.100, at worst 1.10 (4096 x 8192 x 7168).",
    ]
    sentences = report(fp8.Scaled).findings()
    assert len(sentences) == 8
    assert sentences[:2] == [
        "rows/torch over 1 shape of fewer than 64 rows: geometric mean 0.950, at worst 0.95 (16 x 8192 x 7168).",
        "rows/torch over 1 shape of 64 rows or more: geometric mean 0.900, at worst 0.90 (4096 x 8192 x 7168).",
    ]


def test_a_glance_is_the_ratio_to_torch():
    assert report(leaves.Leaves).glance().headline == "0.90 to 1.10"
    assert report(fp8.Scaled).glance().headline == "0.90 to 0.95"


@pytest.mark.parametrize(
    ("topic", "method", "compared"), [(leaves.Leaves, leaves.TREE, set()), (fp8.Scaled, fp8.ROWS, {"blocks/torch"})]
)
def test_a_wrong_result_is_named_and_compared_with_nothing(topic, method, compared):
    made = report(topic, method)

    assert made.wrong() == [f"{method} at 16 x 8192 x 7168", f"{method} at 4096 x 8192 x 7168"]
    assert {sentence.split()[0] for sentence in made.findings()} == compared
    assert made.glance().headline == "-"


@each_topic
def test_a_report_without_rows_has_no_figures(topic):
    report = topic(skipped=[NEEDED])

    assert (report.glance().headline, report.findings(), report.sections()) == ("-", [], [])
    assert report.loss_of_auto() == ""

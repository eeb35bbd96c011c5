"""perf quantized: data, errors and the report."""

from __future__ import annotations

import json

import pytest
import torch

from graphar.numerics.codecs import NAMES, codec
from perf import __main__ as program
from perf.topics import quantized
from perf.topics.quantized import KINDS, ErrorRow, Quantized, error_rows, errors
from tests.perf.samples import row

CPU = torch.device("cpu")


@pytest.fixture
def little_data(monkeypatch):
    """A 32 x 256 tensor for each rank."""
    monkeypatch.setattr(quantized, "TOKENS", 32)
    monkeypatch.setattr(quantized, "HIDDEN", 256)
    monkeypatch.setattr(quantized, "FFN", 512)


@pytest.mark.parametrize("kind", KINDS)
def test_data_is_the_same_each_time_and_another_on_each_rank(kind):
    first, again = KINDS[kind](2, CPU), KINDS[kind](2, CPU)

    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not torch.equal(*first)
    assert first[0].isfinite().all()


def test_heavy_tails_are_heavy():
    normal, heavy = (KINDS[kind](1, CPU)[0].float() for kind in ("normal", "heavy-tailed"))

    assert normal.abs().max() < 6 * normal.std()
    assert heavy.abs().max() > 20 * heavy.std()


def test_ranks_share_a_block_whose_sum_does_not_depend_on_how_many_they_are():
    two, four = (sum(part.double() for part in KINDS["activations"](size, CPU)) for size in (2, 4))

    assert (two - four).norm() < 5e-3 * two.norm()  # each part is rounded to bfloat16


def test_errors_of_known_vectors():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)

    assert errors(torch.tensor([3.0, 4.0]), exact) == (0, 0, pytest.approx(1))
    three = errors(torch.tensor([3.0, 3.0]), exact)
    assert three == pytest.approx((0.2, 0.25, 21 / (5 * 18**0.5)))


@pytest.mark.usefixtures("little_data")
def test_more_bits_are_nearer_on_all_data():
    rows = list(error_rows([codec(f"int{bits}") for bits in (8, 6, 4, 2)], 2, CPU))

    for kind in KINDS:
        by_codec = [row.relative_l2 for row in rows if row.data == kind]
        assert by_codec == sorted(by_codec)
        assert by_codec[0] < 0.003


@pytest.mark.usefixtures("no_gpus", "little_data")
def test_the_report_of_a_machine_without_gpus(tmp_path):
    assert program.main(["quantized", "--world-size", "2", "--out", str(tmp_path)]) == 0

    folder = tmp_path / "cpu"
    content = json.loads((folder / "quantized.json").read_text())
    assert len(content["errors"]) == (1 + len(NAMES)) * len(KINDS)
    text = (folder / "quantized.md").read_text()
    assert "24 errors were measured; times need GPUs." in text
    assert all(f"| {name} |" in text for name in NAMES)
    assert "Errors of codecs, 2 ranks" in (folder / "index.html").read_text()


def timed(method, time_us, **more):
    return row(method, time_us, nbytes=64 << 20, **more)


def test_a_timed_report_shows_ratios_and_the_wrong():
    report = Quantized([], [timed("nccl", 100.0), timed("graphar_int4", 40.0, wrong=3)])

    (section,) = report.sections()
    times, _, ratios = section.body
    assert report.verdict() == "**WRONG RESULTS: 1 of 2 (graphar_int4 at 64 MB).**"
    assert times.endswith("| 64 MB | 100 | 40 **(3 WRONG)** |")
    assert ratios.endswith("| 64 MB | - |")

    right = Quantized(
        [ErrorRow("int8", "normal", 4, 8.5, 0.008, 0.2, 0.99)], [timed("nccl", 100.0), timed("graphar_int8", 40.0)]
    )
    _, section, _ = right.sections()
    assert section.body[2].endswith("| 64 MB | 0.40 |")
    assert right.glance().headline == "0.40"
    assert (
        right.glance().words == "time with a codec / the time of NCCL, from 16 MB up, by codec, 4 ranks; "
        "relative errors of normal data: int8 0.008"
    )


def test_codecs_are_timed_where_links_count_or_at_the_sizes_that_are_named():
    (plan,) = Quantized.plan(program.parse(["quantized"]), gpu_count=4)
    sizes = [case.nbytes for case in plan.cases()]
    assert (min(sizes), max(sizes)) == (256 << 10, 1 << 30)
    assert {case.mode for case in plan.cases()} == {"graph"}

    (plan,) = Quantized.plan(program.parse(["quantized", "--sizes", "2K", "2G"]), gpu_count=2)
    assert [case.nbytes for case in plan.cases()] == [2 << 10, 2 << 30]
    assert plan.methods[:2] == ("nccl", "graphar")

    (plan,) = Quantized.plan(program.parse(["quantized", "--world-size", "2", "--sizes", "2K"]), gpu_count=0)
    assert [(case.mode, case.nbytes) for case in plan.cases()] == [("cpu", 2 << 10)]
    assert plan.methods[:2] == ("gloo", "graphar")
    (plan,) = Quantized.plan(program.parse(["quantized"]), gpu_count=0)
    assert plan.methods == ()  # only errors

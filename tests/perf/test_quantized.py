"""perf quantized: data, errors and the report."""

from __future__ import annotations

import json

import pytest
import torch

from graphar.numerics.codecs import NAMES, codec
from perf import __main__ as program
from perf import files
from perf.cases import QuantisedPlan
from perf.quantized import command, errors, figure, report
from perf.quantized.data import KINDS
from tests.perf.test_report import MACHINE, row

CPU = torch.device("cpu")


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

    assert errors.errors(torch.tensor([3.0, 4.0]), exact) == (0, 0, pytest.approx(1))
    found = errors.errors(torch.tensor([3.0, 3.0]), exact)
    assert found == pytest.approx((0.2, 0.25, 21 / (5 * 18**0.5)))


def test_more_bits_are_nearer_on_all_data():
    rows = list(errors.rows([codec(f"int{bits}") for bits in (8, 6, 4, 2)], 2, CPU))

    for kind in KINDS:
        found = [one.relative_l2 for one in rows if one.data == kind]
        assert found == sorted(found)
        assert found[0] < 0.003


@pytest.mark.usefixtures("no_gpus")
def test_the_report_of_a_machine_without_gpus(tmp_path):
    assert program.main(["quantized", "--world-size", "2", "--out", str(tmp_path)]) == 0

    (folder,) = tmp_path.iterdir()
    found = json.loads((folder / "quantized.json").read_text())
    assert len(found["errors"]) == (1 + len(NAMES)) * len(KINDS)
    text = (folder / "quantized.md").read_text()
    assert "no times: they need GPUs" in text
    assert all(f"| {name} |" in text for name in NAMES)
    assert "<svg" in (folder / "quantized.svg").read_text()


def timed(method, time_us, **more):
    return row(method, time_us, nbytes=64 << 20, **more)


def test_a_timed_report_shows_speed_ups_rates_and_the_wrong():
    found = report.Findings(rows=[timed("nccl", 100.0), timed("graphar_int4", 40.0, wrong=3)])

    assert report.verdict(found).startswith("**WRONG RESULTS: graphar_int4 at 64 MB")
    assert "| 64 MB | 100.0 (1.00) | wrong |" in report.time_table(found.rows)

    assert "| 64 MB | wrong |" in report.wire_table(found.rows)

    right = [timed("nccl", 100.0), timed("graphar_int4", 40.0)]
    assert "| 64 MB | 100.0 (1.00) | 40.0 (2.50) |" in report.time_table(right)
    assert figure.speed_ups(right, 4) == {"int4": pytest.approx(2.5)}
    assert report.wire_rate(right[1]) == pytest.approx(1.5 * (32 << 20) * 4.5 / 8 / 40e3)


def test_what_was_measured_before_a_run_ended_is_reported(tmp_path, monkeypatch):
    def end(plan):
        yield timed("nccl", 100.0)
        raise RuntimeError("a rank has failed")

    monkeypatch.setattr(command.sweep, "run", end)
    plan = QuantisedPlan("cpu", 2, "process", ("bfloat16",), ("nccl",), 1 << 30, full=False)
    monkeypatch.setattr(command, "plans", lambda options, gpu_count: [plan])

    with pytest.raises(RuntimeError, match="a rank has failed"):
        command.run(None, tmp_path, MACHINE, "python -m perf quantized")

    found = report.found_in(files.read(tmp_path, "quantized"))
    assert [one.method for one in found.rows] == ["nccl"]
    assert "the run was ended before it was done" in found.skipped[0]


def test_codecs_are_timed_where_links_count():
    plan = QuantisedPlan("cuda", 4, "process", ("bfloat16",), (), 1 << 30, full=False)
    sizes = [case.nbytes for case in plan.cases()]

    assert (min(sizes), max(sizes)) == (256 << 10, 1 << 30)

"""perf lossless: what data cost on the wire, and the report."""

from __future__ import annotations

import pytest
import torch

from graphar.plan.sizes import GB, MB
from perf import __main__ as program
from perf.models.tasks import ByteTransformer
from perf.report import read
from perf.topics import lossless
from perf.topics.lossless import KINDS, Lossless, LosslessRow, bits_on_wire
from tests.cases import normal

CPU = torch.device("cpu")
NEAR, AS_IT_IS = 12 + 8 * 8 / 1024, 16 + 8 * 8 / 1024


def tile(**elements: float) -> torch.Tensor:
    """1024 ones, except the elements named at_N."""
    x = torch.ones(1024, dtype=torch.bfloat16)
    for place, value in elements.items():
        x[int(place.removeprefix("at_"))] = value
    return x


@pytest.mark.parametrize(
    ("x", "bits"),
    [
        (tile(), NEAR),
        (tile(at_5=2.0**-14, at_6=0.0), NEAR),
        (tile(at_5=2.0**-15), NEAR + 4 * 8 / 1024),
        (tile(**{f"at_{place}": 2.0**-20 for place in range(6)}), NEAR + 6 * 4 * 8 / 1024),
        (tile(**{f"at_{place}": 2.0**-20 for place in range(7)}), AS_IT_IS),
        (lossless.any_bits(1, CPU)[0], AS_IT_IS),
    ],
    ids=["alike", "14 below, and zero", "15 below", "six far below", "seven far below", "any"],
)
def test_bits_on_the_wire_are_those_of_the_format(x, bits):
    assert bits_on_wire(x) == pytest.approx(bits)


def test_normal_data_pack_well():
    assert bits_on_wire(normal(0, 1 << 20, torch.bfloat16)) < 12.2


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_finite_bf16_and_another_on_each_rank(kind, monkeypatch):
    monkeypatch.setattr(lossless, "ByteTransformer", lambda: ByteTransformer(32, 1, 2))

    first, second = KINDS[kind](2, CPU)

    assert first.dtype == torch.bfloat16
    assert first.isfinite().all()
    assert not torch.equal(first, second)


@pytest.mark.usefixtures("no_gpus")
def test_the_report_has_a_row_for_each_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(lossless, "KINDS", {"normal": KINDS["normal"], "any bits": KINDS["any bits"]})

    assert program.main(["lossless", "--out", str(tmp_path)]) == 0

    (report,) = tmp_path.glob("*/lossless.md")
    text = report.read_text()
    assert "| normal | 12.06 |" in text
    assert "| any bits | 16.06 |" in text
    assert "2 kinds of data; times need GPUs." in text


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_measured_before_one_failed_are_reported(tmp_path, monkeypatch, rows):
    def fail(world_sizes, on_gpus):
        measured = [(kind, nbytes) for kind in ("normal", "any bits") for nbytes in (MB, GB)][:rows]
        yield from [LosslessRow(kind, 4, nbytes, 12.06, 293.0, 240.0) for kind, nbytes in measured]
        raise RuntimeError("a rank has failed")

    monkeypatch.setattr(lossless, "rows_of", fail)

    with pytest.raises(RuntimeError, match="a rank has failed"):
        program.main(["lossless", "--out", str(tmp_path)])

    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    found = read(folder, Lossless).report
    assert len(found.rows) == rows
    assert "the run was ended before it was done" in found.skipped[0]
    text = (folder / "lossless.md").read_text()
    assert f"## Not measured\n\n- {found.skipped[0]}" in text
    assert ("| any bits | 12.06 | 293 | 240 | 0.82 | - | - | - |" in text) == (rows == 3)
    assert (folder / "index.html").exists()


def test_times_stand_beside_each_other_with_their_ratio():
    found = Lossless([LosslessRow("normal", 4, 64 << 20, 12.06, 293.0, 240.0)])

    (section,) = found.sections()

    assert section.body[0].splitlines()[0].endswith("| 64 MB: plain (us) | 64 MB: lossless (us) | 64 MB: of_plain |")
    assert section.body[0].endswith("| normal | 12.06 | 293 | 240 | 0.82 |")
    assert (found.glance().headline, found.glance().shortfall) == ("0.82", "")

"""perf lossless: bits on the wire, entropies, and the report."""

from __future__ import annotations

import math

import pytest
import torch

from graphar import UnsupportedError
from graphar.plan.algorithms import COMPRESSING
from graphar.plan.sizes import GB, MB
from perf import __main__ as program
from perf.harness import collectives
from perf.harness import ranks as ranks_of
from perf.models.tasks import ByteTransformer
from perf.report import read
from perf.topics import lossless
from perf.topics.lossless import KINDS, Lossless, LosslessPlan, LosslessRow, bits_on_wire, entropy
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


def test_the_entropy_is_that_of_exponents_given_the_largest_of_their_row():
    rows = torch.ones(8, 256)
    rows[1::2] *= 2.0**20  # rows of other magnitude cost nothing
    assert entropy(rows.bfloat16()) == pytest.approx(8)

    rows[:, :64] *= 0.5  # a quarter of each row
    assert entropy(rows.bfloat16()) == pytest.approx(8 + 0.25 * 2 + 0.75 * math.log2(4 / 3))


def test_the_format_sends_more_bits_than_the_entropy():
    for kind in ("normal", "heavy-tailed", "half zeros", "any bits"):
        x = KINDS[kind](1, CPU)[0]
        assert entropy(x) < bits_on_wire(x)


def test_arbitrary_bits_have_exponents_of_seven_bits():
    assert entropy(lossless.any_bits(1, CPU)[0]) == pytest.approx(15, abs=0.01)


def test_weights_are_trained_and_shared_by_the_ranks_in_whole_tiles(monkeypatch):
    monkeypatch.setattr(lossless, "ByteTransformer", lambda: ByteTransformer(32, 1, 2))

    trained = lossless.weights(3, CPU)
    monkeypatch.setattr(lossless, "STEPS", 0)
    initial = lossless.weights(3, CPU)

    assert {len(share) for share in trained} == {len(initial[0])}
    assert len(initial[0]) % 1024 == 0
    assert not torch.equal(torch.cat(trained), torch.cat(initial))


def test_gradients_are_summed_and_weights_are_gathered_at_every_size():
    cases = list(LosslessPlan(4, [MB, GB]).cases())

    assert {kind for op, kind, _ in cases if op == "allgather"} == KINDS.keys() - {"gradients"}
    assert {kind for op, kind, _ in cases if op != "allgather"} == KINDS.keys() - {"weights"}
    assert len(cases) == LosslessPlan(4, [MB, GB]).count() == 2 * len(COMPRESSING) * (len(KINDS) - 1)


@pytest.mark.usefixtures("no_gpus")
def test_an_option_limits_the_sizes_and_a_machine_without_gpus_has_none():
    def sizes(gpu_count, *arguments):
        options = program.parse(["lossless", "--world-size", "2", *arguments])
        return [list(plan.sizes) for plan in Lossless.plan(options, gpu_count)]

    assert sizes(4) == [[8 * MB << step for step in range(9)]]
    assert sizes(4, "--max-nbytes", "20M") == [[8 * MB, 16 * MB]]
    assert sizes(0) == [[]]


@pytest.mark.usefixtures("no_gpus")
def test_the_report_has_a_row_for_each_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(lossless, "KINDS", {"normal": KINDS["normal"], "any bits": KINDS["any bits"]})

    assert program.main(["lossless", "--out", str(tmp_path)]) == 0

    (report,) = tmp_path.glob("*/lossless.md")
    text = report.read_text()
    assert "| normal | 10.55 | 12.06 |" in text
    assert "| any bits | 15.00 | 16.06 |" in text
    assert "2 kinds of data; times need GPUs." in text


def test_a_report_without_ops_entropies_and_nccl_shows_its_all_reduces():
    report = Lossless([LosslessRow("normal", 4, 64 * MB, 12.06, 293.0, 240.0)])

    (section,) = report.sections()

    assert section.title == "All-reduce, 4 ranks"
    _, ratios, _, times = section.body
    assert ratios.splitlines()[::2] == ["| data | bits | 64 MB: of_plain |", "| normal | 12.06 | 0.82 |"]
    assert times.splitlines()[::2] == ["| data, size | plain (us) | lossless (us) |", "| normal, 64 MB | 293 | 240 |"]
    assert (report.glance().headline, report.glance().shortfall) == ("0.82", "")


def timed(op="allgather", kind="weights", nbytes=64 * MB, wrong=None):
    return LosslessRow(kind, 4, nbytes, 12.07, 150.0, 120.0, op, 10.42, 160.0, wrong or {})


def test_each_op_has_a_section_with_the_time_over_both_others():
    report = Lossless([timed("allreduce", "normal"), timed(), timed(nbytes=GB)])

    first, second = report.sections()

    assert [first.title, second.title] == ["All-reduce, 4 ranks", "All-gather, 4 ranks"]
    tables = [part.splitlines()[::2] for part in second.body[1::2]]
    assert tables[0] == [
        "| data | entropy | bits | 64 MB: of_plain | 1 GB: of_plain |",
        "| weights | 10.42 | 12.07 | 0.80 | 0.80 |",
    ]
    assert tables[1][1] == "| weights | 10.42 | 12.07 | 0.75 | 0.75 |"
    assert tables[2][0] == "| data, size | plain (us) | lossless (us) | nccl (us) |"
    assert all(plot is not None for plot in second.figures)


@pytest.mark.parametrize(
    ("method", "status", "ratios"),
    [("lossless", 1, ["-", "-"]), ("plain", 1, ["-", "0.75"]), ("nccl", 0, ["0.80", "-"])],
)
def test_wrong_results_are_not_compared_and_only_graphars_fail_a_run(tmp_path, monkeypatch, method, status, ratios):
    monkeypatch.setattr(LosslessPlan, "measure", lambda plan: iter([timed(wrong={method: 3})]))

    assert program.main(["lossless", "--out", str(tmp_path)]) == status

    (path,) = tmp_path.glob("*/lossless.json")
    report = read(path.parent, Lossless).report
    assert "all-gather, weights, 64 MB" in report.verdict()
    (section,) = report.sections()
    assert [part.splitlines()[2].split(" | ")[3].removesuffix(" |") for part in section.body[1:4:2]] == ratios
    assert "**(3 WRONG)**" in section.body[5]


def measure_on_gpus(rank, port):
    mine = ranks_of.join(rank, 2, "cuda", port)
    calls = lossless.make_calls(mine)
    for op, methods in calls.items():
        for make in (KINDS["normal"], KINDS["any bits"]):
            x = collectives.input_of(op, MB, make(2, CPU)[rank].flatten().to(mine.device), 2)
            yield op, collectives.measure(op, MB, x, methods, mine)[1]


@pytest.mark.gpu(2)
def test_on_gpus_each_op_is_timed_compressed_plain_and_with_nccl_and_nothing_is_wrong():
    none = dict.fromkeys(("plain", "lossless", "nccl"), 0)

    assert list(ranks_of.run(2, measure_on_gpus)) == [(op, none) for op in COMPRESSING for _ in range(2)]


def make_calls_on_the_cpu(rank, port):
    mine = ranks_of.join(rank, 2, "cpu", port)
    try:
        lossless.make_calls(mine)
    except UnsupportedError as error:
        yield str(error)


@pytest.mark.usefixtures("forked_ranks")
def test_where_no_kernel_can_compress_nothing_is_timed():
    assert list(ranks_of.run(2, make_calls_on_the_cpu)) == ["allreduce: the tensor is on the CPU"]

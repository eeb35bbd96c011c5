"""perf's files for machines: what they hold is what the schema says, and what is read is what was written."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from graphar.numerics.codecs import codec
from perf import files, lossless, nvlink_report, report, schema
from perf.compile_report import Compiled
from perf.compile_report import write as write_compiled
from perf.fused import report as fused
from perf.fused.sweep import FusedRow
from perf.fused.timeline import Event, Lane, Mean, Timeline
from perf.lossless import LosslessRow
from perf.model import report as model
from perf.model.runs import ModelRow
from perf.nvlink import Reading, utilisation
from perf.page.topics import TOPICS
from perf.quantized import report as quantized
from perf.quantized.errors import ErrorRow
from perf.throughput import report as throughput
from perf.training import report as training
from perf.training.runs import Outcome, Run
from tests.perf.test_report import MACHINE, row

COMMITTED = sorted((Path(__file__).parents[2] / "reports").glob("*/*.json"))
OUTCOME = Outcome(0.5, 0.9, 0.6, 0.8, 1.0, 4.0, 1000, True, [2.0 / (1 + step) for step in range(30)])
TRAINED = [
    training.TrainingRow("bytes", "0123456789ab", "graphar", 2, 64, 1.5, Run("graphar", *kind, 3, 30), OUTCOME)
    for kind in ((None, False), (codec("int4"), True))
]
WAYS = [*map(throughput.Way, ("alone", "one by one", "gloo", "graphar")), throughput.Way("graphar", codec("int4"))]
STEPPED = [throughput.ThroughputRow("resnet50", "img", 1000, 10, 2, 32, 64, way, 20, 1.5, 0.5, True) for way in WAYS]
STEPS = [
    ModelRow(method, "tiny", 2, 1, phase, tokens, 1024, {"median": time_us, "p10": 0.9, "p99": 9.0}, error, 0)
    for phase, tokens in (("decode", 1), ("prefill", 1024))
    for method, time_us, error in (("alone", 2.0, None), ("nccl", 4.0, 0.01), ("graphar", 3.0, 0.01))
]
MATMUL = FusedRow("graphar", 2, 1, 2, 3, {"median": 1.0, "p10": 0.9, "p99": 1.1}, 0)
EVENTS = {
    "consumer 0": [Event(0.0, 8.0, "multiplying"), Event(8.0, 0.5, "adding"), Event(8.5, 0.75, "staging")],
    "sender 0": [Event(0.25, 8.5, "waiting"), Event(8.75, 2.0, "sending")],
    "gatherer 0": [Event(0.25, 9.25, "waiting"), Event(9.5, 1.5, "gathering")],
}
LANES = [Lane(block, warp, events) for block in (0, 66) for warp, events in EVENTS.items()]
TIMELINE = Timeline(2, 1, 2, 3, "MatmulTile<64, 64, 12>", 11.0, [Mean("consumer", "multiplying", 8.0)], LANES, 0)
# Counters that nobody has read: link n of 18 sends at 60 % and 2 n % of its rate.
MADE_UP = Reading(*[tuple(60 + 2 * link for link in range(18))] * 4)
NVLINK = utilisation(MADE_UP, 1000, range(18), time_us=1.0, raw_rates=[0.1] * 18).to_dict()
FOUND = {
    "allreduce": (report, report.Findings([row(), row("nccl")], ["vllm: no such package"], {4: 355.0})),
    "nvlink": (nvlink_report, report.Findings([replace(row(), nvlink=NVLINK)], ["NVML: no counters"], {4: 355.0})),
    "quantized": (quantized, quantized.Findings([row()], errors=[ErrorRow("int4", "normal", 4, 4.5, 0.1, 0.2, 0.99)])),
    "fused": (fused, fused.Findings([MATMUL], timelines=[TIMELINE])),
    "model": (model, model.Findings(STEPS, ["symm_two_shot, 2 ranks: no such memory"])),
    "training": (training, training.Findings(TRAINED, ["digits: the run was ended"])),
    "throughput": (throughput, throughput.Findings(STEPPED, ["vit: no torchvision"])),
}


@pytest.fixture
def content(tmp_path):
    module, found = FOUND["allreduce"]
    module.write(tmp_path, MACHINE, found, "python -m perf")
    return files.read(tmp_path, "allreduce")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_committed_report_keeps_to_the_schema(path):
    assert files.read(path.parent, path.stem)["topic"] == path.stem


@pytest.mark.parametrize("topic", FOUND)
def test_what_is_read_is_what_was_written(tmp_path, topic):
    module, found = FOUND[topic]

    module.write(tmp_path, MACHINE, found, "python -m perf")

    assert module.found_in(files.read(tmp_path, topic)) == found


def test_compiled_kernels_are_read_as_they_were_written(tmp_path):
    one = Compiled("one_shot.cu", "one_shot<bf16, 2>", "sm_90a", 0.5, 1000, 32, 0, 0)

    path = write_compiled(tmp_path, MACHINE, [one], 1.0, "python -m perf compile --every 9")

    assert "one_shot.cu" in path.read_text()
    assert "python -m perf compile --every 9" in path.read_text()
    assert [Compiled(**kernel) for kernel in files.read(tmp_path, "compile")["kernels"]] == [one]


def test_lossless_rows_are_read_as_they_were_written(tmp_path):
    rows = [LosslessRow("normal", 4, 16 << 20, 12.06, 75.0, 70.0), LosslessRow("normal", 4, 0, 12.06)]

    found = lossless.Findings(rows, ["gradients: the run was ended"])

    lossless.write(tmp_path, MACHINE, found, "python -m perf lossless")

    assert lossless.found_in(files.read(tmp_path, "lossless")) == found


def test_every_topic_of_the_schema_has_a_place_on_the_page():
    assert [topic.name for topic in TOPICS] == list(schema.TOPICS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda report: report.update(schema=0), "it has schema 0, and this is 4"),
        (lambda report: report.update(topic="dance"), "its topic is 'dance'"),
        (lambda report: report.pop("command"), "command is missing"),
        (lambda report: report.update(more=1), "more is unknown"),
        (lambda report: report["machine"].update(gpu_count="4"), "machine.gpu_count is '4'"),
        (lambda report: report["rows"][1].update(wrong=True), "rows[1].wrong is True"),
        (lambda report: report["rows"][0]["time_us"].pop("p99"), "rows[0].time_us.p99 is missing"),
        (lambda report: report.update(skipped="none"), "skipped is not a list"),
    ],
)
def test_what_is_not_as_the_schema_says_is_named(content, change, problem):
    changed = copy.deepcopy(content)
    change(changed)

    assert problem in schema.problem_with(changed)


def of_version_1(folder):
    """The training report as it was before there were curves, and as it is now."""
    training.write(folder, MACHINE, training.Findings(TRAINED), "python -m perf train")
    content = files.read(folder, "training")
    before = copy.deepcopy(content) | {"schema": 1}
    del before["skipped"]
    for one in before["rows"]:
        del one["outcome"]["losses"]
    return before, content


def test_a_report_of_an_earlier_version_is_read_as_not_knowing_what_it_did_not_hold(tmp_path):
    before, content = of_version_1(tmp_path)
    (tmp_path / "training.json").write_text(json.dumps(before))

    for one in content["rows"]:
        one["outcome"]["losses"] = []
    assert files.read(tmp_path, "training") == content


def test_a_field_is_known_from_the_version_on_that_brought_it(tmp_path):
    before, content = of_version_1(tmp_path)

    assert schema.problem_with(before | {"schema": 2}) == "rows[0].outcome.losses is missing"
    assert schema.problem_with(before | {"schema": 1, "skipped": []}) == "skipped is unknown"
    assert schema.problem_with({**before, "rows": content["rows"]}) == "rows[0].outcome.losses is unknown"


def test_a_file_that_is_no_report_is_named(tmp_path):
    (tmp_path / "allreduce.json").write_text(json.dumps([1]))
    (tmp_path / "fused.json").write_text("{")

    with pytest.raises(ValueError, match=r"allreduce\.json: it is not a JSON object"):
        files.read(tmp_path, "allreduce")
    with pytest.raises(ValueError, match=r"fused\.json: "):
        files.read(tmp_path, "fused")

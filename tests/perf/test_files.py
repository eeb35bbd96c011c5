"""perf's files: where they are, reading gives what was written, and what is no report is refused with the reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from graphar.numerics.codecs import Codec
from perf import __main__ as program
from perf import files, machine
from perf.report import read, topics
from perf.topics.allreduce import AllReduce
from perf.topics.training import Training
from tests.perf.samples import CPU, MACHINE, REPORTS, TRAINED, row

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / "reports").glob("*/*.json"))
BY_NAME = {topic.name: topic for topic in topics()}


@pytest.mark.usefixtures("forked_ranks")
def test_a_measurement_changes_no_committed_report_and_writes_where_git_does_not_look(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = {path: path.read_bytes() for path in (ROOT / "reports").rglob("*.*")}

    assert program.main(["allreduce", "--world-size", "2", "--max-nbytes", "2K"]) == 0

    assert {path: path.read_bytes() for path in (ROOT / "reports").rglob("*.*")} == before
    (page,) = tmp_path.glob("build/reports/*/index.html")
    assert (page.parent / "allreduce.json").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["build"]
    assert "build/" in (ROOT / ".gitignore").read_text().splitlines()


def test_a_named_folder_is_used_and_one_that_cannot_be_made_ends_perf_before_it_measures(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "describe", lambda: CPU)
    (tmp_path / "file").write_text("")

    assert program.folder_of(program.parse(["--out", str(tmp_path / "mine")]), CPU) == tmp_path / "mine" / "cpu"
    with pytest.raises(SystemExit, match=r"--out: .*file"):
        program.main(["--out", str(tmp_path / "file"), "allreduce"])


def test_every_topic_has_a_sample_and_all_have_places_of_their_own():
    assert [type(topic) for topic in REPORTS] == topics()
    assert len({topic.order for topic in topics()}) == len(REPORTS)


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.name)
def test_what_is_read_is_what_was_written(tmp_path, report):
    report.write(tmp_path, MACHINE, "python -m perf")

    stored = read(tmp_path, type(report))

    assert (stored.report, stored.machine, stored.command) == (report, MACHINE, "python -m perf")


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_committed_report_is_read(path):
    assert read(path.parent, BY_NAME[path.stem]).report.name == path.stem


def test_a_row_is_a_line_of_json(tmp_path):
    path = AllReduce(rows=[row(), row("nccl")]).write(tmp_path, MACHINE, "python -m perf").with_suffix(".json")

    lines = path.read_text().splitlines()

    assert [json.loads(line.removesuffix(","))["method"] for line in lines if '"method"' in line] == ["graphar", "nccl"]
    first = json.loads(path.read_text())["rows"][0]
    assert (first["nbytes"], first["time_us"]) == (2048, {"median": 10.0, "p10": 10.0, "p99": 10.0})
    assert (first["algbw"], first["busbw"]) == (pytest.approx(0.2048), pytest.approx(0.3072))


def test_a_codec_is_an_object_of_its_fields():
    content = files.to_json(Codec(4, 128, seed=7))

    assert (content["bits"], content["bucket_size"], content["scale_dtype"], content["seed"]) == (4, 128, "bfloat16", 7)
    assert files.from_json(Codec, content) == Codec(4, 128, seed=7)


def test_derived_figures_are_written_and_not_read():
    (_, int4) = files.to_json(TRAINED)

    assert (int4["mode"], int4["bits"], int4["sent_nbytes"]) == ("absmax nearest EF", 4.5, 1000 * 4.5 / 8)
    assert files.from_json(type(TRAINED[1]), int4 | {"bits": 99.0}) == TRAINED[1]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda report: report.update(schema=0), "it has schema 0, and this is 7"),
        (lambda report: report.update(topic="dance"), "its topic is 'dance'"),
        (lambda report: report.pop("rows"), "rows is missing"),
        (lambda report: report["rows"][1].update(wrong=True), "rows[1].wrong is True"),
        (lambda report: report["rows"][0].pop("dtype"), "rows[0].dtype is missing"),
        (lambda report: report["rows"][0]["time_us"].pop("p99"), "rows[0].time_us.p99 is missing"),
        (lambda report: report.update(skipped="none"), "skipped is not a list"),
    ],
)
def test_what_is_no_report_says_where(tmp_path, change, problem):
    path = AllReduce(rows=[row(), row("nccl")]).write(tmp_path, MACHINE, "python -m perf").with_suffix(".json")
    content = copy.deepcopy(json.loads(path.read_text()))
    change(content)
    path.write_text(json.dumps(content))

    with pytest.raises(ValueError, match=r"allreduce\.json: ") as raised:
        read(tmp_path, AllReduce)
    assert problem in str(raised.value)


def test_a_report_of_an_earlier_version_is_read_without_what_either_does_not_hold(tmp_path):
    path = Training(TRAINED, skipped=["one"]).write(tmp_path, MACHINE, "python -m perf train").with_suffix(".json")
    content = json.loads(path.read_text()) | {"schema": 1}
    del content["skipped"]
    for saved in content["rows"]:
        saved["outcome"]["losses"] = [2.0, 1.0]  # which are no longer recorded
    path.write_text(json.dumps(content))

    report = read(tmp_path, Training).report

    assert (report.skipped, report.rows) == ([], TRAINED)


@pytest.mark.parametrize(("text", "said"), [("[1]", "it is not a JSON object"), ("{", "Expecting property name")])
def test_a_file_that_is_no_report_is_named(tmp_path, text, said):
    (tmp_path / "allreduce.json").write_text(text)

    with pytest.raises(ValueError, match=rf"allreduce\.json: {said}"):
        read(tmp_path, AllReduce)

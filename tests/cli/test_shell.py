"""python -m graphar: what its commands say, with and without GPUs, and how they end."""

from __future__ import annotations

import json

import pytest
import torch

import graphar
from graphar.cli.explain import explanations
from graphar.cli.main import main
from graphar.plan.select import measured_shape
from graphar.plan.sizes import KB, MB
from graphar.runtime.user_tables import find_table
from perf.topics.allreduce import AllReduce
from tests.perf.samples import MACHINE
from tests.perf.samples import row as row_of

NO_GPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs it measures those")


# ---- explain --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_explain_names_what_auto_takes_and_its_measured_time(world_size, capsys):
    table = find_table("NVIDIA H200")
    arguments = ["--device", "NVIDIA H200", "--world-size", str(world_size), "--json"]

    assert main(["explain", "2K", "1M", "1G", *arguments]) == 0

    found = json.loads(capsys.readouterr().out)
    shapes = [measured_shape(table, world_size, one["nbytes"])[0] for one in found["calls"]]
    assert [one["nbytes"] for one in found["calls"]] == [2 * KB, MB, 1024 * MB]
    assert [(one["algorithm"], one["blocks"]) for one in found["calls"]] == [
        (shape.algorithm.value, shape.blocks) for shape in shapes
    ]
    assert all(one["expected_us"] > 0 for one in found["calls"])


def test_explain_says_whether_a_codec_is_faster(capsys):
    assert main(["explain", "64K", "64M", "--device", "NVIDIA H200", "--world-size", "4", "--codec", "int4"]) == 0

    head, small, large = capsys.readouterr().out.splitlines()
    assert head == "4 ranks on NVIDIA H200, bfloat16, int4 on the wire"
    assert "; slower than exact: about" in small
    assert "; faster than exact: about" in large


def test_explain_knows_no_time_of_a_gpu_that_was_not_measured(capsys):
    assert main(["explain", "1M", "--device", "NVIDIA B999", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["calls"][0]["expected_us"]) == ("NVIDIA B999", None)


def test_explain_says_why_a_dtype_has_no_kernel(capsys):
    assert main(["explain", "1M", "--dtype", "float64"]) == 0

    assert "fallback: no kernel adds torch.float64" in capsys.readouterr().out


@pytest.mark.gpu
def test_explain_says_what_a_communicator_of_this_machine_says():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    table = find_table(torch.cuda.get_device_name(0))
    xs = [torch.ones(MB, dtype=torch.bfloat16, device=device) for device in range(2)]

    assert next(explanations(table, 2, [2 * MB], torch.bfloat16, None)) == graphar.explain(xs)


@pytest.mark.parametrize("arguments", [["explain"], ["explain", "large"], ["explain", "1M", "--codec", "int9"]])
def test_bad_arguments_end_with_status_2(arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2


def test_quietly_explain_says_nothing_but_the_answers(capsys):
    assert main(["explain", "64K", "64M", "--device", "NVIDIA H200", "--quiet"]) == 0

    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["64", "KB"], ["64", "MB"]]


# ---- all commands ---------------------------------------------------------------------------------------------------

COMMANDS = ("doctor", "bench", "explain", "tune", "report", "trace")


def test_the_help_lists_every_command_and_what_exit_statuses_mean(capsys):
    assert main([]) == 0

    said = capsys.readouterr().out
    assert [word for word in COMMANDS if f"\n    {word} " not in said] == []
    assert "Exit status: 0" in said


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_same_modes_and_tells_its_statuses(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert [option for option in ("--json", "--quiet", "Exit status") if option not in said] == []


def test_what_is_no_size_is_told_in_a_users_words(capsys):
    with pytest.raises(SystemExit):
        main(["explain", "large"])

    assert "'large' is no size; write 2K, 16M, 1G or a number of bytes" in capsys.readouterr().err


def test_an_interrupt_ends_a_command_with_a_line_and_without_a_traceback(monkeypatch, capsys):
    def interrupt(device):
        raise KeyboardInterrupt

    monkeypatch.setattr("graphar.cli.explain.find_table", interrupt)

    assert main(["explain", "1M"]) == 130
    assert capsys.readouterr().err == "graphar: interrupted\n"


# ---- report ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path):
    AllReduce(rows=[row_of()]).write(tmp_path, MACHINE, "python -m perf allreduce")
    return tmp_path


def test_report_says_what_a_folder_says_and_makes_its_page(folder, capsys):
    assert main(["report", str(folder)]) == 0

    assert "All 1 results were verified: none is wrong." in capsys.readouterr().out
    assert (folder / "index.html").exists()


def test_report_tells_by_its_status_alone_when_quiet(folder, capsys):
    AllReduce(rows=[row_of(wrong=1)]).write(folder, MACHINE, "python -m perf allreduce")

    assert main(["report", str(folder), "--quiet"]) == 1
    assert capsys.readouterr() == ("", "")


def test_report_compares_with_an_earlier_folder(folder, tmp_path_factory, capsys):
    earlier = tmp_path_factory.mktemp("earlier")
    AllReduce(rows=[row_of(time_us=5.0)]).write(earlier, MACHINE, "python -m perf allreduce")

    assert main(["report", str(folder), "--compare", str(earlier), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["comparisons"][0]["regressions"]


def test_an_installed_copy_says_where_reports_are_read(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("graphar.cli.report.ROOT", tmp_path / "elsewhere")

    assert main(["report", str(folder)]) == 1
    assert "in a checkout" in capsys.readouterr().err


# ---- bench ----------------------------------------------------------------------------------------------------------


@NO_GPUS
@pytest.mark.parametrize("codec", [None, "int4"])
def test_bench_times_the_cpu_and_checks_its_bits(codec, capsys):
    with_codec = ["--codec", codec] if codec else []

    assert main(["bench", "100", "4K", "--world-size", "3", "--json", *with_codec]) == 0

    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["world_size"], found["codec"]) == ("CPU", 3, codec)
    assert [row["nbytes"] for row in found["rows"]] == [100, 4096]
    for row in found["rows"]:
        assert row["busbw"] == pytest.approx(row["nbytes"] / row["time_us"] / 1e3 * 4 / 3)


@NO_GPUS
def test_bench_prints_a_line_a_size_and_why_it_took_the_cpu(capsys):
    assert main(["bench", "2K", "--world-size", "2", "--quiet"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "2 ranks on CPU (torch sees no CUDA device), bfloat16; every result is right, bit for bit"
    assert lines[2].split()[:2] == ["2", "KB"]


@NO_GPUS
def test_a_wrong_sum_ends_bench_with_status_1(monkeypatch, capsys):
    monkeypatch.setattr(graphar, "allreduce", lambda xs, codec: xs)

    assert main(["bench", "2K"]) == 1
    assert capsys.readouterr().err == "graphar: bench: 2 KB on the CPU: the sums are wrong\n"


def test_bench_refuses_sizes_it_has_no_memory_for(capsys):
    assert main(["bench", "5G"]) == 1
    assert "sizes must be from 1 to 4G" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("codec", [None, "int8"])
def test_bench_times_what_auto_takes(codec, capsys):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with_codec = ["--codec", codec] if codec else []

    assert main(["bench", "64K", "1M", "--world-size", "2", "--json", *with_codec]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["device"] == torch.cuda.get_device_name(0)
    assert len(found["rows"]) == 2
    assert all(1 < row["time_us"] < 1000 for row in found["rows"])
    assert all(row["algorithm"].startswith("quantized" if codec else ("one", "two")) for row in found["rows"])

"""python -m graphar: what its commands say, with and without GPUs, and how they end."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import graphar
from graphar.cli.explain import explanations
from graphar.cli.main import SHELLS, main
from graphar.plan.sizes import KB, MB
from graphar.plan.tables import measured_config
from graphar.runtime.user_tables import find_table

ROOT = Path(__file__).parents[2]
NO_GPUS = pytest.mark.skipif(torch.cuda.is_available(), reason="with GPUs it measures those")


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_explain_names_what_auto_takes_and_its_measured_time(world_size, capsys):
    table = find_table("NVIDIA H200")
    arguments = ["--device", "NVIDIA H200", "--world-size", str(world_size), "--dtype", "float16", "--json"]

    assert main(["explain", "2K", "1M", "1G", *arguments]) == 0

    found = json.loads(capsys.readouterr().out)
    configs = [measured_config(table, world_size, one["nbytes"]) for one in found["calls"]]
    expected = [(config.algorithm.value, config.blocks, True) for config in configs]
    if table.copies.least("allreduce", world_size):  # of which the table has no times
        expected[-1] = ("two_shot_copies", table.copies.sum_blocks, False)
    assert [one["nbytes"] for one in found["calls"]] == [2 * KB, MB, 1024 * MB]
    assert [(one["algorithm"], one["blocks"], one["expected_us"] is not None) for one in found["calls"]] == expected
    assert all(one["expected_us"] > 0 for one in found["calls"] if one["expected_us"] is not None)


@pytest.mark.parametrize("setting", ["", "0"])
def test_explain_knows_of_lossless_compression_and_whether_it_is_off(setting, monkeypatch, capsys):
    monkeypatch.setenv("GRAPHAR_LOSSLESS", setting)

    assert main(["explain", "1G", "--device", "NVIDIA H200", "--world-size", "4"]) == 0

    said = capsys.readouterr().out.splitlines()[1]
    if setting == "0":
        assert "two_shot_pipelined (131 blocks of 512, about 4637 us): the fastest" in said
        assert "; lossless compression is off; " in said
    else:
        assert "two_shot_lossless (131 blocks of 512): lossless compression, chosen by table 'nvidia_h200'" in said


def test_explain_knows_no_time_of_a_gpu_that_was_not_measured(capsys):
    assert main(["explain", "1M", "--device", "NVIDIA B999", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    (call,) = found["calls"]
    assert (found["device"], call["expected_us"]) == ("NVIDIA B999", None)
    assert call["reason"].startswith("without a table of NVIDIA B999, a guess by table 'default'")


def test_a_size_that_explain_prints_and_a_short_dtype_are_understood(capsys):
    assert main(["explain", "2 KB", "3MiB", "--dtype", "bf16", "--device", "NVIDIA H200", "--world-size", "4"]) == 0

    head, small, large = capsys.readouterr().out.splitlines()
    assert head == "4 ranks on NVIDIA H200, bfloat16"
    assert (small.split()[:2], large.split()[:2]) == (["2", "KB"], ["3", "MB"])


@pytest.mark.parametrize(
    ("device", "head"),
    [
        ("H200", "4 ranks on NVIDIA H200, bfloat16 (assumed NVIDIA H200 for H200)"),
        ("H100", "4 ranks on H100, bfloat16 (assumed the default table: there is none of H100, and `python -m graphar"),
    ],
)
def test_explain_says_what_it_assumed_of_a_device(device, head, capsys):
    assert main(["explain", "2K", "--device", device, "--world-size", "4"]) == 0

    assert capsys.readouterr().out.startswith(head)


@NO_GPUS
def test_explain_says_whose_table_answers_where_there_is_no_gpu(capsys):
    assert main(["explain", "2K", "--json"]) == 0

    assert json.loads(capsys.readouterr().out)["assumed"] == "assumed NVIDIA H200: there is no GPU here"


def test_explain_says_why_a_dtype_has_no_kernel(capsys):
    assert main(["explain", "1M", "--dtype", "float64"]) == 0

    assert "fallback: no kernel adds torch.float64" in capsys.readouterr().out


def test_explain_refuses_what_a_call_refuses(capsys):
    assert main(["explain", "1M", "--dtype", "float64", "--codec", "int8"]) == 2

    with pytest.raises(ValueError, match="a codec rounds") as refusal:
        graphar.explain([torch.zeros(1, dtype=torch.float64)] * 2, codec="int8")
    assert capsys.readouterr().err == f"graphar: {refusal.value}\n"


@pytest.mark.gpu
def test_explain_says_what_a_communicator_of_this_machine_says():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    table = find_table(torch.cuda.get_device_name(0))
    xs = [torch.ones(MB, dtype=torch.bfloat16, device=device) for device in range(2)]

    assert next(explanations(table, 2, [2 * MB], torch.bfloat16, None)) == graphar.explain(xs)


BAD_ARGUMENTS = {
    "explain": "required: SIZE",
    "explain large": "'large' is no size; write 2K, 1.5MB, 1GiB or a number of bytes",
    "explain -- -5": "'-5' is no size",
    "explain 1M --codec int9": "invalid choice: 'int9'",
    "explain 2K --world-size 1": "'1' is no number of ranks: the kernels run on 2 to 8 GPUs",
    "explain 2K --world-size 16": "'16' is no number of ranks: the kernels run on 2 to 8 GPUs",
    "explain 2K --world-size two": "'two' is no number of ranks: the kernels run on 2 to 8 GPUs",
    "explain 1M --load absent.py": "there is no Python file 'absent.py'",
    "bench 5G": "sizes of allreduce must be from 1 byte to 4 GB",
    "bench 1G --op allgather": "sizes of allgather must be from 1 byte to 256 MB",
    "bench 1M --op allgather --codec int8": "--codec needs --op allreduce, got allgather",
    "bench -b 1G -e 8G": "sizes of allreduce must be from 1 byte to 4 GB",
    "bench --backend gloo": "bench: --backend needs processes: torchrun --nproc-per-node=2 -m graphar bench ...",
    "torchrun bench 2K --backend nccl": "bench: --backend nccl needs GPUs",
    "torchrun bench 2K --world-size 4": "leave out --world-size",
    "torchrun bench 2K --backend gloo --codec int8": "bench: --codec is graphar's; add it to --backend",
    "torchrun bench 2K --backend gloo --algorithm one_shot": "bench: --algorithm is graphar's; add it to --backend",
    "bench 2K -b 4K": "bench: give sizes or --minbytes",
    "bench -b 4K -e 1M -f 1": "and a --stepfactor of 2 or more",
    "bench -f 1": "and a --stepfactor of 2 or more",
    "bench -b 0 -e 1M": "sizes of allreduce must be from 1 byte to 4 GB",
    "bench -e 4K": "bench: --maxbytes needs --minbytes",
    "bench -b 4K -e 1K": "bench: --maxbytes must be at least --minbytes",
    "bench -e 0": "bench: --maxbytes needs --minbytes",
    "bench 2K --algorithm ring": "--algorithm of allreduce must be one of auto, one_shot_push, ",
    "bench 2K --algorithm one_shot --op allgather": "--algorithm of allgather must be one of auto, allgather_",
    "bench 2K --algorithm one_shot --codec int8": "bench: give --codec or --algorithm",
    "bench 2K -g 2": "-g/--ngpus: invalid choice: '2'",
    "bench 2K -o max": "-o: invalid choice: 'max'",
    "bench 2K -d int8": "-d/--dtype/--datatype: invalid choice: 'int8'",
    "bench 2K -t 1": "unrecognized arguments: -t",
    "simulate ring": "'ring' is no Python file, and none of one_shot_push, ",
    "simulate absent.py": "there is no Python file 'absent.py'",
    "simulate one_shot --ranks 2-9": "'9' is no number of ranks: the kernels run on 2 to 8 GPUs",
    "simulate one_shot --sanitizers memory": "'memory' is none of plain, thread, address",
    "simulate one_shot --numel 0": "'0' must be a positive number",
    "simulate one_shot --dtypes int8": "'int8' is none of bfloat16, ",
    "simulate one_shot --seeds none": "'none' must be a positive number",
    "trace absent.json": "cannot open absent.json: no such file or directory",
    "trace /": "cannot open /: is a directory",
    "report reports/h200x4": "in a checkout: python -m perf report FOLDER\n",
    "docter": "there is no command 'docter': did you mean doctor?",
    "ring": "there is no command 'ring': there are doctor, bench, explain, tune, simulate, trace",
    "--completion fish": "invalid choice: 'fish'",
}


@pytest.mark.parametrize("arguments", BAD_ARGUMENTS)
def test_bad_arguments_end_with_status_2_and_a_line_in_a_users_words(arguments, monkeypatch, capsys):
    words = arguments.split()
    if words[:1] == ["torchrun"]:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", words.pop(0))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = main(words)
    except SystemExit as ended:
        status = ended.code

    assert status == 2
    assert BAD_ARGUMENTS[arguments] in capsys.readouterr().err


def test_quietly_explain_says_nothing_but_the_answers(capsys):
    assert main(["explain", "64K", "64M", "--device", "NVIDIA H200", "--quiet"]) == 0

    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [["64", "KB"], ["64", "MB"]]


COMMANDS = ("doctor", "bench", "explain", "tune", "simulate", "trace")


def test_the_console_script_and_python_m_say_their_own_names_in_usage(new_interpreter):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts["graphar"].split(":")
    of_script = f"sys.argv[0] = 'bin/graphar'; from {module} import {function}; sys.exit({function}())"
    of_module = "runpy.run_module('graphar', run_name='__main__', alter_sys=True)"  # as python -m does

    programs = (f"import runpy, sys; sys.argv = ['', 'doctor', '--help']; {one}" for one in (of_script, of_module))
    usages = [new_interpreter(program).stdout.split(" [")[0] for program in programs]

    assert usages == ["usage: graphar doctor", "usage: python -m graphar doctor"]


def test_the_help_lists_every_command_and_what_exit_statuses_mean(capsys):
    assert main([]) == 0

    said = capsys.readouterr().out
    assert [word for word in COMMANDS if f"\n    {word} " not in said] == []
    assert "Exit status: 0" in said
    assert "report" not in said  # only a checkout has it


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_the_same_modes_and_tells_its_statuses(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])

    said = capsys.readouterr().out
    assert ended.value.code == 0
    assert [option for option in ("--json", "--quiet", "Exit status") if option not in said] == []


def test_the_version_has_the_commit_of_a_checkout(monkeypatch, tmp_path, capsys):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "graphar").mkdir()
    monkeypatch.setattr(graphar, "__file__", str(tmp_path / "graphar" / "__init__.py"))

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"graphar {graphar.__version__}\n"

    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "--short", "HEAD"], text=True).strip()
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"graphar {graphar.__version__} ({commit})\n"


COMMIT = "0123456789abcdef0123456789abcdef01234567"
BY_GIT, BY_FOLDER = {"vcs_info": {"vcs": "git", "commit_id": COMMIT}}, {"dir_info": {"editable": True}}


@pytest.mark.parametrize(("recorded", "commit"), [(BY_GIT, " (01234567)"), (BY_FOLDER, ""), (None, "")])
def test_the_version_has_the_commit_that_pip_recorded(recorded, commit, monkeypatch, tmp_path, capsys):
    info = tmp_path / "graphar_nvlink-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: graphar-nvlink\nVersion: 0.1.0\n")
    if recorded:
        (info / "direct_url.json").write_text(json.dumps({"url": "https://host/graphar"} | recorded))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(graphar, "__file__", str(tmp_path / "graphar" / "__init__.py"))

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"graphar {graphar.__version__}{commit}\n"


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_complete_commands_and_options(shell, capsys):
    pytest.importorskip("shtab")

    assert main(["--completion", shell], prog="python -m graphar") == 0

    script = capsys.readouterr().out
    assert not re.search(r"^(complete|#compdef) .*python", script, re.MULTILINE)
    assert [word for word in (*COMMANDS, "--world-size", "fp8_e4m3") if word not in script] == []


def test_completion_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)

    assert main(["--completion", "bash"]) == 1
    assert capsys.readouterr().err == "graphar: --completion needs shtab: python -m pip install shtab\n"


def test_an_interrupt_ends_a_command_with_a_line_and_without_a_traceback(monkeypatch, capsys):
    def interrupt(device):
        raise KeyboardInterrupt

    monkeypatch.setattr("graphar.cli.explain.find_table", interrupt)

    assert main(["explain", "1M"]) == 130
    assert capsys.readouterr().err == "graphar: interrupted\n"

"""perf's command line: options that are refused, and without a command which parts run, and what a failing one does."""

from __future__ import annotations

import re

import pytest

from perf import __main__ as program
from perf import machine, passes
from perf.models import sequence
from perf.models.workloads import WORKLOADS
from perf.peers import gathered, matmuls
from perf.peers.matmuls import MIN_ROWS
from perf.report import Report, read, topics
from perf.topics import latency, model
from perf.topics.allreduce import AllReduce
from tests.perf.samples import CPU, row

ALONE = {"latency", "slow_links", "beside", "convergence"}


def write(folder, block):
    AllReduce(rows=[row(mode="cpu")]).write(folder, block, "python -m perf")


def test_every_command_is_described_and_every_option_has_help(monkeypatch):
    monkeypatch.setattr(program.argparse.ArgumentParser, "parse_args", lambda parser, argv: parser)
    commands = program.parse([])._subparsers._group_actions[0].choices

    assert [name for name, command in commands.items() if not command.description] == []
    assert [(name, one.dest) for name, command in commands.items() for one in command._actions if not one.help] == []


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command with stand-ins for its parts, which do what ``acts`` says. Returns the parts that ran."""
    monkeypatch.setattr(machine, "describe", lambda: CPU)

    def run(*argv, acts=None):
        ran = {}

        def act(self, options, folder, block, command):
            ran[options.command] = command
            write(folder, block) if options.command == "allreduce" else None
            return (acts or {}).get(options.command, lambda: 0)()

        monkeypatch.setattr(Report, "run", act)
        return program.main(["--out", str(tmp_path), *argv]), ran

    return run


@pytest.mark.parametrize("gpu_count", [0, 4])
@pytest.mark.parametrize("quick", [False, True])
def test_every_part_has_arguments_it_understands(gpu_count, quick):
    parts = program.parts(gpu_count, quick)

    assert set(parts) | ALONE == {topic.command for topic in topics()}
    for name, arguments in parts.items():
        assert program.parse([name, *arguments]).command == name


def test_without_a_command_every_part_runs_and_the_reports_are_told(run, capsys):
    status, ran = run()

    assert status == 0
    assert set(ran) == {topic.command for topic in topics()} - ALONE
    assert ran["train"] == "python -m perf train --tasks digits"
    assert "All 1 results were verified: none is wrong." in capsys.readouterr().out


REFUSED = {
    "allreduce --methods vllm": "vllm: not on this machine, which has graphar, gloo",
    "fused --methods symm_fused": "symm_fused: not on this machine",
    "gathered --methods symm_fused": "symm_fused: not on this machine",
    "gathered --rows 1": "at least the number of",
    "model --world-size 3": "3 ranks cannot divide the 4 heads of tiny's keys",
    "model --layers 3": "must be from 1 to the 2 of tiny",
    "model --layers -1": "must be from 1",
    "model --decode --prefill --generate 0": "leave nothing to measure",
    "model --generate -1": "at least 0",
    "model --decode 0": "at least 1 token",
    "model --prefill 1": "at least 2",
    "model --sequence-parallel 9": "2 ranks cannot divide 9 tokens evenly",
    "train --steps 5": "--steps must be more than the 5",
    "throughput --steps 9": "--steps must be at least 10",
    "throughput --batch-size -1": "--batch-size and --seconds must be positive",
    "throughput --seconds -2": "--batch-size and --seconds must be positive",
    "throughput --world-size 1": "must be",
    "fsdp --steps 9": "--steps must be at least 10",
    "fsdp --layers -1": "must be positive",
    "fsdp --tokens 0": "must be positive",
    "fsdp --seconds -2": "must be positive",
    "fsdp --world-size 1": "--world-size must be 2 or more",
    "slow_links --rates fast": "--rates: not a rate: fast",
    "slow_links --rates 1": "--rates: not a rate: 1",
    "slow_links --rates gbit": "--rates: not a rate: gbit",
    "slow_links --rates 1.5gbit": "--rates: not a rate: 1.5gbit",
    "matmul": "matmul kernel needs a GPU of sm_90a",
    "leaves": "matmul kernel needs a GPU of sm_90a",
    "fp8": "matmul kernel needs a GPU of sm_90a",
    "latency": latency.NEEDED,
    "suspend": "needs at least 2 GPUs",
}
REFUSED_WITH_4_GPUS = {
    "suspend --world-size 3": "3 ranks cannot divide the 8 heads of llama-3-70b's keys",
    "suspend --world-size 8": "--world-size must be from 2 to the number of GPUs, 4",
    "suspend --cycles 0": "--cycles must be at least 1",
}


@pytest.mark.parametrize(
    ("gpu_count", "command", "reason"),
    [(count, *case) for count, cases in ((0, REFUSED), (4, REFUSED_WITH_4_GPUS)) for case in cases.items()],
)
def test_what_cannot_be_measured_is_refused_with_the_reason(gpu_count, command, reason):
    options = program.parse(command.split())

    with pytest.raises(SystemExit, match=re.escape(reason)):
        program.topic_of(options.command).plan(options, gpu_count)


# By command and number of GPUs, fields of the first plan.
PLANNED = {
    ("fsdp", 4): {"device": "cuda", "world_size": 4, "model": "llama-3-8b", "layers": None, "tokens": (2048, 8192)},
    ("fsdp", 0): {"device": "cpu", "world_size": 2, "model": "tiny"},
    ("throughput", 4): {
        "device": "cuda",
        "world_size": 4,
        "steps": 200,
        "models": tuple(name for name in WORKLOADS if name != "tiny"),
    },
    ("throughput", 0): {"device": "cpu", "world_size": 2, "models": ("tiny",)},
    ("model", 4): {"device": "cuda", "world_size": 4, "size": "llama-3-70b", "layers": 4, "prefill": (2048, 8192)},
    ("model", 0): {"device": "cpu", "world_size": 2, "size": "tiny", "layers": 2},
}


@pytest.mark.parametrize(("command", "gpu_count"), PLANNED)
def test_gpus_take_large_models_and_the_cpu_a_tiny_one(command, gpu_count):
    plan = program.topic_of(command).plan(program.parse([command]), gpu_count)

    first = vars(plan[0] if isinstance(plan, list) else plan)
    assert {name: first[name] for name in PLANNED[command, gpu_count]} == PLANNED[command, gpu_count]


# By command: the report's rows of a run on the CPU, their methods, how many are verified (None: all), and a title.
ON_THE_CPU = {
    f"fused --rows 4 {MIN_ROWS} --columns 64": ("rows", matmuls.CPU_METHODS, None, "2 ranks, N = 64, K = 128"),
    "gathered --rows 5 32 --columns 64": ("rows", gathered.CPU_METHODS, None, "2 ranks, N = 64, K = 256"),
    "model --layers 1 --decode 3 --prefill 5 --generate 0": (
        "rows",
        model.CPU_METHODS,
        12,
        "2 ranks, 1 layer of tiny: decode of 3 tokens",
    ),
    "model --layers 1 --decode --prefill --generate 0 --sequence-parallel 8": (
        "sequences",
        sequence.CPU_METHODS,
        8,
        "2 ranks, 1 layer of tiny, sequence parallelism: training on 8 tokens",
    ),
    "losses --shapes 3x64x1 6x512x2": ("rows", passes.CPU_METHODS, 8, "Forward and backward"),
    "norm_gradients --shapes 3x16": ("rows", passes.CPU_METHODS, 8, "Backward"),
}


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("command", ON_THE_CPU)
def test_on_the_cpu_each_method_of_a_topic_is_measured_and_verified(command, tmp_path):
    name, methods, count, title = ON_THE_CPU[command]

    assert program.main([*command.split(), "--out", str(tmp_path)]) == 0

    topic = program.topic_of(command.partition(" ")[0])
    report, text = read(tmp_path / "cpu", topic).report, (tmp_path / "cpu" / f"{topic.name}.md").read_text()
    rows = getattr(report, name)
    assert report._rows() == [rows]
    assert report.skipped == []
    assert {row.method for row in rows} == {*methods}
    assert all(0 < row.error < 0.03 for row in rows if getattr(row, "error", None) is not None)
    assert f"All {count or len(rows)} results were verified: none is wrong." in text
    assert f"## {title}\n" in text


def raiser(error):
    def act():
        raise error

    return act


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (SystemExit("digits needs scikit-learn"), 0, "# not measured: train: digits needs scikit-learn"),
        (RuntimeError("the kernels broke"), 1, "the kernels broke"),
    ],
)
def test_a_part_that_cannot_run_keeps_no_other_from_running_but_an_error_is_told(run, capsys, error, status, said):
    exit_status, ran = run(acts={"train": raiser(error)})

    assert exit_status == status
    assert list(ran)[-6:] == ["fsdp", "host", "suspend", "alltoall", "compile", "losses"]
    assert said in capsys.readouterr().err


def test_an_interrupt_ends_all_parts_with_status_130_and_a_page_of_those_that_are_done(run, tmp_path, capsys):
    exit_status, ran = run(acts={"train": raiser(KeyboardInterrupt())})

    assert (exit_status, list(ran)[-1]) == (130, "train")
    assert capsys.readouterr().err.startswith("perf: interrupted. ")
    assert list(tmp_path.glob("*/index.html"))


def test_a_part_with_wrong_results_makes_all_of_it_fail(run):
    assert run(acts={"fused": lambda: 1})[0] == 1


def test_quick_arguments_of_a_part_yield_to_those_that_are_given(run):
    assert run("train", "--quick")[1] == {"train": "python -m perf train --tasks digits --steps 10"}
    assert run("norm_gradients", "--quick")[1] == {"norm_gradients": "python -m perf norm_gradients --shapes 64x1024"}
    _, ran = run("--quick", "allreduce", "--max-nbytes", "2K")
    assert ran == {"allreduce": "python -m perf allreduce --world-size 2 --max-nbytes 1M --max-nbytes 2K"}


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["allreduce", "--out", "somewhere", "--world-size", "2"], "python -m perf allreduce --world-size 2"),
        (["fused", "--compare", "reports/a", "--rows", "1"], "python -m perf fused --rows 1"),
    ],
)
def test_the_command_to_reproduce_says_nothing_of_where_the_report_went_or_what_it_was_compared_with(argv, command):
    assert program.reproduce(argv) == command

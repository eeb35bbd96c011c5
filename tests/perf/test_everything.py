"""perf without a command: which parts it runs, what a failing part does, and what --quick changes."""

from __future__ import annotations

import pytest

from perf import __main__ as program
from perf import machine
from perf.report import Report, topics
from perf.topics.allreduce import AllReduce
from tests.perf.samples import CPU, row

ALONE = {"latency", "slow_links", "beside", "convergence"}


def write(folder, block):
    AllReduce(rows=[row(mode="cpu")]).write(folder, block, "python -m perf")


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
    found, ran = run(acts={"train": raiser(error)})

    assert found == status
    assert list(ran)[-6:] == ["fsdp", "host", "suspend", "alltoall", "compile", "losses"]
    assert said in capsys.readouterr().err


def test_an_interrupt_ends_all_parts_with_status_130_and_a_page_of_those_that_are_done(run, tmp_path, capsys):
    found, ran = run(acts={"train": raiser(KeyboardInterrupt())})

    assert (found, list(ran)[-1]) == (130, "train")
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

"""python -m graphar simulate: what it prints, and how it ends."""

import json
import re

import pytest
import torch

from graphar.cli import simulate
from graphar.cli.main import main
from graphar.plan.algorithms import Algorithm
from graphar.simulator import Case, Failure, Report
from tests.outside import forget_loaded

CASE = Case(Algorithm.ONE_SHOT, 3, torch.bfloat16, "thread")
FAILURE = Failure(CASE, 2, (9, 7), 1, "rank 0, call 1: element 3 is 1, expected 2", "rank 0: no steps\n")


@pytest.fixture
def asked(monkeypatch):
    """What the command asks the simulator for, which finds nothing wrong, or what ``failures`` has."""
    asked = {"failures": ()}

    def run(algorithm, *, progress, **options):
        asked.update(options, algorithm=algorithm)
        progress(str(CASE))
        return Report(Algorithm(algorithm), (CASE,), asked["failures"], ("one case: no reason",), 1.25)

    monkeypatch.setattr(simulate, "simulate", run)
    return asked


def test_it_asks_for_all_ranks_and_sanitizers_and_ends_with_a_line_of_what_passed(asked, capsys):
    assert main(["simulate", "one_shot"]) == 0

    assert asked["ranks"] == [2, 3, 4, 5, 6, 7, 8]
    assert asked["sanitizers"] == ["plain", "thread", "address"]
    assert (asked["seeds"], asked["dtypes"]) == (3, [torch.bfloat16, torch.float32])
    assert capsys.readouterr().out == "one_shot: 1 of 1 cases passed in 1.2 s, 1 were skipped\n"


def test_lists_and_ranges_are_understood(asked):
    arguments = ["--ranks", "2,4", "--sanitizers", "plain,thread", "--numel", "1,7,8192", "--dtypes", "bf16,fp32"]

    assert main(["simulate", "two_shot_push", *arguments, "--seeds", "5"]) == 0
    assert (asked["ranks"], asked["sanitizers"], asked["seeds"]) == ([2, 4], ["plain", "thread"], 5)
    assert (asked["numel"], asked["dtypes"]) == ([1, 7, 8192], [torch.bfloat16, torch.float32])

    assert main(["simulate", "two_shot_push", "--ranks", "3-5", "--seed", "7"]) == 0
    assert (asked["ranks"], asked["seeds"]) == ([3, 4, 5], [7])


def test_a_failure_is_printed_with_the_command_that_repeats_it(asked, capsys):
    asked["failures"] = (FAILURE,)

    assert main(["simulate", "one_shot", "--numel", "7,9"]) == 1

    assert capsys.readouterr().out == (
        f"{FAILURE}\n\n"
        "to repeat it: python -m graphar simulate one_shot --ranks 3 --dtypes bfloat16 --sanitizers thread --seed 2"
        " --numel 7,9\n\n"
        "one_shot: 1 of 2 cases passed in 1.2 s, 1 were skipped\n"
    )


def test_as_json_it_has_the_failures(asked, capsys):
    asked["failures"] = (FAILURE,)

    assert main(["simulate", "one_shot", "--json"]) == 1

    found = json.loads(capsys.readouterr().out)
    assert (found["algorithm"], found["passed"], found["skipped"]) == ("one_shot", 1, ["one case: no reason"])
    (failure,) = found["failures"]
    assert (failure["world_size"], failure["dtype"], failure["sanitizer"]) == (3, "bfloat16", "thread")
    assert (failure["seed"], failure["numels"], failure["call"]) == (2, [9, 7], 1)
    assert failure["what"] == FAILURE.what


def test_without_a_compiler_it_says_what_to_install(monkeypatch, capsys):
    from graphar.simulator import build

    monkeypatch.setenv("CXX", "/nowhere/g++")
    build.compiler.cache_clear()

    assert main(["simulate", "one_shot", "--ranks", "2"]) == 1

    build.compiler.cache_clear()
    assert re.match(r"graphar: the simulator needs g\+\+ 12 or newer.*apt install g\+\+", capsys.readouterr().err)


def test_all_algorithms_that_a_file_loads_are_simulated_and_failures_repeated_by_its_path(
    asked, monkeypatch, tmp_path, capsys
):
    forget_loaded(monkeypatch)
    mine = tmp_path / "mine.py"
    mine.write_text("from tests.outside import load\nload()\nload(max_nbytes=4096)\n")
    asked["failures"] = (FAILURE,)

    assert main(["simulate", str(mine)]) == 1

    said = capsys.readouterr().out
    assert len(set(re.findall(r"^(pushed_sum@\w{12}): 1 of 2 cases passed", said, re.MULTILINE))) == 2
    assert said.count(f"to repeat it: python -m graphar simulate {mine} --ranks 3") == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import graphar\n", " was run, and loads no algorithm: it has no call of graphar.load_algorithm"),
        ("\n{}['RANK']\n", ", line 2: the file is run, and raises KeyError: 'RANK'"),
        ("sum = (\n", ": the file is run, and raises SyntaxError: '(' was never closed"),
    ],
)
def test_an_error_of_a_file_names_the_file_and_says_that_it_is_run(text, said, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(text)

    assert main(["simulate", str(tmp_path / "mine.py")]) == 2
    assert f"{tmp_path}/mine.py{said}" in capsys.readouterr().err

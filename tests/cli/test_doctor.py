"""python -m graphar doctor: what it prints, and when it finds a problem."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import graphar
from graphar.cli.doctor import examination, self_test
from graphar.cli.doctor.findings import NOTE, OK, PROBLEM, Finding, Section, examine, problem, text_of
from graphar.cli.main import main
from tests.processes import interruptible, run_code

ROOT = Path(__file__).parents[2]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without GPUs")


DOCTOR = """
import contextlib, io, json, sys
from graphar.cli.main import main
out, err = io.StringIO(), io.StringIO()
with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    status = main(["doctor", *sys.argv[1:]])
print(json.dumps([status, out.getvalue(), err.getvalue()]))
"""


def run_doctor(*arguments):
    """The command, in a fork of a process that has imported it."""
    printed, _ = run_code(DOCTOR, *arguments, environment=dict(os.environ), timeout_s=120)
    return subprocess.CompletedProcess(["doctor", *arguments], *json.loads(printed))


def doctor(*arguments, before):
    """The text of a program."""
    return f"import sys; {before}; from graphar.cli.main import main; sys.exit(main(['doctor', *{arguments}]))"


@pytest.fixture(scope="module")
def text():
    """The command as it ended."""
    return run_doctor()


@no_gpu
def test_a_machine_without_gpus_is_examined_and_healthy_in_few_lines(text):
    assert text.returncode == 0, text.stdout
    assert text.stdout.splitlines()[-1] == "no problem found"
    assert [title for title in (*examination.SECTIONS, "Self-test") if f"\n{title}\n" not in f"\n{text.stdout}"] == []
    assert max(len(line) for line in text.stdout.splitlines()) <= 100
    assert len(text.stdout.splitlines()) < 60
    assert text.stderr == ""


def test_json_is_one_document_with_what_the_text_says(text):
    document = run_doctor("--json")

    content = json.loads(document.stdout)
    assert content["complete"]
    assert content["healthy"] == (document.returncode == 0) == (text.returncode == 0)
    names = [
        line[2:].split("  ")[0].rstrip() for line in text.stdout.splitlines() if line[:1] in "-! " and line[2:3] > " "
    ]
    assert [one["name"] for findings in content["sections"].values() for one in findings] == names


def test_it_needs_nothing_that_only_developers_install(new_interpreter):
    blocked = "('rich', 'matplotlib', 'pytest', 'hypothesis', 'pynvml')"

    done = new_interpreter(doctor("--json", before=f"sys.modules.update(dict.fromkeys({blocked}))"))

    nvml = json.loads(done.stdout)["sections"]["NVLinks"]
    assert [(one["status"], "pynvml (nvidia-ml-py) cannot be imported" in one["found"]) for one in nvml] == [
        (NOTE, True)
    ]
    assert done.stderr == ""


def test_an_interrupt_of_the_self_test_keeps_what_was_found_and_ends_with_status_130():
    """Runs a process of its own: at an ordinary exit, threads that still compute abort it."""
    before = (
        "from graphar.cli.doctor import examination, self_test; calls = self_test.calls_on_cpu();"
        " self_test.is_available = lambda: False; self_test.calls_on_cpu = lambda: calls * 1000;"
        " examination.SECTIONS = {'Kernel cache': examination.SECTIONS['Kernel cache']}"
    )
    command = [sys.executable, "-c", doctor(before=before)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with interruptible(), subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        first = process.stdout.readline()  # the next section is the self-test, which takes minutes
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)

    assert (process.returncode, first, err) == (130, "Kernel cache\n", "")
    assert "- fallback             not done: interrupted\n" in out
    assert out.endswith("interrupted: no problem found until then\n")


def test_json_of_an_interrupted_examination_says_that_it_is_not_complete(monkeypatch, capsys):
    def interrupt(self, timeout=None):
        raise KeyboardInterrupt

    ended = []
    monkeypatch.setattr(threading.Thread, "join", interrupt)
    monkeypatch.setattr(examination.os, "_exit", ended.append)
    monkeypatch.setattr(examination, "SECTIONS", {"GPUs": lambda: [Finding("cuda:0", "is fine")]})

    main(["doctor", "--json"])

    content = json.loads(capsys.readouterr().out)
    assert (ended, content["complete"], list(content["sections"])) == ([130], False, ["GPUs"])


@pytest.mark.promise("`doctor` finds what is wrong and says what to do.")
def test_a_problem_makes_the_exit_status_one_and_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(examination, "SECTIONS", {"GPUs": lambda: [problem("cuda:0", "is on fire", "use water")]})
    monkeypatch.setattr(self_test, "algorithms", list)

    assert main(["doctor"]) == 1

    printed = capsys.readouterr().out
    assert "! cuda:0               is on fire\n                       -> use water\n" in printed
    assert printed.endswith('1 problem found, marked with "!"\n')


def test_quietly_problems_alone_are_told(monkeypatch, capsys):
    sections = {"GPUs": lambda: [problem("cuda:0", "is on fire", "use water"), Finding("cuda:1", "is well")]}
    monkeypatch.setattr(examination, "SECTIONS", sections | {"Software": lambda: [Finding("torch", "is new")]})
    monkeypatch.setattr(self_test, "algorithms", list)

    assert main(["doctor", "--quiet"]) == 1

    printed = capsys.readouterr().out
    assert "is on fire" in printed
    assert [well for well in ("cuda:1", "Software", "torch", "Self-test", "problem found") if well in printed] == []


def test_a_section_that_raises_is_a_problem_of_its_own():
    def find():
        yield Finding("first", "fine")
        raise OSError("gone")

    first, second = examine("Disks", find, 5).findings

    assert first.status == OK
    assert (second.status, second.found) == (PROBLEM, "not examined: OSError: gone")


def test_what_hangs_is_left_at_its_deadline_and_no_other_algorithm_is_tried(monkeypatch):
    end, tried = threading.Event(), []

    def hang(algorithm):
        tried.append(algorithm)
        end.wait()
        return []

    monkeypatch.setattr(examination, "_ALGORITHM_DEADLINE_S", 0.1)
    monkeypatch.setattr(self_test, "algorithms", lambda: list(graphar.Algorithm))
    monkeypatch.setattr(self_test, "self_test", hang)

    section = examination.examine_algorithms()
    end.set()

    assert section.hung
    assert [(one.status, one.found) for one in section.findings] == [(PROBLEM, "not done after 0.1 s")]
    assert len(tried) == 1


def test_what_is_warned_of_is_told_once():
    def find():
        for _ in range(2):
            warnings.warn("the driver is too old", RuntimeWarning, stacklevel=1)
        return []

    assert [one.found for one in examine("GPUs", find, 5).findings] == ["the driver is too old"]


def test_what_is_found_stands_in_one_column_beside_names_of_any_length():
    findings = [Finding("short", "found"), Finding("as_long_as_an_algorithms_name", "found")]

    _, *lines = text_of(Section("T", tuple(findings))).splitlines()

    assert {line.index("  found") for line in lines if line} == {31}


def test_long_lines_are_wrapped_under_their_text(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = text_of(Section("T", (problem("name", "word " * 40, "do " * 60),))).splitlines()

    assert max(map(len, lines)) <= 80
    assert all(line.startswith(" " * 23) for line in lines[2:] if line)

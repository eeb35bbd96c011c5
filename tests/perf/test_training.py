"""perf train: its data, its plans, a short run and the report."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
from types import SimpleNamespace

import pytest

from graphar.numerics.codecs import Codec
from perf import __main__ as program
from perf.models import tasks
from perf.topics import training
from perf.topics.convergence import Convergence
from perf.topics.training import Outcome, Run, Training, TrainingPlan, TrainingRow, conclusion, run_table
from tests.perf.samples import MACHINE

pytest.importorskip("sklearn", reason="needs scikit-learn, whose digits are trained on")


def loaded(name):
    if name == "animals":
        pytest.importorskip("animal_mnist", reason="needs animal-mnist, whose silhouettes are trained on")
    return tasks.TASKS[name].load()


@pytest.mark.parametrize("name", tasks.TASKS)
def test_data_is_the_same_each_time_and_the_test_is_not_trained_on(name):
    data = loaded(name)

    assert data.digest() == tasks.TASKS[name].load().digest()
    for xs, ys in (data.train, data.test):
        assert len(xs) == len(ys) > 300
    trained = {x.numpy().tobytes() for x in data.train[0]}
    repeated = sum(x.numpy().tobytes() in trained for x in data.test[0])
    assert repeated < 0.01 * len(data.test[0])


@pytest.mark.parametrize("name", tasks.TASKS)
def test_a_model_gives_logits_for_each_class_to_predict(name):
    xs, ys = loaded(name).train

    logits = tasks.TASKS[name].model()(xs[:2])

    assert logits.shape[:-1] == ys[:2].shape
    assert logits.shape[-1] > ys.max()


def test_gpus_try_every_codec_and_the_cpu_a_few():
    every = TrainingPlan("cuda", 4, ("digits",), (0, 1, 2), 100, every_codec=True)
    few = TrainingPlan("cpu", 2, ("digits",), (0,), 100, every_codec=False)

    codecs = {(run.codec.bits, run.codec.bucket_size, run.codec.rounding) for run in every.runs() if run.codec}
    assert codecs == set(itertools.product((8, 6, 5, 4, 2), (128, 1024), ("nearest", "stochastic")))
    assert Training.count(every) == 3 * (2 + len(codecs) + 2)
    assert Training.count(few) == 7
    assert all(run.codec is None for run in few.runs()[:2])


@pytest.mark.usefixtures("forked_ranks")
def test_a_short_run_is_reported(tmp_path):
    argv = ["train", "--tasks", "digits", "--steps", "6", "--out", str(tmp_path)]

    assert program.main(argv) == 0

    folder = tmp_path / "cpu"
    rows = json.loads((folder / "training.json").read_text())["rows"]
    assert len(rows) == 7
    losses = {(row["backend"], row["mode"], row["bits"]): row["outcome"]["test_loss"] for row in rows}
    assert losses["torch", "exact", 32] == losses["graphar", "exact", 32]  # of two ranks there is one order
    assert len(set(losses.values())) == 6
    text = (folder / "training.md").read_text()
    assert "All 7 results were verified: none is wrong." in text
    assert "| graphar | absmax nearest EF | 2 | 2.125 | 128 |" in text


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SystemExit, match=r"digits needs scikit-learn: pip install 'graphar-nvlink\[train\]'"):
        Training.plan(program.parse(["train"]), gpu_count=0)

    assert Training.plan(program.parse(["train", "--tasks", "bytes"]), gpu_count=0).tasks == ("bytes",)
    monkeypatch.setitem(sys.modules, "animal_mnist", None)
    with pytest.raises(SystemExit, match="animals needs animal-mnist: pip install --no-deps animal-mnist"):
        Convergence.plan(program.parse(["convergence"]), gpu_count=0)


OUTCOME = Outcome(0.1, 0.99, 0.2, 0.95, 10.0, 5.0, parameters=1_000_000, same_bits=True)


def row(codec=None, seed=0, error_feedback=False, **changes):
    run = Run("graphar" if codec else "torch", codec, error_feedback, seed, 100)
    return TrainingRow("digits", "abc", run.backend, 4, 64, 2.0, run, dataclasses.replace(OUTCOME, **changes))


def test_rows_that_differ_in_their_seed_become_one_line():
    rows = [row(test_loss=0.2), row(seed=1, test_loss=0.4), row(Codec(4, 128), step_ms=2.0)]

    lines = run_table(rows).splitlines()[2:]

    assert len(lines) == 2
    assert "| 0.300 ± 0.141 |" in lines[0]
    assert lines[1].startswith("| graphar | absmax nearest | 4 | 4.125 | 128 | 2.0 | 64 |")
    assert lines[1].endswith("| 0.40 | 0.77 |")  # of_torch; and MB that a rank sends: 1.5 x 4.125 / 8


def test_ratios_are_over_the_mean_of_the_first_rows_seeds():
    rows = [row(step_ms=4.0), row(seed=1, step_ms=2.0), row(Codec(4, 128), step_ms=3.0)]

    first, other = run_table(rows).splitlines()[2:]

    assert first.endswith("| 3.00 | 1.00 | 6.00 |")
    assert other.endswith("| 3.00 | 1.00 | 0.77 |")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row()], "the test loss is 0.200."),
        ([row(), row(test_loss=0.4)], "the test loss is 0.300 (standard deviation 0.141)."),
    ],
    ids=["one run", "two of one seed"],
)
def test_the_conclusion_says_of_runs_what_there_is_to_say(rows, said):
    assert conclusion(rows).endswith(said)


def test_a_gpu_is_warm_before_the_first_run(monkeypatch):
    done = []
    ranks = SimpleNamespace(warm_up=lambda: done.append("warm"), barrier=lambda: None)
    monkeypatch.setattr(training.ranks_of, "join", lambda *_: ranks)
    monkeypatch.setattr(training, "rows_of", lambda plan, ranks: [done.append("train")])

    list(training.run_rank(TrainingPlan("cuda", 4, ("digits",), (0,), 100, every_codec=True), 0, 0))

    assert done == ["warm", "train"]


def test_the_conclusion_tells_near_from_far():
    rows = [row(), row(Codec(8, 128), test_loss=0.203), row(Codec(2, 128), test_loss=0.5)]

    text = conclusion(rows)

    assert "No more than 2 % or two standard deviations above it: 8.125 bits (absmax nearest)." in text
    assert "Worse: 2.125 bits (absmax nearest)." in text


def test_ranks_that_ended_apart_are_named_and_marked():
    report = Training([row(), row(Codec(4, 128), same_bits=False)])

    text = report.markdown(MACHINE, "python -m perf train")

    assert "**WRONG RESULTS: 1 of 2 (digits graphar absmax nearest).**" in text
    assert "| graphar **(WRONG)** | absmax nearest |" in text


def test_a_glance_counts_the_codecs_that_train_as_exact_gradients_do():
    glance = Training([row(), row(Codec(8, 128), test_loss=0.203), row(Codec(2, 128), test_loss=0.5)]).glance()

    assert (glance.headline, glance.words) == ("1 of 2", "codecs reach the test loss of exact gradients, within noise")

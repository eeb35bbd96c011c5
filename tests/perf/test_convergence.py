"""`python -m perf convergence`: its runs, its tables beside exact training, and the data that a package carries."""

from __future__ import annotations

import dataclasses
import gzip
import pickle
import sys

import pytest
import torch

from graphar.numerics.codecs import Codec
from perf import __main__ as program
from perf.models import tasks
from perf.topics.convergence import Convergence, final_table
from perf.topics.training import Outcome, Run, TrainingRow

OUTCOME = Outcome(0.1, 0.97, 0.25, 0.9, 1.0, 10.0, 34_000, True)
NEAREST = Codec(8, 512)


def row(codec, seed, task="animals", **changes):
    return TrainingRow(
        task,
        "abc",
        "graphar",
        2,
        128,
        4.0,
        Run("graphar", codec, False, seed, 240),
        dataclasses.replace(OUTCOME, **changes),
    )


def test_every_number_of_bits_is_tried_with_every_rounding_and_bucket():
    plan = Convergence.plan(program.parse(["convergence", "--tasks", "text"]), gpu_count=0)

    kinds = {
        (run.codec and (run.codec.bits, run.codec.rounding, run.codec.bucket_size), run.seed) for run in plan.runs()
    }
    codecs = [(bits, rule, size) for bits in (8, 4, 2) for rule in ("nearest", "stochastic") for size in (512, 1024)]
    assert kinds == {(codec, seed) for codec in (None, *codecs) for seed in range(3)}
    assert len(plan.runs()) == len(kinds)
    assert (plan.steps, {run.backend for run in plan.runs()}) == (240, {"graphar"})


def test_accuracies_stand_beside_exact_ones_with_their_spread():
    rows = [row(None, 0, test_accuracy=0.92), row(None, 1, test_accuracy=0.94)]
    rows += [row(NEAREST, 0, test_accuracy=0.90), row(NEAREST, 1, test_accuracy=0.91, same_bits=False)]

    lines = final_table(rows).splitlines()

    assert lines[0].split(" | ")[-2:] == ["test acc (%)", "of exact |"]
    assert lines[2].split(" | ")[-2:] == ["93.0 ± 1.4", "+0.0 |"]
    assert lines[3].split(" | ")[-2:] == ["90.5 ± 0.7", "-2.5 |"]
    assert "8 bits **(WRONG)**" in lines[3]


def test_a_language_model_is_measured_by_its_perplexity():
    rows = [row(None, 0, "text", test_loss=2.0), row(NEAREST, 0, "text", test_loss=2.1)]

    assert final_table(rows).splitlines()[3].endswith("| 8.17 ± 0.00 | +0.78 |")


def test_a_packages_images_are_read_without_unpickling_them_and_each_once(tmp_path, monkeypatch):
    numpy = pytest.importorskip("numpy")
    folder = tmp_path / "animal_mnist" / "data" / "Animal_MNIST"
    folder.mkdir(parents=True)
    (tmp_path / "animal_mnist" / "__init__.py").write_text("raise RuntimeError('nothing of it is run')")
    pixels = numpy.arange(12 * 784, dtype=numpy.int64).reshape(12, 784) % 251
    pixels[7] = pixels[3]
    for what, array in (("data", pixels.astype(numpy.uint8)), ("label", numpy.arange(12) % 10)):
        with gzip.open(folder / f"animal_{what}_version_3.gz", "wb") as file:
            pickle.dump(array, file, protocol=4)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "animal_mnist", raising=False)

    data = tasks.load_animals()

    kept = [at for at in range(12) if at != 7]
    images, classes = (torch.cat(parts) for parts in zip(data.train, data.test, strict=True))
    order = [
        *(at for place, at in enumerate(kept) if place % 5),
        *(at for place, at in enumerate(kept) if not place % 5),
    ]
    assert torch.equal(images.mul(255).round().view(-1, 784).long(), torch.from_numpy(pixels)[order])
    assert classes.tolist() == [at % 10 for at in order]

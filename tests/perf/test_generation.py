"""perf model's eager generation with transformers: what is measured, what it takes for wrong, and the report."""

from __future__ import annotations

import contextlib
import importlib.util
import json

import pytest
import torch
import torch.distributed as dist

from graphar.runtime.watch import hook
from perf import __main__ as program
from perf.harness.ranks import InProcessRanks, ProcessRanks
from perf.models import generation
from perf.models.decoder import TINY
from perf.models.generation import GRAPHAR, NEEDS, UNSHARDED, Bench, GenerationPlan
from perf.topics.model import Model
from tests.perf.samples import generation_row as row
from tests.processes import run_ranks

CPU = torch.device("cpu")
LAYERS, TOKENS = 1, 3
PLAN = GenerationPlan("cpu", 2, TINY, LAYERS, TOKENS)
METHODS = [UNSHARDED, "gloo", GRAPHAR]
needs_sharding = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, NEEDS)), reason=f"needs {' and '.join(NEEDS)}"
)


def generate(rank, world_size, summed):
    """The rows, and the ops of the calls that graphar served. Without sums, the model's all-reduces do nothing."""
    served, all_reduce = [], dist.all_reduce

    def count(engine, call, ranks):
        served.append(call.op)
        return contextlib.nullcontext()

    def of_harness(x, op=dist.ReduceOp.SUM, group=None):
        return all_reduce(x, op) if group is None else None

    hook.sinks.append(count)
    generation.REPEATS = {"cpu": 1}
    ranks = ProcessRanks(CPU, dist.HashStore())
    bench = Bench(PLAN, ranks, generation.make_groups(ranks)[0])
    dist.all_reduce = all_reduce if summed else of_harness
    return list(bench.measure()), served


@needs_sharding
def test_every_backend_gives_the_tokens_and_logits_of_the_unsharded_model():
    for rows, served in run_ranks(generate, 2, True):
        assert [row.method for row in rows] == METHODS
        assert [row.error for row in rows[:1]] == [None]
        assert all(0 < row.error < generation.LOGITS_TOLERANCE for row in rows[1:])
        assert [row.wrong for row in rows] == [0, 0, 0]
        assert [(row.same_tokens, row.same_bits) for row in rows[1:]] == [(TOKENS, TOKENS)] * 2
        assert served.count("allreduce") >= 2 * LAYERS * TOKENS


@needs_sharding
def test_tokens_of_a_model_without_its_sums_are_wrong():
    for rows, _ in run_ranks(generate, 2, False):
        assert [row.wrong for row in rows] == [0, 2 * TOKENS, 2 * TOKENS]  # on both ranks


def no_model(*_):
    raise ImportError("torch is too old")


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (("torch", "no_such_package", "nor_this"), "needs no_such_package and nor_this"),
        (("torch",), "torch is too old"),
    ],
)
def test_without_its_packages_nothing_is_generated_and_the_reason_is_said(monkeypatch, needs, reason):
    class One(InProcessRanks):
        device = CPU

    monkeypatch.setattr(generation.ranks_of, "join", lambda *_: One(1))
    monkeypatch.setattr(generation, "make_groups", lambda ranks: ({}, ["backend graphar: no peer access"]))
    monkeypatch.setattr(generation, "NEEDS", needs)
    monkeypatch.setattr(generation, "make_models", no_model)

    assert list(generation.run_rank(PLAN, 0, 0)) == [
        "backend graphar: no peer access",
        f"generation of 3 tokens with transformers: {reason}",
    ]


def report_of(folder):
    (path,) = folder.glob("*/model.json")
    return json.loads(path.read_text()), path.with_suffix(".md").read_text()


ARGUMENTS = ["model", "--size", TINY, "--layers", "1", "--decode", "--prefill", "--generate", "3", "--world-size", "2"]


@needs_sharding
@pytest.mark.usefixtures("forked_ranks")
def test_the_report_of_a_machine_without_gpus(tmp_path):
    assert program.main([*ARGUMENTS, "--out", str(tmp_path)]) == 0

    content, text = report_of(tmp_path)
    assert content["rows"] == content["skipped"] == []
    assert [row["method"] for row in content["generations"]] == METHODS
    assert "All 2 results were verified: none is wrong." in text
    assert "## 2 ranks, 1 layer of tiny: eager generation of 3 tokens with transformers" in text


@needs_sharding
@pytest.mark.gpu
def test_the_report_of_gpus(tmp_path):
    assert program.main([*ARGUMENTS, "--out", str(tmp_path)]) == 0

    content, _ = report_of(tmp_path)
    assert [row["method"] for row in content["generations"]] == [UNSHARDED, "nccl", GRAPHAR]
    assert [row["wrong"] for row in content["generations"]] == [0] * 3


ROWS = [row(UNSHARDED, 100_000.0, None), row("nccl", 200_000.0), row(GRAPHAR, 160_000.0)]
TITLE = "4 ranks, 8 layers of llama-3-8b: eager generation of 64 tokens with transformers"


def test_a_table_has_tokens_per_second_and_what_equals_the_other_backend():
    generated, notes = Model([], ROWS).sections()

    assert generated.title == TITLE
    header, _, whole, nccl, graphar = generated.body[0].splitlines()
    assert header.endswith("| tokens as with nccl | logits with the same bits |")
    assert whole == "| unsharded | 100.0 | 100.0 to 100.0 | 640 | 0.50 | - | 60 of 64 | 50 of 64 |"
    assert nccl == "| nccl | 200.0 | 200.0 to 200.0 | 320 | 1.00 | 0.0100 | 60 of 64 | 50 of 64 |"
    assert graphar == "| graphar | 160.0 | 160.0 to 160.0 | 400 | 0.80 | 0.0100 | 60 of 64 | 50 of 64 |"
    assert "prompt has 16" in notes.body[0]


def test_both_backends_are_compared_at_a_glance():
    report = Model([], ROWS)

    assert report.verdict() == "All 2 results were verified: none is wrong."
    assert report.glance().headline == "0.80"
    assert report.glance().words.endswith("/ with NCCL")


def test_a_wrong_result_is_named_and_compared_with_nothing():
    report = Model([], [*ROWS[:2], row(GRAPHAR, 160_000.0, wrong=3)])

    assert "WRONG RESULTS: 1 of 2 (graphar at 8 layers of llama-3-8b, generation of 64 tokens" in report.verdict()
    assert "| graphar **(3 WRONG)** | 160.0 | 160.0 to 160.0 | 400 | - |" in report.sections()[0].body[0]


@pytest.mark.parametrize(
    ("arguments", "generated"),
    [(["--world-size", "2"], [("llama-3-8b", 4, 64)]), (["--layers", "2", "--generate", "9"], [("llama-3-8b", 2, 9)])],
)
def test_gpus_generate_with_layers_of_a_model_that_is_often_used(arguments, generated):
    plans = Model.plan(program.parse(["model", *arguments]), gpu_count=4)

    planned = [(plan.size, plan.layers, plan.tokens) for plan in plans if isinstance(plan, GenerationPlan)]
    assert planned == generated


def test_generation_can_be_left_out_and_be_all_that_is_measured():
    without = Model.plan(program.parse(["model", "--generate", "0"]), gpu_count=0)
    alone = Model.plan(program.parse(["model", "--decode", "--prefill"]), gpu_count=0)

    assert not any(isinstance(plan, GenerationPlan) for plan in without)
    assert alone == [GenerationPlan("cpu", 2, TINY, 2, 16)]

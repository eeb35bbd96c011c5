"""perf throughput: its models, a short run and the report."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from graphar.numerics.codecs import Codec
from perf import __main__ as program
from perf import training_steps
from perf.harness.ranks import InProcessRanks, ProcessRanks
from perf.models.decoder import SIZES, TINY
from perf.models.llama import Llama, fill
from perf.models.tasks import ByteTransformer
from perf.models.workloads import WORKLOADS, Decoder, Workload
from perf.topics import throughput as runs
from perf.topics.throughput import Reduction, Throughput, ThroughputRow
from tests.processes import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_batch_is_of_the_shape_its_model_is_trained_on_and_another_on_each_rank(name):
    workload = WORKLOADS[name]
    (x, y), (other, _) = (workload.batch(2, CPU, seed) for seed in (0, 1))

    assert x.shape == (2, *workload.sample)
    assert y.numel() == 2 * workload.items
    assert 0 <= y.min() <= y.max() < workload.classes
    assert not torch.equal(x, other)


def llama() -> torch.nn.Module:
    model = Llama(SIZES[TINY], layers=2)
    fill(model, rank=0)
    return model


@pytest.mark.parametrize(
    ("make", "length", "vocabulary"),
    [(partial(Decoder, 100, 8, 20, 30, 2), 8, 100), (llama, 16, 512), (partial(ByteTransformer, 32, 1, 2), 64, 256)],
    ids=["decoder", "llama", "bytes"],
)
def test_a_model_predicts_each_next_token_and_does_not_see_it(make, length, vocabulary):
    model, tokens = make().eval(), torch.arange(length).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 5] = vocabulary - 1

    before, after = model(tokens), model(changed)

    assert before.shape == (1, length, vocabulary)
    torch.testing.assert_close(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


class OneRank(InProcessRanks):
    device = CPU


def broken() -> torch.nn.Module:
    raise RuntimeError("operator torchvision::nms does not exist\nsome more")


def test_the_xl_model_has_as_many_parameters_as_gpt_2_xl():
    with torch.device("meta"):
        model = WORKLOADS["gpt2_xl"].make()

    assert sum(parameter.numel() for parameter in model.parameters()) == pytest.approx(1.56e9, rel=0.01)


def test_what_cannot_be_imported_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    unfit = Workload("resnet", "torchvision", broken, (3, 8, 8), 10, 1)

    model, reason = runs.make(WORKLOADS["nfnet_f1"], OneRank(1))
    assert model is None
    assert reason.startswith("nfnet_f1: needs timm (")
    assert runs.make(unfit, OneRank(1)) == (
        None,
        "resnet: needs torchvision (operator torchvision::nms does not exist)",
    )


def test_what_comes_with_graphar_must_work():
    with pytest.raises(RuntimeError):
        runs.make(Workload("tiny", "", broken, (1, 8, 8), 10, 1), OneRank(1))


@pytest.mark.usefixtures("forked_ranks")
def test_a_short_run_is_reported(tmp_path, capsys):
    argv = ["throughput", "--steps", "10", "--batch-size", "2", "--out", str(tmp_path)]

    assert program.main(argv) == 0

    folder = tmp_path / "cpu"
    content = json.loads((folder / "throughput.json").read_text())
    ways = [(row["way"], row) for row in content["rows"]]
    rows = {(way["backend"], way["bits"], *["afterwards"] * (not way["overlap"])): row for way, row in ways}
    assert len(rows) == len(content["rows"]) == 11
    assert {row["steps"] for row in rows.values()} == {13}  # the first three are not timed
    of_hooks = [rows[key]["loss"] for key in (("gloo", 32), ("graphar", 32), ("graphar", 32, "afterwards"))]
    assert len({*of_hooks}) == 1  # of two ranks there is one order
    assert rows["one by one", 32]["loss"] == rows["flattened", 32]["loss"] == rows["gloo", 32]["loss"]
    assert len({row["loss"] for row in rows.values()}) == 7
    assert all(row["loss"] < 2.3 and row["same_bits"] for row in rows.values())
    text = (folder / "throughput.md").read_text()
    assert "All 11 results were verified: none is wrong." in text
    assert "| tiny, img |" in text


def train_where_one_copy_fits(rank, world_size):
    workload = dataclasses.replace(WORKLOADS["tiny"], copies_fit=False)
    plan = runs.ThroughputPlan("cpu", world_size, ("tiny",), steps=10, batch_size=2, budget_s=None)
    alive, at_once = [], runs.train_and_time

    def train_and_time(trainers, *more):
        alive.append(len(trainers))
        return at_once(trainers, *more)

    some = runs.reductions("gloo")[:3]
    runs.train_and_time, runs.reductions = train_and_time, lambda backend: some
    ranks = ProcessRanks(CPU, dist.distributed_c10d._get_default_store())
    rows = list(runs.rows_of(plan, workload, ranks))
    return [str(row.way) for row in rows], alive


def test_of_a_model_that_fits_once_one_reduction_is_trained_after_another():
    names = [str(reduction) for reduction in runs.reductions("gloo")[:3]]

    assert run_ranks(train_where_one_copy_fits, 2) == [(names, [1] * 3)] * 2


def test_where_the_time_is_spent_fewer_steps_are_made():
    made = []
    ranks = SimpleNamespace(slowest=list, time_us=lambda steps, mode: steps() or 1.0)
    plan = runs.ThroughputPlan("cpu", 2, ("tiny",), steps=100, batch_size=1, budget_s=1e-9)

    times = training_steps.time_blocks([lambda count, seed: made.append(count)], plan, ranks, begin=0.0)

    assert (times, made) == ([[1.0] * 2], [training_steps.BLOCK] * 2)


def rows():
    base = ThroughputRow(
        model="resnet50",
        unit="img",
        parameters=1_000_000,
        exact_parameters=10_000,
        world_size=4,
        batch_size=32,
        items=128,
        way=Reduction("nccl"),
        steps=205,
        step_ms=10.0,
        loss=1.5,
        same_bits=True,
    )
    times = {
        Reduction("alone"): 8.0,
        Reduction("nccl"): 10.0,
        Reduction("graphar"): 9.0,
        Reduction("graphar", Codec(4, 128).text): 8.5,
    }
    return [dataclasses.replace(base, way=reduction, step_ms=step_ms) for reduction, step_ms in times.items()]


def test_tables_have_throughput_the_ratio_to_torchs_own_and_what_communication_takes():
    overview, model = Throughput(rows()).sections()
    alone, nccl, _, int4 = model.body[-1].splitlines()[2:]

    assert overview.body[0].splitlines()[0] == (
        "| model, items | torch's own (items/s) | nccl (of_torch) | exact (of_torch) | 4 bits (of_torch) |"
    )
    assert overview.body[0].splitlines()[2] == "| resnet50, img | 12,800 | 1.00 | 0.90 | 0.85 |"
    assert alone == "| alone | - | 8.00 | 0.80 | 16,000 | 0.0 | 0.0 | 1.500 | 205 |"
    assert nccl == "| nccl | 32 | 10.00 | 1.00 | 12,800 | 20.0 | 6.0 | 1.500 | 205 |"
    # 1.5 times a million of 4.125 bits, and 10,000 of 32
    assert int4 == "| 4 bits | 4.125 | 8.50 | 0.85 | 15,059 | 5.9 | 0.8 | 1.500 | 205 |"


def naive_gradients(rank, world_size, flattened):
    """Whether each averaged gradient is the mean over ranks. The model's second layer has no gradients."""
    layers = torch.nn.ModuleList([torch.nn.Conv2d(2, 3, 2), torch.nn.Linear(2, 2)]).to(
        memory_format=torch.channels_last
    )
    mine = [
        [
            torch.full_like(p, rank * 10.0 + at).add_(torch.arange(p.numel()).view(p.shape))
            for at, p in enumerate(layers[0].parameters())
        ]
        for rank in range(world_size)
    ]
    for parameter, gradient in zip(layers[0].parameters(), mine[rank], strict=True):
        parameter.grad = gradient.clone()
    runs.average(layers, flattened=flattened)
    means = [torch.stack(of_one).mean(0) for of_one in zip(*mine, strict=True)]
    return [torch.equal(p.grad, mean) for p, mean in zip(layers[0].parameters(), means, strict=True)]


@pytest.mark.parametrize("flattened", [False, True])
def test_naive_all_reduces_average_each_gradient_in_its_place(flattened):
    assert run_ranks(naive_gradients, 2, flattened) == [[True, True]] * 2


def test_ranks_that_ended_apart_are_named_and_marked():
    apart = Throughput([dataclasses.replace(row, same_bits=row.way.codec is None) for row in rows()])

    overview, model = apart.sections()
    assert apart.verdict() == "**WRONG RESULTS: 1 of 4 (resnet50 4 bits).**"
    assert "| 4 bits **(WRONG)** |" in model.body[-1]
    assert "| 0.85 **(WRONG)** |" in overview.body[0]


def test_what_was_measured_of_a_model_before_a_run_ended_is_reported():
    begun = [dataclasses.replace(row, model="gpt2_xl") for row in rows()[::2]]  # alone, and exact
    report = Throughput([*rows(), *begun])

    overview, _, model = report.sections()

    assert "| gpt2_xl, img | - | - | - | - |" in overview.body[0]
    assert "| exact | 32 | 9.00 | - | 14,222 | 11.1 |" in model.body[-1]
    assert report.glance().ratios == {"resnet50": 0.9}


def test_nothing_is_compared_with_torchs_own_where_that_is_wrong():
    apart = Throughput([dataclasses.replace(row, same_bits=not row.is_baseline) for row in rows()])

    assert "| exact | 32 | 9.00 | - | 14,222 |" in apart.sections()[1].body[-1]
    assert apart.glance().ratios == {}

"""perf fsdp: its model, its plans, a short run and the report."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

from perf import __main__ as program
from perf.harness.ranks import ProcessRanks
from perf.models.decoder import SIZES, TINY
from perf.models.llama import Llama, fill, fitting_layers
from perf.topics import fsdp
from perf.topics.fsdp import Fsdp, FsdpPlan, Kind, check, make_kinds, make_steps, random_batch, trainer_of
from perf.training_steps import ALONE
from tests.perf.samples import fsdp_row
from tests.processes import run_ranks

GB = 1 << 30


def tiny() -> Llama:
    model = Llama(SIZES[TINY], layers=2)
    fill(model, rank=0)
    return model


def test_the_model_of_8b_has_as_many_parameters_as_llama_3_8b():
    with torch.device("meta"):
        model = Llama(SIZES["llama-3-8b"], layers=32)

    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248


def test_the_model_knows_the_order_of_earlier_tokens():
    model = tiny()

    assert not torch.allclose(model(torch.tensor([[1, 2, 3]]))[0, 2], model(torch.tensor([[2, 1, 3]]))[0, 2])


def test_weights_are_the_same_each_time_and_others_on_each_rank():
    models = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    for model, rank in zip(models, (0, 0, 1), strict=True):
        fill(model, rank)

    first, same, other = (model.weight for model in models)
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_as_many_layers_fit_as_there_are_memory_and_layers_for():
    size = SIZES["llama-3-8b"]
    layers = [fitting_layers(size, ranks, 2048, 140 * GB) for ranks in (2, 4, 8)]

    assert layers == [32, 32, 32]
    assert fitting_layers(size, 4, 2048, 40 * GB) < fitting_layers(size, 8, 2048, 40 * GB) < 32
    assert fitting_layers(size, 4, 65536, 140 * GB) < 16
    assert fitting_layers(size, 2, 2048, GB) == 1


@pytest.mark.usefixtures("forked_ranks")
def test_a_short_run_is_reported(tmp_path):
    argv = ["fsdp", "--steps", "10", "--tokens", "8", "16", "--layers", "1", "--blocks", "3", "--out", str(tmp_path)]

    assert program.main(argv) == 0

    folder = tmp_path / "cpu"
    measured = json.loads((folder / "fsdp.json").read_text())["rows"]
    kinds = ("gloo", None), ("graphar", None), ("graphar", 3), ("graphar lossless", None)
    kinds += ("graphar copies", None), ("alone", None)
    rows = {(row["method"], row["blocks"], row["tokens"]): row for row in measured}
    assert [*rows] == [(*kind, tokens) for tokens in (8, 16) for kind in kinds]
    for tokens in (8, 16):
        torchs, plain, limited, lossless, copies, alone = (rows[(*kind, tokens)] for kind in kinds)
        # Sums of two ranks have one order.
        assert torchs["digest"] == plain["digest"] == limited["digest"] == lossless["digest"] != alone["digest"]
        assert copies["digest"] == plain["digest"]
        assert torchs["losses"] == plain["losses"]
        assert torchs["losses"][-1] < torchs["losses"][0]
        assert plain["compressed"] == lossless["compressed"] == []
    assert "All 8 results were verified: none is wrong." in (folder / "fsdp.md").read_text()


def checks_around_steps_as_rank(rank, world_size):
    ranks = ProcessRanks(torch.device("cpu"), dist.HashStore())
    plan = FsdpPlan("cpu", world_size, TINY, 1, (8,), 10, "bf16", (), None, None)
    trainer, (torchs, plain, lossless, copies, alone) = trainer_of(plan, 1, ranks), make_kinds(plan)
    batch = random_batch(SIZES[TINY], 8, ranks)
    before = check(trainer, plain, batch, ranks)
    for kind in (torchs, lossless, alone):
        make_steps(trainer, kind, batch, 3, seed=0)
    after = check(trainer, plain, batch, ranks)
    for kind in (plain, lossless, copies):
        kind.communicator.close()
    return before == after


def test_steps_that_are_timed_change_no_later_check():
    assert run_ranks(checks_around_steps_as_rank, 2) == [True, True]


def torchs_own_as_rank(rank, world_size):
    ranks = ProcessRanks(torch.device("cpu"), dist.HashStore())
    trainer = trainer_of(FsdpPlan("cpu", world_size, TINY, 1, (8,), 10, "bf16", (), None, None), 1, ranks)
    batch = random_batch(SIZES[TINY], 8, ranks)
    never_set = check(trainer, None, batch, ranks)
    make_steps(trainer, Kind(ALONE), batch, 1, seed=0)
    return never_set == check(trainer, Kind("gloo"), batch, ranks) != check(trainer, Kind(ALONE), batch, ranks)


def test_torchs_own_collectives_come_back_after_others():
    assert run_ranks(torchs_own_as_rank, 2) == [True, True]


def without_communication_as_rank(rank, world_size):
    x = torch.arange(4.0) + 10 * rank
    gathered, scattered = torch.empty(8), torch.empty(2)
    gathered[4 * rank : 4 * rank + 4] = x
    fsdp.local_gather(gathered, gathered[4 * rank : 4 * rank + 4], dist.group.WORLD)
    fsdp.local_scatter(scattered, x, dist.group.WORLD, op=dist.ReduceOp.AVG)
    return gathered.tolist(), scattered.tolist()


def test_without_communication_each_rank_takes_its_own_parts():
    first, second = run_ranks(without_communication_as_rank, 2)

    assert first == ([0, 1, 2, 3] * 2, [0, 1])
    assert second == ([10, 11, 12, 13] * 2, [12, 13])


def test_a_tensors_number_depends_on_each_bit_and_place():
    x = torch.tensor([0.0, 1.0, 2.0])

    assert fsdp.checksum(x) == fsdp.checksum(x.clone())
    assert len({fsdp.checksum(changed) for changed in (x, x.flip(0), torch.tensor([-0.0, 1.0, 2.0]))}) == 3
    assert fsdp.checksum(torch.empty(0)) == 0


def rows(**lossless):
    return [
        fsdp_row("nccl", 400.0),
        fsdp_row("graphar", 390.0),
        fsdp_row("graphar lossless", 380.0, compressed=["allgather_lossless"], **lossless),
        fsdp_row("alone", 350.0, losses=[11.9, 3.0], digest="4567"),
    ]


def test_the_table_has_the_ratio_to_torchs_own_and_what_communication_is_exposed():
    (section,) = Fsdp(rows()).sections()
    nccl, plain, lossless, alone = section.body[0].splitlines()[2:]

    assert nccl == "| nccl | 400.00 | 1.00 | 50.00 | 20,480 | - | 11.500000, 11.000000 |"
    assert plain == "| graphar | 390.00 | 0.97 | 40.00 | 21,005 | - | 11.500000, 11.000000 |"
    assert (
        lossless == "| graphar lossless | 380.00 | 0.95 | 30.00 | 21,558 | allgather_lossless | 11.500000, 11.000000 |"
    )
    assert alone == "| alone | 350.00 | 0.88 | - | 23,406 | - | - |"
    marks = Fsdp(rows()).ratio_chart().marks
    assert [(mark.row, mark.value) for mark in marks] == [("graphar", 0.975), ("graphar lossless", 0.95)]


def test_nccls_gathers_by_copy_engines_are_a_peer_and_not_what_others_are_compared_with():
    (section,) = Fsdp([fsdp_row("nccl zero-CTA", 380.0, losses=[9.0, 8.0], digest="4567"), *rows()]).sections()

    zero_cta, nccl, *_ = section.body[0].splitlines()[2:]
    assert zero_cta == "| nccl zero-CTA | 380.00 | 0.95 | 30.00 | 21,558 | - | 9.000000, 8.000000 |"
    assert nccl.startswith("| nccl | 400.00 | 1.00 |")
    assert Fsdp.count(Fsdp.plan(program.parse(["fsdp", "--tokens", "8", "--zero-cta"]), 2)) == 6


def test_the_finding_names_the_fastest_method_and_what_could_be_reached():
    said = (
        "2048 tokens per rank: with {} a step takes {} of the time with torch's collectives; without communication it"
    )

    assert Fsdp(rows()).findings() == [f"{said.format('graphar lossless', 0.95)} would take 0.88."]
    copies = fsdp_row("graphar copies", 360.0)
    assert Fsdp([*rows(), copies]).findings() == [f"{said.format('graphar copies', '0.90')} would take 0.88."]
    assert Fsdp(rows()[:3]).findings() == []  # what is alone was not measured


@pytest.mark.parametrize("bad", [{"digest": "4567"}, {"losses": [11.5, 11.0000001]}], ids=["parameters", "losses"])
def test_compression_that_changes_a_bit_is_wrong(bad):
    report = Fsdp(rows(**bad))

    assert report.verdict() == "**WRONG RESULTS: 1 of 2 (graphar lossless at 2048 tokens).**"
    assert "| graphar lossless **(WRONG)** |" in report.sections()[0].body[0]
    assert list(report.glance().ratios) == ["graphar, 2048 tokens, 4 ranks"]
    assert "with graphar a step takes 0.97" in report.findings()[0]  # the fastest of those that are right


def test_losses_may_differ_from_torchs_by_its_rounding_and_no_more():
    near, far = (
        Fsdp([rows()[0], *(fsdp_row(m, 1.0, losses=[11.5, loss]) for m in ("graphar", "graphar lossless"))])
        for loss in (11.2, 11.3)
    )

    assert near.wrong() == []
    assert far.wrong() == ["graphar at 2048 tokens", "graphar lossless at 2048 tokens"]


def test_limits_on_blocks_have_rows_of_their_own_and_the_same_bits():
    report = Fsdp([*rows(), fsdp_row("graphar", 360.0, blocks=8), fsdp_row("graphar", 370.0, blocks=16, digest="4567")])

    assert "| graphar, 8 blocks | 360.00 | 0.90 | 10.00 |" in report.sections()[0].body[0]
    assert report.wrong() == ["graphar, 16 blocks at 2048 tokens"]
    assert "graphar, 8 blocks, 2048 tokens, 4 ranks" in report.glance().ratios


def test_sizes_are_compared_each_for_itself():
    longer = [fsdp_row(row.method, 2 * row.step_ms, tokens=8192, losses=[5.0, 4.0]) for row in rows()[:3]]
    report = Fsdp(rows() + longer)

    assert report.wrong() == []
    assert len(report.sections()) == 2
    assert len(report.glance().ratios) == 4

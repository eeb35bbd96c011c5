"""perf gathered: its layers and methods, what it takes for wrong, and the report."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import graphar.reference
from perf.fusion import Trial
from perf.harness.ranks import InProcessRanks
from perf.peers import gathered as methods
from perf.peers.gathered import ALLGATHER, AUTO, CPU_METHODS, CUDA_METHODS, GatheredLayer, GatheredPlan, make_variants
from perf.peers.matmuls import Variant
from perf.topics.gathered import Gathered, count_wrong
from tests.perf.samples import MACHINE
from tests.perf.samples import gathered_row as row
from tests.processes import run_ranks

CPU = torch.device("cpu")
A_LAYER = GatheredLayer(2, 8, 24, 16)


def sizes(world_size, rows):
    plan = GatheredPlan("cuda", world_size, rows, (10240, 57344), 8192, CUDA_METHODS)
    return [(layer.m, layer.n, layer.k) for layer in plan.layers()]


def test_layers_are_those_of_llama_by_ranks():
    assert sizes(4, (64, 4096)) == [(64, 2560, 8192), (4096, 2560, 8192), (64, 14336, 8192), (4096, 14336, 8192)]


def test_on_any_number_of_ranks_all_have_equally_many_rows_and_whole_lines_of_columns():
    assert sizes(3, (64,)) == [(63, 3392, 8192), (63, 19072, 8192)]


def test_gathered_rows_are_those_of_all_ranks_in_their_order():
    of_ranks = [A_LAYER.operands(rank, CPU) for rank in range(2)]

    assert torch.equal(A_LAYER.gathered(CPU), torch.cat([a for a, _ in of_ranks]))
    assert not torch.equal(of_ranks[0][0], of_ranks[1][0])
    assert not torch.equal(of_ranks[0][1], of_ranks[1][1])
    assert [tuple(tensor.shape) for tensor in of_ranks[0]] == [(4, 16), (24, 16)]


def results(rank, world_size, layer):
    """The results of the methods that torch's CPU backend can run, twice each, and what they should be."""
    from torch.distributed._symmetric_memory import _fused_all_gather_matmul_fallback

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", _fused_all_gather_matmul_fallback, "CPU")
    a, w = layer.operands(rank, CPU)
    variants = make_variants(GatheredPlan("cpu", world_size, (), (), 0, CPU_METHODS))
    calls = {variant.name: variant.call for variant in variants}
    calls |= {f"{methods.CHUNKED}{count}": partial(methods.chunked, count=count) for count in (1, 2, 4)}
    calls[methods.SYMM_FUSED] = methods.symm_fused
    rows = layer.gathered(CPU)
    expected = {name: rows if name == ALLGATHER else graphar.reference.linear(rows, w) for name in calls}
    return {name: ([call(a, w) for _ in range(2)], expected[name]) for name, call in calls.items()}


@pytest.mark.parametrize("layer", [A_LAYER, GatheredLayer(3, 15, 8, 16)], ids=["2 ranks", "uneven chunks"])
def test_every_method_multiplies_the_gathered_rows(layer):
    for of_rank in run_ranks(results, layer.world_size, layer):
        assert of_rank.keys() >= {*CPU_METHODS, methods.SYMM_FUSED}
        for name, (each, expected) in of_rank.items():
            for output in each:
                assert output.shape == expected.shape, name
                torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


def test_chunks_of_few_rows_are_not_measured():
    variants = {variant.name: variant for variant in make_variants(GatheredPlan("cuda", 4, (), (), 0, CUDA_METHODS))}

    served = [name for name, variant in variants.items() if variant.serves(GatheredLayer(4, 1024, 2560, 8192))]

    assert served == [name for name in CUDA_METHODS if name != "chunked_nccl@8"]


class One(InProcessRanks):
    device = CPU


def wrong_of(name, call, exact):
    trial = Trial(Variant(name, call, exact=exact), A_LAYER, A_LAYER.operands(0, CPU))
    return count_wrong(trial, trial.make_launch(), One(1))


@pytest.mark.parametrize(("exact", "factor", "wrong"), [(True, 1.01, 1), (False, 1.01, 0), (False, 1.1, 1)])
def test_an_element_that_is_off_is_counted(exact, factor, wrong):
    def call(a, w):
        product = graphar.reference.linear(A_LAYER.gathered(CPU), w)
        product[3, product[3].abs().argmax()] *= factor
        return product

    assert wrong_of(AUTO, call, exact) == wrong


def test_the_rows_of_other_ranks_must_stand_in_their_places():
    def call(a, w):
        return graphar.reference.linear(A_LAYER.gathered(CPU).roll(4, 0), w)

    assert wrong_of("nccl+matmul", call, exact=False) > 100


def test_gathered_rows_must_have_their_bits():
    def call(a, w):
        rows = A_LAYER.gathered(CPU)
        rows.view(torch.int16)[2, 1] ^= 1
        return rows

    assert wrong_of(ALLGATHER, call, exact=True) == 1


ROWS = [
    row("matmul", 200.0),
    row("allgather", 300.0),
    row("nccl+matmul", 540.0),
    row("chunked_nccl@4", 520.0),
    row("symm_fused", 410.0, wrong=1),
    row("graphar+matmul", 480.0),
    row("graphar", 480.0),
    row("graphar:tiles", 400.0),
]


def test_a_comparison_has_floors_the_best_of_each_side_and_what_was_hidden():
    (section,) = Gathered(ROWS).sections()

    (line,) = section.body[0].splitlines()[2:]
    assert section.title == "4 ranks, N = 2560, K = 8192"
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["4096", "200", "300", "480"]
    assert cells[4:9] == ["chunked_nccl@4", "520", "480", "graphar:tiles", "400"]
    assert cells[9:] == ["0.92", "1.00", "50"]


def test_what_auto_loses_is_said():
    report = Gathered(ROWS)

    assert report.loss_of_auto() == "1.20 (graphar, M = 4096, N = 2560, 4 ranks: `graphar:tiles` is fastest)"
    assert f"is at most {report.loss_of_auto()}." in report.markdown(MACHINE, "a command")
    assert report.glance().headline == "0.92"

"""perf fused: what it measures, what it takes for wrong, and the report."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import graphar
from perf.fusion import Trial
from perf.harness.ranks import InProcessRanks, ProcessRanks
from perf.peers.matmuls import (
    CUDA_METHODS,
    TP_INVARIANT,
    FusedPlan,
    Layer,
    Variant,
    make_variants,
    own_product,
)
from perf.topics.fused import Fused, count_wrong
from tests.perf.samples import fused_row as row

A_LAYER = Layer(2, 16, 32, 64)


ROWS = [
    row("matmul", 200.0),
    row("allreduce", 300.0),
    row("matmul+nccl", 540.0),
    row("chunked_nccl@4", 520.0),
    row("symm_fused", 410.0, wrong=1),
    row("matmul+graphar", 500.0),
    row("graphar", 500.0),
    row("graphar_int8", 300.0),
    row("graphar:tiles_int8", 250.0),
    row("graphar:split_m4@24", 400.0),
]


def test_layers_are_those_of_llama_by_ranks():
    layers = list(FusedPlan("cuda", 4, (1, 4096), 8192, (8192, 28672), CUDA_METHODS).layers())

    sizes = [(1, 8192, 2048), (4096, 8192, 2048), (1, 8192, 7168), (4096, 8192, 7168)]
    assert [(layer.m, layer.n, layer.k) for layer in layers] == sizes


def test_parts_of_k_are_whole_lines_on_any_number_of_ranks():
    assert [layer.k for layer in FusedPlan("cuda", 3, (1,), 8192, (8192, 28672), ()).layers()] == [2688, 9536]


def test_operands_are_the_same_each_time_and_others_on_each_rank():
    cpu = torch.device("cpu")
    first, again, other = (A_LAYER.operands(rank, cpu) for rank in (0, 0, 1))

    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))


def comparison(rows):
    (section,) = Fused(rows).sections()
    return section


def test_a_comparison_has_floors_the_best_of_each_side_and_what_was_hidden():
    (line,) = comparison(ROWS).body[0].splitlines()[2:]

    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["4096", "200", "300", "500"]
    assert cells[4:9] == ["chunked_nccl@4", "520", "500", "graphar:split_m4@24", "400"]
    assert cells[9:] == ["0.96", "1.00", "50"]


def test_wrong_results_are_named_and_win_nothing():
    report = Fused(ROWS)

    assert report.verdict() == (
        "10 results were verified: none of graphar's is wrong."
        " **WRONG RESULTS OF PEERS: 1 of 10 (symm_fused at 4096 x 8192 x 2048).**"
    )
    wrong_rows = [replace(row, wrong=int(row.method == "graphar")) for row in ROWS]
    assert Fused(wrong_rows).verdict().startswith("**WRONG RESULTS: ")
    assert "| 410 **(1 WRONG)** |" in comparison(ROWS).body[-1]
    assert report.glance().headline == "0.96"


@pytest.mark.parametrize("name", ["matmul", "allreduce"])
def test_beside_a_floor_that_is_wrong_nothing_is_said_to_hide(name):
    rows = [replace(row, wrong=int(row.method == name)) for row in ROWS]

    (line,) = comparison(rows).body[0].splitlines()[2:]

    assert line.endswith("| - |")


def test_ratios_are_drawn_over_the_best_peers_time():
    (plot,) = comparison(
        [row("matmul", 1.0), row("matmul+nccl", 8.0), row("graphar", 6.0), row("graphar:tiles", 4.0)]
    ).figures

    assert {line.name: line.points for line in plot.lines} == {"graphar": [(4096, 0.75)], "best graphar": [(4096, 0.5)]}


class One(InProcessRanks):
    device = torch.device("cpu")

    def gather(self, data, window):
        return [data[window]]


@pytest.mark.parametrize(("exact", "factor", "wrong"), [(True, 1.01, 1), (False, 1.01, 0), (False, 1.1, 1)])
def test_an_element_that_is_off_is_counted(exact, factor, wrong):
    def call(a, w):
        product = own_product(a, w)
        product[3, 5] *= factor
        return product

    trial = Trial(Variant("one", call, exact=exact), A_LAYER, A_LAYER.operands(0, torch.device("cpu")))
    launch = trial.make_launch()

    assert count_wrong(trial, launch, One(1)) == wrong


@pytest.mark.parametrize(("partition", "is_right"), [("tp_invariant", True), ("none", False)])
def test_one_answer_is_the_one_that_a_single_gpu_computes_from_the_whole_layer(partition, is_right):
    parts = [A_LAYER.operands(rank, torch.device("cpu")) for rank in range(A_LAYER.world_size)]
    variant = Variant("one", lambda a, w: summed(parts, partition), whole=True)
    trial = Trial(variant, A_LAYER, parts[0])

    assert (count_wrong(trial, trial.make_launch(), One(2)) == 0) == is_right


def summed(parts, partition):
    return graphar.fused_matmul_allreduce(*map(list, zip(*parts, strict=True)), partition=partition)[0]


@pytest.mark.parametrize(("world_size", "serves"), [(2, True), (3, False), (4, True)])
def test_one_answer_is_measured_on_as_many_ranks_as_a_tree_has(world_size, serves):
    (variant,), _ = make_variants(FusedPlan("cpu", world_size, (16,), 32, (64,), (TP_INVARIANT,)), One(1))

    assert variant.serves(Layer(world_size, 16, 32, 64)) == serves


def test_one_answer_is_compared_with_auto_and_with_torchs_matmul_and_nccl():
    report = Fused([*ROWS, row(TP_INVARIANT, 600.0)])

    assert "| 4096 | 600 | 1.20 | 1.11 |" in report.sections()[0].body[-3]
    assert report.findings()[1:] == [
        "`tp_invariant` / auto over 1 case: geometric mean 1.200, at worst 1.20 (M = 4096, K = 2048, 4 ranks).",
        "`tp_invariant` / torch over 1 case: geometric mean 1.111, at worst 1.11 (M = 4096, K = 2048, 4 ranks).",
    ]
    assert len(Fused(ROWS).findings()) == 1


def test_where_no_method_serves_a_layer_there_is_no_row(group_of):
    group_of(2)

    assert list(Fused.rows_of(A_LAYER, [], ProcessRanks(torch.device("cpu"), None))) == []

"""perf fused: what it measures, what it takes for wrong, and the report."""

from __future__ import annotations

import json

import pytest
import torch

from perf import __main__ as program
from perf.fused import report, sweep
from perf.fused.cases import Layer, Plan
from perf.fused.methods import CPU_METHODS, CUDA_METHODS, MIN_ROWS, own_product
from perf.fused.sweep import FusedRow
from perf.ranks import InProcessRanks
from tests.test_perf_report import MACHINE

A_LAYER = Layer(2, 16, 32, 64)


def row(method, time_us, wrong=0, m=4096):
    return FusedRow(method, 4, m, 8192, 2048, {"median": time_us, "p10": time_us, "p99": time_us}, wrong)


ROWS = [
    row("matmul", 200.0),
    row("allreduce", 300.0),
    row("matmul+nccl", 540.0),
    row("chunked_nccl@4", 520.0),
    row("symm_fused", 410.0, wrong=1),
    row("matmul+graphar", 500.0),
    row("graphar", 500.0),
    row("graphar_int8", 300.0),
    row("graphar:split_m4@24", 400.0),
]


def test_layers_are_those_of_llama_by_ranks():
    layers = list(Plan("cuda", 4, (1, 4096), 8192, (8192, 28672), CUDA_METHODS).layers())

    sizes = [(1, 8192, 2048), (4096, 8192, 2048), (1, 8192, 7168), (4096, 8192, 7168)]
    assert [(one.m, one.n, one.k) for one in layers] == sizes


def test_parts_of_k_are_whole_lines_on_any_number_of_ranks():
    assert [one.k for one in Plan("cuda", 3, (1,), 8192, (8192, 28672), ()).layers()] == [2688, 9536]


def test_operands_are_the_same_each_time_and_others_on_each_rank():
    cpu = torch.device("cpu")
    first, again, other = (A_LAYER.operands(rank, cpu) for rank in (0, 0, 1))

    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(first, other, strict=True))


def test_a_comparison_has_floors_the_best_of_each_side_and_what_was_hidden():
    (line,) = report.comparison(ROWS).splitlines()[2:]

    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:4] == ["4096", "200.0", "300.0", "500.0"]
    assert cells[4:9] == ["chunked_nccl@4", "520.0", "500.0", "graphar:split_m4@24", "400.0"]
    assert cells[9:] == ["0.96", "1.00", "50%"]


def test_wrong_results_are_named_and_win_nothing():
    found = report.Findings(ROWS)

    assert report.verdict(found) == "**WRONG RESULTS: symm_fused at 4096 x 8192 x 2048.**"
    assert "| wrong |" in report.markdown(MACHINE, found, "python -m perf fused")


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

    a, w = A_LAYER.operands(0, torch.device("cpu"))
    trial = sweep.Trial(sweep.Way("one", call, exact=exact), A_LAYER, a, w)
    launch = trial.make_launch()

    assert sweep._count_wrong(trial, launch, One(1)) == wrong


@pytest.mark.usefixtures("forked_ranks")
def test_the_report_of_a_machine_without_gpus(tmp_path):
    assert program.main(["fused", "--rows", "4", str(MIN_ROWS), "--columns", "64", "--out", str(tmp_path)]) == 0

    (folder,) = tmp_path.iterdir()
    found = json.loads((folder / "fused.json").read_text())
    assert {one["method"] for one in found["rows"]} == set(CPU_METHODS)
    assert found["skipped"] == []
    text = (folder / "fused.md").read_text()
    assert "every one verified." in text
    assert "## 2 ranks, N = 64, K = 128" in text


def test_a_method_of_another_machine_is_refused():
    with pytest.raises(SystemExit, match="symm_fused: not on this machine"):
        program.main(["fused", "--methods", "symm_fused"])

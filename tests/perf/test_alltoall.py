"""perf alltoall: its calls on the CPU, what it notices, and the report."""

from __future__ import annotations

import pytest
import torch

from graphar.plan.sizes import KB
from perf import __main__ as program
from perf.harness.cases import Case
from perf.report import read
from perf.topics import alltoall
from perf.topics.alltoall import HEADS, ROWS, AllToAll, AllToAllRow
from tests.perf.samples import CPU, spread
from tests.processes import run_ranks


def row(method, time_us, kind=ROWS, nbytes=2 * KB, wrong=0):
    return AllToAllRow(method, kind, 4, nbytes, spread(time_us), wrong)


def wrong_elements(rank, world_size):
    """By kind, the wrong elements of torch's method, of one that swaps two elements, and of zeros."""
    ranks, wrong = alltoall.ProcessRanks(torch.device("cpu"), None), []
    for kind in (ROWS, HEADS):
        case = Case(world_size, "process", "cpu", "bfloat16", 2 * alltoall.numel_of(2 * KB, world_size))
        x = alltoall.shaped(alltoall.random_tensor(case, rank, ranks.device), kind, world_size)

        def swapped(x=x, kind=kind):
            y = alltoall.by_torch(x, kind)
            y.view(-1)[:2] = y.view(-1)[:2].flip(0)
            return y

        for call in (
            lambda x=x, kind=kind: alltoall.by_torch(x, kind),
            swapped,
            lambda x=x, kind=kind: alltoall.by_torch(x, kind).zero_(),
        ):
            trial = alltoall.Trial("gloo", call, case, kind, ranks)
            trial.run(1)
            wrong.append(trial.count_wrong(lambda trial=trial: trial.run(1)))
    return wrong


def test_a_wrong_element_and_wrong_parts_are_noticed():
    for rows, swapped, zeros, heads, of_heads, of_zeros in run_ranks(wrong_elements, 2):
        assert (rows, swapped, heads, of_heads) == (0, 2, 0, 2)
        assert zeros == of_zeros == 1024


@pytest.mark.usefixtures("forked_ranks")
def test_on_the_cpu_every_method_is_verified(tmp_path):
    assert program.main(["alltoall", "--max-nbytes", "2K", "--out", str(tmp_path)]) == 0

    (stored,) = [read(path.parent, AllToAll) for path in tmp_path.rglob("alltoall.json")]
    rows = stored.report.rows
    assert {(row.method, row.kind) for row in rows} == {
        *((method, ROWS) for method in ("graphar", "graphar_sizes", "gloo")),
        *((method, HEADS) for method in ("graphar", "gloo")),
    }
    assert not any(row.wrong for row in rows)


def test_the_report_compares_graphar_with_the_best_peer():
    report = AllToAll(rows=[row("graphar", 6.0), row("nccl", 12.0), row("symm_mem", 3.0, wrong=4)])

    text = report.markdown(CPU, "python -m perf alltoall")

    assert report.ratios() == {"rows, 2 KB, 4 ranks": pytest.approx(0.5)}
    assert "| 2 KB | 6 | 12 | 3 **(4 WRONG)** | nccl | 0.50 |" in text
    assert "symm_mem at rows, 2 KB" in report.verdict()

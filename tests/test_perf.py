"""perf: its figures, its report, and that a wrong result cannot pass unseen."""

from __future__ import annotations

import json

import pytest
import torch

import graphar
from perf import __main__ as program
from perf import cubin, machine, report
from perf.cases import Case, algbw, busbw, format_nbytes, make_row, parse_nbytes, percentile
from perf.harness import measure
from perf.methods import Method, make_graphar
from perf.ranks import InProcessRanks
from perf.verify import differs, is_far

CASE = Case(world_size=3, form="list", mode="cpu", dtype="bfloat16", nbytes=2048)
MACHINE = {
    "gpu": "NVIDIA H200",
    "gpu_count": 4,
    "driver": "580.1",
    "cuda": "13.0",
    "torch": "2.11.0",
    "nccl": "2.28.9",
    "cpu": "a CPU",
    "cpu_count": 64,
    "commit": "0123456789ab",
    "date": "2026-01-31",
}


def row(method="graphar", time_us=10.0, wrong=0, nbytes=2048):
    case = Case(world_size=4, form="process", mode="graph", dtype="bfloat16", nbytes=nbytes)
    return make_row(case, method, "one_shot_push" if method == "graphar" else None, [time_us], wrong)


def test_bandwidths_are_those_of_nccl_tests():
    assert algbw(nbytes=10**9, time_us=1e6) == pytest.approx(1.0)
    assert busbw(100.0, world_size=2) == pytest.approx(100.0)
    assert busbw(100.0, world_size=4) == pytest.approx(150.0)


@pytest.mark.parametrize(("percent", "expected"), [(0, 1.0), (10, 1.4), (50, 3.0), (99, 4.96), (100, 5.0)])
def test_a_percentile_is_linear_between_its_neighbours(percent, expected):
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], percent) == pytest.approx(expected)


def test_a_single_value_is_each_of_its_percentiles():
    assert percentile([7.0], 99) == 7.0


@pytest.mark.parametrize(("text", "nbytes"), [("2048", 2048), ("64K", 65536), ("16m", 16 << 20), ("2G", 2 << 30)])
def test_sizes_are_binary(text, nbytes):
    assert parse_nbytes(text) == nbytes


def test_a_size_is_written_in_its_largest_whole_unit():
    assert [format_nbytes(nbytes) for nbytes in (100, 2048, 1 << 20, 2 << 30)] == ["100 B", "2 KB", "1 MB", "2 GB"]


def test_a_table_sets_graphar_beside_its_best_peer():
    rows = [row(time_us=10.0), row("nccl", 25.0), row("symm_one_shot", 20.0)]

    lines = report.size_table(rows).splitlines()

    assert lines[0] == (
        "| size | graphar (us) | nccl (us) | symm_one_shot (us) | busbw (GB/s) | best peer | ratio | algorithm |"
    )
    assert lines[2] == "| 2 KB | 10 | 25 | 20 | 0.3 | symm_one_shot | 2.00 | one_shot_push |"


def test_a_method_that_stops_earlier_leaves_its_cells_empty():
    rows = [row(), row("nccl"), row(nbytes=4096)]

    assert report.size_table(rows).splitlines()[3] == "| 4 KB | 10 | - | 0.6 | - | - | one_shot_push |"


def test_a_wrong_row_is_flagged_and_not_compared():
    text = report.markdown(MACHINE, [row(wrong=3), row("nccl")], [], "python -m perf")

    assert "**WRONG RESULTS: 1 of 2 rows (graphar).**" in text
    assert "| 2 KB | 10 **(3 WRONG)** | 10 | 0.3 | nccl | - | one_shot_push |" in text


def test_a_wrong_peer_wins_nothing():
    assert report.best_peer([row("nccl", 1.0, wrong=1), row("symm_one_shot", 20.0)]).method == "symm_one_shot"


def test_what_ran_where_is_read_off_the_rows():
    assert report.what_ran_where([row(), row(nbytes=8 << 20)]) == [
        "graphar: 2 KB to 8 MB on 4 ranks, in a CUDA graph, back to back, one process a rank."
    ]


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("NVIDIA H200", "h200x4"),
        ("NVIDIA A100-SXM4-80GB", "a100x4"),
        ("NVIDIA H100 80GB HBM3", "h100x4"),
        (None, "cpu"),
    ],
)
def test_a_machine_is_named_by_its_gpus(gpu, expected):
    assert machine.slug(MACHINE | {"gpu": gpu}) == expected


def test_one_differing_bit_counts_where_the_method_is_exact():
    zero = torch.zeros(2, dtype=torch.bfloat16)

    assert differs(torch.tensor([0.0, -0.0], dtype=torch.bfloat16), zero).tolist() == [False, True]


def test_the_tolerance_scales_with_the_inputs_and_admits_no_nan():
    parts = [torch.full((3,), 64.0, dtype=torch.bfloat16), torch.full((3,), -64.0, dtype=torch.bfloat16)]
    expected = torch.zeros(3, dtype=torch.bfloat16)
    output = torch.tensor([2.0, 2.125, torch.nan], dtype=torch.bfloat16)

    assert is_far(output, expected, parts).tolist() == [False, True, True]


def test_a_right_result_is_counted_right():
    rows, skipped = measure(CASE, [make_graphar()], InProcessRanks(CASE.world_size))

    assert [(row.method, row.algorithm, row.wrong) for row in rows] == [("graphar", "fallback", 0)]
    assert skipped == []


def test_a_wrong_result_is_counted_on_every_rank_that_has_it():
    def one_element_off_on_the_last_rank(xs):
        outputs = graphar.allreduce(xs)
        outputs[-1][7] += 1
        return outputs

    method = Method("broken", one_element_off_on_the_last_rank, exact=True)

    rows, _ = measure(CASE, [method], InProcessRanks(CASE.world_size))

    assert rows[0].wrong == 1


def test_a_method_that_writes_nothing_after_its_first_call_is_caught():
    outputs = []

    def stale(xs):
        if not outputs:
            outputs.extend(graphar.allreduce(xs))
        return outputs

    rows, _ = measure(CASE, [Method("stale", stale, exact=True)], InProcessRanks(CASE.world_size))

    assert rows[0].wrong == CASE.numel * CASE.world_size


def test_a_peer_that_refuses_is_named_with_its_reason():
    def refuse(xs):
        raise RuntimeError("needs a multiple of 16 bytes\nat somewhere")

    rows, skipped = measure(CASE, [Method("peer", refuse)], InProcessRanks(CASE.world_size))

    assert rows == []
    assert skipped == ["peer, 3 ranks, 2 KB, cpu: needs a multiple of 16 bytes"]


def test_a_cubin_tells_what_its_kernel_needs():
    core = pytest.importorskip("cuda.core")
    source = "__shared__ int s[75]; __global__ void k(int* p) { s[threadIdx.x] = *p; __syncthreads(); *p = s[0]; }"
    options = core.ProgramOptions(arch="sm_80")

    code = core.Program(source, "c++", options).compile("cubin", name_expressions=("k",))
    need = cubin.resources(bytes(code.code), code.symbol_mapping["k"].decode())

    assert (need.shared_nbytes, need.stack_nbytes) == (300, 0)
    assert 4 <= need.registers <= 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPUs where there are any")
def test_a_small_sweep_writes_a_right_report(tmp_path, capsys):
    status = program.main(["allreduce", "--world-size", "2", "--max-nbytes", "8K", "--out", str(tmp_path)])

    (path,) = tmp_path.glob("*-cpu/allreduce.json")
    content = json.loads(path.read_text())
    assert status == 0
    assert content["machine"].keys() == MACHINE.keys()
    assert [(row["method"], row["form"], row["nbytes"]) for row in content["rows"]] == [
        ("graphar", "process", 2048),
        ("gloo", "process", 2048),
        ("graphar", "process", 8192),
        ("gloo", "process", 8192),
        ("graphar", "list", 2048),
        ("graphar", "list", 8192),
    ]
    for entry in content["rows"]:
        assert entry.keys() == row().__dict__.keys()
        assert entry["time_us"].keys() == {"median", "p10", "p99"}
        assert entry["wrong"] == 0
    assert "none is wrong" in path.with_suffix(".md").read_text()
    assert "bfloat16" in capsys.readouterr().out


def test_the_command_to_reproduce_says_nothing_of_where_the_report_went():
    command = program.reproduce(["allreduce", "--out", "somewhere", "--world-size", "2"])
    assert command == "python -m perf allreduce --world-size 2"

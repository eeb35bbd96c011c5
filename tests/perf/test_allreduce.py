"""perf: its figures, what it plans to measure, and a small sweep."""

from __future__ import annotations

import json

import pytest

from graphar.plan.sizes import KB, MB, format_nbytes, parse_nbytes
from perf import __main__ as program
from perf import cubin, machine
from perf.cases import SIZES, BackendPlan, Plan
from perf.catalogue import CUDA_METHODS
from perf.rows import Row, algbw, busbw, percentile
from tests.perf.test_report import MACHINE, row


def plan(full=True, max_nbytes=SIZES[-1], device="cuda"):
    return Plan(device, 4, "process", ("bfloat16", "float16"), CUDA_METHODS, max_nbytes, full)


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


@pytest.mark.parametrize(
    ("mode", "largest", "count"), [("graph", SIZES[-1], 21), ("chain", 16 * MB, 12), ("eager", 16 * MB, 4)]
)
def test_each_mode_has_its_sizes(mode, largest, count):
    sizes = [case.nbytes for case in plan(full=False).cases() if case.mode == mode]

    assert (max(sizes), len(sizes)) == (largest, count)


def test_the_widest_world_also_has_the_sizes_of_tokens_and_the_other_dtypes():
    more = [case for case in plan().cases() if case not in set(plan(full=False).cases())]

    assert [(case.mode, case.dtype, case.nbytes) for case in more] == [
        ("graph", "bfloat16", 1536 * KB),
        ("graph", "bfloat16", 3 * MB),
        ("graph", "bfloat16", 3062 * 16 * KB),
        *(("graph", "float16", nbytes) for nbytes in (2 * KB, 64 * KB, MB, 16 * MB, 256 * MB)),
    ]


def test_only_the_plainest_methods_are_measured_in_other_dtypes():
    case = next(case for case in plan().cases() if case.dtype == "float16")

    assert [name for name in CUDA_METHODS if plan().takes_part(name, case)] == ["graphar", "nccl"]


def test_eager_calls_are_measured_where_they_are_made():
    case = next(case for case in plan().cases() if case.mode == "eager")

    assert not plan().takes_part("flashinfer_one_shot", case)
    assert plan().takes_part("vllm", case)


def test_a_plan_knows_how_many_rows_it_may_yield():
    small = plan(full=False, max_nbytes=2 * KB)

    assert small.row_count() == 2 * len(CUDA_METHODS) + 2 * sum(
        name.startswith(("graphar", "symm", "sglang")) or name in ("nccl", "vllm") for name in CUDA_METHODS
    )


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


def test_on_gpus_the_widest_world_alone_is_measured_in_full():
    options = program.parse(["allreduce", "--world-size", "2", "4"])

    assert [(one.world_size, one.dtypes, one.full) for one in program.plans(options, gpu_count=4)] == [
        (2, ("bfloat16", "float16", "float32"), False),
        (4, ("bfloat16", "float16", "float32"), True),
    ]


def test_an_algorithm_is_measured_where_it_is_asked_for():
    options = program.parse(["allreduce", "--world-size", "4", "--methods", "graphar", "graphar:one_shot"])

    (one,) = program.plans(options, gpu_count=4)

    assert one.methods == ("graphar", "graphar:one_shot")


def backends_of(gpu_count, *more):
    """Of the plans that are for the table of backends alone: device, ranks, methods, sizes in megabytes."""
    found = program.plans(program.parse(["allreduce", *more]), gpu_count)
    return [
        (one.device, one.world_size, one.methods, [case.nbytes // MB for case in one.cases()])
        for one in found
        if isinstance(one, BackendPlan)
    ]


def test_backends_are_measured_on_two_four_and_six_ranks_as_far_as_there_are_so_many():
    plain, all_sizes = ("graphar", "nccl"), [1, 10, 100, 1024]

    assert backends_of(4) == [
        ("cuda", 2, plain, all_sizes),
        ("cpu", 2, ("gloo",), all_sizes[:3]),
        ("cpu", 4, ("gloo",), all_sizes[:3]),  # the four GPUs have been swept
    ]
    assert backends_of(0) == [("cpu", 6, ("graphar", "gloo"), all_sizes[:2])]
    assert ("cpu", 4, ("gloo",), all_sizes) in backends_of(4, "--max-nbytes", "1G")
    assert backends_of(4, "--world-size", "4") == []
    assert backends_of(4, "--methods", "vllm") == []


def test_a_swept_world_has_the_sizes_of_backends_for_plain_methods_alone():
    case = next(case for case in plan(full=False).cases() if case.nbytes == 100 * MB)

    assert [name for name in CUDA_METHODS if plan().takes_part(name, case)] == ["graphar", "nccl"]


def test_a_method_for_gpus_needs_gpus():
    with pytest.raises(SystemExit, match="vllm: not on this machine, which has graphar, gloo"):
        program.plans(program.parse(["allreduce", "--methods", "vllm"]), gpu_count=0)


def test_a_cubin_tells_what_its_kernel_needs():
    core = pytest.importorskip("cuda.core")
    source = "__shared__ int s[75]; __global__ void k(int* p) { s[threadIdx.x] = *p; __syncthreads(); *p = s[0]; }"
    options = core.ProgramOptions(arch="sm_80")

    code = core.Program(source, "c++", options).compile("cubin", name_expressions=("k",))
    need = cubin.resources(bytes(code.code), code.symbol_mapping["k"].decode())

    assert (need.shared_nbytes, need.stack_nbytes) == (300, 0)
    assert 4 <= need.registers <= 64


@pytest.mark.usefixtures("no_gpus")
def test_a_small_sweep_writes_a_right_report(tmp_path, capsys):
    arguments = ["--world-size", "2", "--max-nbytes", "8K", "--dtypes", "bfloat16", "float32"]

    status = program.main(["allreduce", *arguments, "--out", str(tmp_path)])

    (path,) = tmp_path.glob("*-cpu/allreduce.json")
    content = json.loads(path.read_text())
    assert status == 0
    assert content["machine"].keys() == MACHINE.keys()
    assert [(row["method"], row["form"], row["dtype"], row["nbytes"]) for row in content["rows"]] == [
        ("graphar", "process", "bfloat16", 2048),
        ("gloo", "process", "bfloat16", 2048),
        ("graphar", "process", "bfloat16", 8192),
        ("gloo", "process", "bfloat16", 8192),
        ("graphar", "process", "float32", 2048),
        ("gloo", "process", "float32", 2048),
        ("graphar", "list", "bfloat16", 2048),
        ("graphar", "list", "bfloat16", 8192),
        ("graphar", "list", "float32", 2048),
    ]
    for entry in content["rows"]:
        assert entry.keys() == set(Row.__dataclass_fields__)
        assert entry["time_us"].keys() == {"median", "p10", "p99"}
        assert entry["wrong"] == 0
    assert "none is wrong" in path.with_suffix(".md").read_text()
    assert "bfloat16" in capsys.readouterr().out


@pytest.mark.gpu
def test_a_small_sweep_of_two_gpus_is_right_in_every_mode(tmp_path):
    own = ["graphar", "graphar_symmetric", "graphar:two_shot_push"]
    methods = [*own, "nccl", "nccl_window", "symm_one_shot", "symm_two_shot"]

    program.main(
        ["allreduce", "--world-size", "2", "--max-nbytes", "2K", "--out", str(tmp_path), "--methods", *methods]
    )

    (path,) = tmp_path.glob("*/allreduce.json")
    rows = json.loads(path.read_text())["rows"]
    assert {row["method"] for row in rows} == set(methods)
    assert {row["mode"] for row in rows} == {"graph", "chain", "eager", "host"}
    assert [row for row in rows if row["wrong"]] == []


def test_the_command_to_reproduce_says_nothing_of_where_the_report_went():
    command = program.reproduce(["allreduce", "--out", "somewhere", "--world-size", "2"])
    assert command == "python -m perf allreduce --world-size 2"


def test_a_run_that_is_ended_leaves_a_report_that_says_so(tmp_path, monkeypatch, capsys):
    def ended_after_a_row(_):
        yield row()
        raise KeyboardInterrupt

    monkeypatch.setattr(program.sweep, "run", ended_after_a_row)
    with pytest.raises(KeyboardInterrupt):
        program.run_allreduce([plan()], tmp_path, MACHINE, "python -m perf")

    text = (tmp_path / "allreduce.md").read_text()
    assert "the run was ended before it was done" in text
    assert "All 1 results were verified: none is wrong." in text

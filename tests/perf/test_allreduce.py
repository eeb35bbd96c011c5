"""perf: its figures, what it plans to measure, and a small sweep."""

from __future__ import annotations

import dataclasses
import json

import pytest

from graphar.plan.sizes import KB, MB, format_nbytes, parse_nbytes
from perf import __main__ as program
from perf import cubin, machine
from perf.harness.cases import HOST_MODES, SIZES, VARIANTS, Case, Plan, Row, SizesPlan, make_row
from perf.peers.catalogue import CUDA_METHODS
from perf.topics.allreduce import AllReduce, families, size_table
from tests.perf.samples import MACHINE, NVLINK, row


def plan(full=True, max_nbytes=SIZES[-1], device="cuda"):
    return Plan(device, 4, "process", ("bfloat16", "float16"), CUDA_METHODS, max_nbytes, full)


def test_bandwidths_are_those_of_nccl_tests():
    two, four = (make_row(Case(n, "process", "graph", "bfloat16", 10**9), "graphar", [1e4], 0) for n in (2, 4))
    assert (two.algbw, two.busbw) == (pytest.approx(100.0), pytest.approx(100.0))
    assert (four.algbw, four.busbw) == (pytest.approx(100.0), pytest.approx(150.0))


SPELT = [("2KB", 2048), ("3MiB", 3 << 20), ("1.5 MB", 3 << 19), ("2 kb", 2048), ("2kib", 2048), ("7B", 7), ("7 B", 7)]


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2048", 2048), ("64K", 65536), ("16m", 16 << 20), ("2G", 2 << 30), ("1.5M", 3 << 19), ("0.125K", 128), *SPELT],
)
def test_sizes_are_binary(text, nbytes):
    assert parse_nbytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "M", "large", "-5", "-1.5M", "1.5", "0.0001K", "1e3", "1_000", "1/2K", "infG", "KB", "2KBB", "2iB", "2  KB"],
)
def test_what_is_no_whole_number_of_bytes_is_no_size(text):
    with pytest.raises(ValueError, match="is no"):
        parse_nbytes(text)


def test_a_size_is_written_in_its_largest_unit():
    sizes = 0, 100, 2048, 4000, 3 << 19, 2 << 30
    assert [*map(format_nbytes, sizes)] == ["0 B", "100 B", "2 KB", "3.9 KB", "1.5 MB", "2 GB"]


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


def test_sizes_and_shapes_that_are_named_are_measured_alone():
    asked = program.parse(
        ["allreduce", "--world-size", "2", "4", "--shapes", "96x8192", "--sizes", "64M", "--dtypes", "float32"]
    )

    for gpus, mode, methods in ((4, "graph", CUDA_METHODS), (0, "cpu", ("graphar", "gloo"))):
        plans = AllReduce.plan(asked, gpu_count=gpus)
        assert [plan.world_size for plan in plans] == [2, 4]
        cases = [(case.mode, case.form, case.dtype, case.nbytes) for plan in plans for case in plan.cases()]
        assert cases == [(mode, "process", "float32", 3 * MB), (mode, "process", "float32", 64 * MB)] * 2
        taken = {
            name for plan in plans for case in plan.cases() for name in plan.methods if plan.takes_part(name, case)
        }
        assert taken == {*methods} - {"graphar_out"}

    with pytest.raises(SystemExit):
        program.parse(["allreduce", "--shapes", "96"])


def test_a_plan_knows_how_many_rows_it_may_yield():
    small = plan(full=False, max_nbytes=2 * KB)

    of_any_data = [name for name in CUDA_METHODS if name != "graphar_any_bits"]
    eager = sum(name.startswith(("graphar", "symm", "sglang", "vllm")) or name == "nccl" for name in of_any_data) - 1
    assert small.row_count() == 2 * (len(CUDA_METHODS) - 1) + eager + 2 * (eager + 1)  # graphar_out: host times alone


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

    assert [(plan.world_size, plan.dtypes, plan.full) for plan in AllReduce.plan(options, gpu_count=4)] == [
        (2, ("bfloat16", "float16", "float32"), False),
        (4, ("bfloat16", "float16", "float32"), True),
    ]


def test_an_algorithm_is_measured_where_it_is_asked_for():
    options = program.parse(["allreduce", "--world-size", "4", "--methods", "graphar", "graphar:one_shot"])

    (plan,) = AllReduce.plan(options, gpu_count=4)

    assert plan.methods == ("graphar", "graphar:one_shot")


def test_variants_of_auto_are_measured_in_graphs_at_the_sizes_for_which_tables_are_made_of_them():
    (plan, *_) = AllReduce.plan(program.parse(["allreduce", "--world-size", "4"]), gpu_count=4)

    measured = {
        name: [case.nbytes for case in plan.cases() if plan.takes_part(name, case) and case.mode == "graph"]
        for name in VARIANTS
    }
    assert plan.variants == VARIANTS
    assert set().union(*measured.values()) == set(SIZES)
    assert {name.removeprefix("graphar:"): min(sizes) for name, sizes in measured.items()} == {
        "one_shot_push": 2 * KB,
        "one_shot": 2 * KB,
        "two_shot_push": 64 * KB,
        "two_shot_pipelined": 16 * MB,
        "two_shot_tma": 4 * MB,
    }
    assert not any(plan.takes_part(name, case) for name in VARIANTS for case in plan.cases() if case.mode != "graph")
    asked = program.parse(["allreduce", "--world-size", "4", "--methods", "graphar"])
    assert AllReduce.plan(asked, gpu_count=4)[0].variants == ()


def backends_of(gpu_count, *more):
    """The device, ranks, methods and sizes in megabytes of each plan of torch's backends."""
    plans = AllReduce.plan(program.parse(["allreduce", *more]), gpu_count)
    return [
        (plan.device, plan.world_size, plan.methods, [case.nbytes // MB for case in plan.cases()])
        for plan in plans
        if isinstance(plan, SizesPlan)
    ]


def test_backends_are_measured_on_two_four_and_six_ranks_if_there_are_enough():
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


def test_a_cubin_tells_what_its_kernel_needs():
    core = pytest.importorskip("cuda.core")
    source = "__shared__ int s[75]; __global__ void k(int* p) { s[threadIdx.x] = *p; __syncthreads(); *p = s[0]; }"
    options = core.ProgramOptions(arch="sm_80")

    code = core.Program(source, "c++", options).compile("cubin", name_expressions=("k",))
    need = cubin.resources(bytes(code.code), code.symbol_mapping["k"].decode())

    assert (need.shared_nbytes, need.stack_nbytes) == (300, 0)
    assert 4 <= need.registers <= 64


@pytest.mark.usefixtures("forked_ranks")
def test_a_small_sweep_writes_a_right_report(tmp_path, capsys):
    arguments = ["--world-size", "2", "--max-nbytes", "8K", "--dtypes", "bfloat16", "float32"]

    status = program.main(["allreduce", *arguments, "--out", str(tmp_path)])

    path = tmp_path / "cpu" / "allreduce.json"
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


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nccl", None),
        ("graphar:two_shot_push", None),
        ("graphar:two_shot_push@100", None),
        ("graphar:two_shot_tma@100", "blocks must be from 1 to"),
        ("graphar:two_shot_push@0", "blocks must be from 1 to 256"),
        ("graphar:two_shot_push@", "blocks must be from 1 to 256"),
        ("graphar:three_shot@8", "is no method: choose from graphar, graphar_out, graphar_symmetric, "),
        ("nccl@8", "is no method"),
    ],
)
def test_a_method_is_a_name_or_an_algorithm_with_any_number_of_blocks(name, problem, capsys):
    if problem is None:
        (first, *_) = AllReduce.plan(program.parse(["allreduce", "--methods", name]), gpu_count=4)
        assert first.methods == (name,)
        return
    with pytest.raises(SystemExit):
        program.parse(["allreduce", "--methods", name])
    assert problem in " ".join(capsys.readouterr().err.split())


@pytest.mark.gpu
def test_a_small_sweep_of_two_gpus_is_right_in_every_mode(tmp_path):
    graphars = ["graphar", "graphar_out", "graphar_symmetric", "graphar:two_shot_push"]
    methods = [*graphars, "nccl", "nccl_window", "symm_one_shot", "symm_two_shot"]

    program.main(
        ["allreduce", "--world-size", "2", "--max-nbytes", "2K", "--out", str(tmp_path), "--methods", *methods]
    )

    (path,) = tmp_path.glob("*/allreduce.json")
    rows = json.loads(path.read_text())["rows"]
    assert {row["method"] for row in rows} == set(methods)
    assert {row["mode"] for row in rows} == {"graph", "chain", "eager", *HOST_MODES}
    assert [row for row in rows if row["wrong"]] == []


def sections(rows, **more):
    """The bodies of a report's sections, by title."""
    return {section.title: "\n".join(section.body) for section in AllReduce(rows=rows, **more).sections()}


def lines(text):
    """The lines of the only table, without the rule below its header."""
    header, _, *rest = [line for line in text.splitlines() if line.startswith("|")]
    return [header, *rest]


def at(world_size, case_row):
    return dataclasses.replace(case_row, world_size=world_size)


def test_a_table_sets_graphar_beside_its_best_peer():
    rows = [row(time_us=10.0), row("nccl", 25.0), row("symm_one_shot", 20.0)]

    assert lines(size_table(rows, link_ceiling=3.0)) == [
        "| size | graphar (us) | algbw (GB/s) | busbw (GB/s) | best peer | best peer (us) | of_best_peer | of_link "
        "| algorithm |",
        "| 2 KB | 10 | 0.2 | 0.31 | symm_one_shot | 20 | 0.50 | 0.10 | one_shot_push |",
    ]


def test_arbitrary_bits_have_a_column_of_their_own_where_they_were_measured():
    measured = [row(time_us=10.0), row("graphar_any_bits", 12.0), row("nccl", 20.0), row(nbytes=1 << 28)]

    head, small, large = lines(size_table(measured))

    assert head.endswith("| algorithm | any bits (us) |")
    assert small.endswith("| 12 |")
    assert large.endswith("| - |")
    assert "any bits" not in size_table(measured[::2])


def test_every_method_has_a_column_of_microseconds_and_what_it_does_not_serve_is_a_dash():
    rows = [row(), row("nccl", 25.0), row(time_us=2000.0, nbytes=8192), row("nccl", 1000.0, nbytes=8192)]
    (text,) = [text for title, text in sections([*rows, row("vllm", 5.0)]).items() if "CUDA graphs" in title]

    assert text.splitlines()[-4:] == [
        "| size | graphar (us) | nccl (us) | vllm (us) |",
        "| --- | ---: | ---: | ---: |",
        "| 2 KB | 10 | 25 | 5 |",
        "| 8 KB | 2000 | 1000 | - |",
    ]


def test_backends_stand_beside_each_other_by_ranks():
    rows = [row(nbytes=MB), row("nccl", 20.0, nbytes=MB), row(nbytes=10 * MB), row("nccl", 30.0, nbytes=10 * MB)]
    rows += [at(2, row(nbytes=10 * MB, time_us=5.0)), at(2, row("nccl", 15.0, nbytes=10 * MB, wrong=1))]
    rows += [row("gloo", 4e4, nbytes=10 * MB, mode="cpu"), row("vllm", nbytes=MB)]

    assert lines(sections(rows)["gloo, nccl, graphar by number of ranks, 1 MB to 10 MB"]) == [
        "| size | 2 ranks: nccl (us) | 2 ranks: graphar (us) | 4 ranks: gloo (us) | 4 ranks: nccl (us) "
        "| 4 ranks: graphar (us) |",
        "| 1 MB | - | - | - | 20 | 10 |",
        "| 10 MB | 15 **(1 WRONG)** | 5 | 40000 | 30 | 10 |",
    ]


def test_a_world_of_backends_alone_has_no_other_table_and_is_no_answer():
    rows = [row(), row("nccl", 20.0), at(6, row(nbytes=MB)), at(6, row("nccl", 5.0, nbytes=10 * MB))]

    titles = list(sections(rows))

    assert "nccl, graphar by number of ranks, 1 MB to 10 MB" in titles
    assert not [title for title in titles if title.startswith("6 ranks")]
    assert len(AllReduce(rows=rows).findings()) == 1


def test_tokens_are_compared_at_their_own_sizes():
    rows = [row(nbytes=3 * MB), row("nccl", 30.0, nbytes=3 * MB), row("vllm", 8.0, nbytes=3 * MB), row()]

    by_title = sections(rows)

    (text,) = [text for title, text in by_title.items() if "by number of tokens" in title]
    assert lines(text) == [
        "| tokens | graphar (us) | nccl (us) | vllm (us) | best peer | of_best_peer |",
        "| 192 | 10 | 30 | 8 | vllm | 1.25 |",
    ]
    assert "| 3 MB |" not in "".join(by_title.values())


def test_other_dtypes_are_set_beside_the_first_and_have_no_other_table():
    rows = [row(), row("nccl", 20.0), row(dtype="float32", time_us=12.0, wrong=1), row("nccl", 19.0, dtype="float32")]
    by_title = sections([*rows, row(nbytes=8192)])

    assert lines(by_title["4 ranks, by dtype, in CUDA graphs"]) == [
        "| size | graphar bfloat16 (us) | graphar float32 (us) | nccl bfloat16 (us) | nccl float32 (us) |",
        "| 2 KB | 10 | 12 **(1 WRONG)** | 20 | 19 |",
    ]
    assert len([title for title in by_title if "in CUDA graphs" in title]) == 2


def test_a_wrong_row_is_flagged_and_not_compared():
    report = AllReduce(rows=[row(wrong=3), row("nccl")])

    assert report.verdict() == "**WRONG RESULTS: 1 of 2 (graphar at bfloat16, graph, process, 2 KB).**"
    text = report.markdown(MACHINE, "python -m perf")
    assert "| 2 KB | 10 **(3 WRONG)** | 0.2 | 0.31 | nccl | 10 | - | - | one_shot_push |" in text


@pytest.mark.parametrize(
    "other",
    [
        row("nccl", 1.0, wrong=1),
        row("flashinfer_fp8", 1.0, quantised=True),
        row("graphar_symmetric", 1.0),
        row("graphar:one_shot", 1.0),
    ],
    ids=["wrong", "quantised", "symmetric", "an algorithm"],
)
def test_a_wrong_a_quantised_or_an_own_method_is_no_best_peer(other):
    assert "| symm_one_shot | 20 | 0.50 |" in size_table([row(), other, row("symm_one_shot", 20.0)])


def test_the_findings_say_how_graphar_compares_and_where_it_is_slower():
    rows = [row(), row("nccl", 20.0), row(nbytes=8192, time_us=16.0), row("nccl", 8.0, nbytes=8192)]

    assert AllReduce(rows=rows).findings() == [
        "4 ranks, bfloat16, in CUDA graphs (one process per rank): graphar's time / the best peer's time is 0.50 to "
        "2.00, geometric mean 1.00. Above 1.03: 8 KB (2.00)."
    ]


def test_what_the_links_carried_is_listed_where_it_was_counted():
    rows = [row(nbytes=16 * MB, nvlink=NVLINK), row("nccl", nbytes=16 * MB)]

    text = sections(rows)["NVLink traffic, 4 ranks"]

    assert "| 16 MB | graphar | 0.722 | 0.000 | 0.638 | 0.770 |" in text  # 1000 / 1386, 60 / 94, 1386 / 1800
    assert "| 16 MB | nccl |" not in text
    assert not [title for title in sections([row()]) if "NVLink" in title]


def test_a_line_of_a_plot_is_a_family_of_peers_by_its_fastest_right_method():
    rows = [row(), row("nccl", 30.0), row("nccl_window", 20.0), row("sglang_one_shot_push", 1.0, wrong=1)]
    rows += [
        row("sglang_two_shot_push", 9.0),
        row("flashinfer_fp8", 1.0, quantised=True),
        row("graphar_symmetric", 5.0),
    ]

    drawn = families(rows)

    assert {name: [row.method for row in mine] for name, mine in drawn.items()} == {
        "graphar": ["graphar"],
        "NCCL": ["nccl_window"],
        "SGLang": ["sglang_two_shot_push"],
    }


def test_nothing_measured_is_said():
    assert "Nothing was measured." in AllReduce().markdown(MACHINE, "python -m perf")
    assert AllReduce().glance().words == "nothing was measured"

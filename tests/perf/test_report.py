"""perf's report: what its tables say of the rows they are made from."""

from __future__ import annotations

import dataclasses
import json

from graphar.plan.sizes import MB
from perf import compare, report, tables
from perf.cases import Case
from perf.report import Findings
from perf.rows import make_row

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


def row(method="graphar", time_us=10.0, wrong=0, nbytes=2048, mode="graph", dtype="bfloat16", **more):
    case = Case(world_size=4, form="process", mode=mode, dtype=dtype, nbytes=nbytes)
    algorithm = "one_shot_push" if method == "graphar" else None
    return make_row(case, method, [time_us], wrong, algorithm=algorithm, **more)


def text_of(rows, **more):
    return report.markdown(MACHINE, Findings(rows, **more), "python -m perf")


def test_a_table_sets_graphar_beside_its_best_peer():
    rows = [row(time_us=10.0), row("nccl", 25.0), row("symm_one_shot", 20.0)]

    lines = tables.size_table(rows, link_ceiling=3.0).splitlines()

    assert lines[0] == (
        "| size | graphar (us) | algbw (GB/s) | busbw (GB/s) | best peer | best peer (us) | of_best_peer | of_link "
        "| algorithm |"
    )
    assert lines[2] == "| 2 KB | 10 | 0.2 | 0.3 | symm_one_shot | 20 | 0.50 | 0.10 | one_shot_push |"


def test_an_unknown_link_ceiling_leaves_its_column_empty():
    assert "| 0.50 | - | one_shot_push |" in tables.size_table([row(time_us=10.0), row("nccl", 20.0)])


def test_every_method_is_set_beside_nccl_and_a_size_it_does_not_serve_is_minus_one():
    rows = [row(), row("nccl", 25.0), row(time_us=2000.0, nbytes=8192), row("nccl", 1000.0, nbytes=8192)]
    rows += [row("vllm", 5.0)]

    assert tables.method_table(rows).splitlines()[2:] == [
        "| 2 KB | 0.01 (2.50x) | 0.025 (1.00x) | 0.005 (5.00x) |",
        "| 8 KB | 2 (0.50x) | 1 (1.00x) | -1 |",
    ]


def test_without_nccl_there_is_no_speed_up():
    assert tables.method_table([row(), row("vllm", 5.0)]).splitlines()[2] == "| 2 KB | 0.01 | 0.005 |"


def at(world_size, one):
    return dataclasses.replace(one, world_size=world_size)


def test_backends_stand_beside_each_other_by_ranks():
    rows = [row(nbytes=MB), row("nccl", 20.0, nbytes=MB), row(nbytes=10 * MB), row("nccl", 30.0, nbytes=10 * MB)]
    rows += [at(2, row(nbytes=10 * MB, time_us=5.0)), at(2, row("nccl", 15.0, nbytes=10 * MB, wrong=1))]
    rows += [row("gloo", 4e4, nbytes=10 * MB, mode="cpu"), row("vllm", nbytes=MB)]

    assert tables.backend_table(report.backend_rows(rows)).splitlines() == [
        "| size | 2 ranks: nccl | 2 ranks: graphar | 4 ranks: gloo | 4 ranks: nccl | 4 ranks: graphar |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| 1 MB | -1 | -1 | -1 | 0.02 | 0.01 (2.00x) |",
        "| 10 MB | 0.015 **(1 WRONG)** | 0.005 | 40 | 0.03 | 0.01 (3.00x) |",
    ]


def test_a_world_of_backends_alone_has_no_other_table_and_is_no_answer():
    rows = [row(), row("nccl", 20.0), at(6, row(nbytes=MB)), at(6, row("nccl", 5.0, nbytes=10 * MB))]

    text = text_of(rows)

    assert "## nccl, graphar: 1 MB to 10 MB, by ranks" in text
    assert "## 6 ranks" not in text
    assert len(compare.comparisons(rows)) == 1


def test_without_their_sizes_backends_have_no_table():
    assert "by ranks" not in text_of([row(nbytes=MB), row("nccl", nbytes=MB)])


def test_tokens_are_compared_at_their_own_sizes_and_the_best_method_is_named():
    rows = [row(nbytes=3 * MB), row("nccl", 30.0, nbytes=3 * MB), row("vllm", 8.0, nbytes=3 * MB), row()]

    found = report.token_rows(rows)

    assert tables.token_table(found).splitlines() == [
        "| tokens | graphar (us) | nccl (us) | vllm (us) | best method | over nccl |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
        "| 192 | 10 | 30 | 8 | vllm | 3.75x |",
    ]


def test_a_size_of_tokens_alone_stays_out_of_the_other_tables():
    text = text_of([row(), row(nbytes=3 * MB)])

    assert "| 2 KB |" in text
    assert "| 192 | 10 | - | - |" not in text
    assert "| 3 MB |" not in text


def test_no_tokens_no_table_of_them():
    assert "hidden size" not in text_of([row(nbytes=1 * MB)])


def test_other_dtypes_are_set_beside_the_first():
    rows = [row(), row("nccl", 20.0), row(dtype="float32", time_us=12.0), row("nccl", 19.0, dtype="float32")]
    rows += [row(nbytes=8192)]

    assert tables.dtype_table(report.dtype_rows(rows)).splitlines() == [
        "| size | graphar bfloat16 | graphar float32 | nccl bfloat16 | nccl float32 |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| 2 KB | 10 | 12 (1.20) | 20 | 19 (0.95) |",
    ]


def test_other_dtypes_have_no_other_table():
    assert "float32, in a CUDA graph" not in text_of([row(), row(dtype="float32")])


def test_a_wrong_row_is_flagged_and_not_compared():
    text = text_of([row(wrong=3), row("nccl")])

    assert "**WRONG RESULTS: 1 of 2 rows (graphar).**" in text
    assert "| 2 KB | 10 **(3 WRONG)** | 0.2 | 0.3 | nccl | 10 | - | - | one_shot_push |" in text
    assert "| 2 KB | 0.01 (1.00x) **(3 WRONG)** | 0.01 (1.00x) |" in text


def test_a_wrong_row_of_another_dtype_is_flagged():
    assert "| 2 KB | 10 | 12 **(1 WRONG)** (1.20) |" in text_of([row(), row(dtype="float16", time_us=12.0, wrong=1)])


def test_a_wrong_peer_wins_nothing():
    assert compare.best_peer([row("nccl", 1.0, wrong=1), row("symm_one_shot", 20.0)]).method == "symm_one_shot"


def test_a_quantised_peer_wins_nothing():
    assert compare.best_peer([row("flashinfer_fp8", 1.0, quantised=True), row("nccl", 20.0)]).method == "nccl"


def test_graphar_called_otherwise_is_no_peer():
    rows = [row("graphar_symmetric", 1.0), row("graphar:one_shot", 2.0), row("nccl", 20.0)]

    assert compare.best_peer(rows).method == "nccl"


def test_the_verdict_says_how_graphar_compares_and_where_it_is_slower():
    rows = [row(), row("nccl", 20.0), row(nbytes=8192, time_us=16.0), row("nccl", 8.0, nbytes=8192)]

    assert compare.comparisons(rows) == [
        "4 ranks, bfloat16, in a CUDA graph, back to back (one process a rank): of_best_peer 0.50 to 2.00, "
        "geometric mean 1.00. Above 1.03: 8 KB (2.000)."
    ]


def test_what_the_links_carried_is_listed_where_it_was_counted():
    used = {"payload_efficiency": 1.0, "protocol_overhead": 0.0625, "link_balance": 0.99, "raw_share": None}

    text = text_of([row(nbytes=16 * MB, nvlink=used), row("nccl", nbytes=16 * MB)])

    assert "| 4 | 16 MB | graphar | 1.000 | 0.062 | 0.990 | - |" in text
    assert "| 4 | 16 MB | nccl |" not in text


def test_uncounted_links_have_no_table():
    assert "NVLink carried" not in text_of([row()])


def test_what_ran_where_is_read_off_the_rows():
    rows = [row(), row(nbytes=8 * MB), row(mode="host")]

    assert report.what_ran_where(rows) == ["graphar: on 4 ranks, one process a rank: graph 2 KB to 8 MB, host 2 KB."]


def test_what_was_not_measured_is_listed():
    text = text_of([row()], skipped=["vllm, 4 ranks: no such package"])

    assert "Not measured:\n\n- vllm, 4 ranks: no such package" in text


def test_the_report_for_machines_holds_every_row_and_the_link_ceiling(tmp_path):
    found = Findings([row(), row("nccl")], link_ceiling={4: 355.0})

    path = report.write(tmp_path, MACHINE, found, "python -m perf")

    content = json.loads(path.with_suffix(".json").read_text())
    assert content["rows"] == [dataclasses.asdict(one) for one in found.rows]
    assert content["link_ceiling"] == {"4": 355.0}


def test_nothing_measured_is_said():
    assert "Nothing was measured." in text_of([])

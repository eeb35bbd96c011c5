"""perf fused: what it measures, what it takes for wrong, and the report."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch

import graphar
from graphar.plan.tiles import MatmulTile
from graphar.product import timelines
from graphar.runtime.compiler import source_directory
from perf import __main__ as program
from perf import fusion, timeline
from perf.fusion import Trial
from perf.harness.ranks import InProcessRanks, ProcessRanks
from perf.peers.matmuls import (
    CPU_METHODS,
    CUDA_METHODS,
    MIN_ROWS,
    TP_INVARIANT,
    FusedPlan,
    Layer,
    Variant,
    make_variants,
    own_product,
)
from perf.timeline import Event, Lane, Mean
from perf.topics import fused
from perf.topics.fused import Fused, FusedRow, count_wrong
from tests.perf.samples import TIMELINE as A_TIMELINE
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
    assert [(one.m, one.n, one.k) for one in layers] == sizes


def test_parts_of_k_are_whole_lines_on_any_number_of_ranks():
    assert [one.k for one in FusedPlan("cuda", 3, (1,), 8192, (8192, 28672), ()).layers()] == [2688, 9536]


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
    found = Fused(ROWS)

    assert found.verdict() == (
        "10 results were verified: none of graphar's is wrong."
        " **WRONG RESULTS OF PEERS: 1 of 10 (symm_fused at 4096 x 8192 x 2048).**"
    )
    own = [replace(one, wrong=int(one.method == "graphar")) for one in ROWS]
    assert Fused(own).verdict().startswith("**WRONG RESULTS: ")
    assert "| 410 **(1 WRONG)** |" in comparison(ROWS).body[-1]
    assert found.glance().headline == "0.96"


@pytest.mark.parametrize("name", ["matmul", "allreduce"])
def test_beside_a_floor_that_is_wrong_nothing_is_said_to_hide(name):
    rows = [replace(one, wrong=int(one.method == name)) for one in ROWS]

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
    found = Fused([*ROWS, row(TP_INVARIANT, 600.0)])

    assert "| 4096 | 600 | 1.20 | 1.11 |" in found.sections()[0].body[-3]
    assert found.findings()[1:] == [
        "`tp_invariant` / auto over 1 case: geometric mean 1.200, at worst 1.20 (M = 4096, K = 2048, 4 ranks).",
        "`tp_invariant` / torch over 1 case: geometric mean 1.111, at worst 1.11 (M = 4096, K = 2048, 4 ranks).",
    ]
    assert len(Fused(ROWS).findings()) == 1


def test_where_no_method_serves_a_layer_there_is_no_row(group_of):
    group_of(2)

    assert list(fusion.measure(A_LAYER, [], ProcessRanks(torch.device("cpu"), None), FusedRow, count_wrong)) == []


@pytest.mark.usefixtures("forked_ranks")
def test_the_report_of_a_machine_without_gpus(tmp_path):
    assert program.main(["fused", "--rows", "4", str(MIN_ROWS), "--columns", "64", "--out", str(tmp_path)]) == 0

    folder = tmp_path / "cpu"
    found = json.loads((folder / "fused.json").read_text())
    assert {one["method"] for one in found["rows"]} == set(CPU_METHODS)
    assert found["skipped"] == []
    text = (folder / "fused.md").read_text()
    assert f"All {len(found['rows'])} results were verified: none is wrong." in text
    assert "## 2 ranks, N = 64, K = 128" in text


CLOCK_NS = 1_700_000_000_000_000_000  # a double cannot hold such times to the nanosecond


def recording(events, blocks=1):
    """A recording as the kernel writes it. Events: (block, track, begin_ns, duration_ns, phase)."""
    recorded = timelines.empty(blocks, torch.device("cpu"))
    for block, track, begin, duration, phase in events:
        at = int((recorded[block, track, :, 1] != 0).sum())
        word = duration | 1 + timelines.PHASES.index(phase) << 32
        recorded[block, track, at] = torch.tensor([CLOCK_NS + begin, word])
    return recorded


def test_a_recording_becomes_lanes_of_microseconds_from_the_first_product_on():
    events = [(0, 0, 500, 2000, "multiplying"), (0, 0, 2500, 32, "staging"), (0, 2, 600, 1900, "waiting")]
    events += [(0, 2, 2500, 1000, "sending"), (0, 2, 3500, 4000, "gathering")]

    total_us, _, lanes = timeline.decode(recording(events), consumers=2)

    assert total_us == 7.0
    assert lanes[0] == Lane(0, "consumer 0", [Event(0.0, 2.0, "multiplying"), Event(2.0, 0.032, "staging")])
    sent = [Event(0.1, 1.9, "waiting"), Event(2.0, 1.0, "sending"), Event(3.0, 4.0, "gathering")]
    assert lanes[2] == Lane(0, "sender 0", sent)


def test_what_was_before_the_first_product_is_cut():
    events = [(0, 5, -9000, 4000, "waiting"), (0, 4, -100, 300, "waiting"), (0, 0, 0, 5000, "multiplying")]

    total_us, _, lanes = timeline.decode(recording(events), consumers=2)

    assert total_us == 5.0
    assert {lane.warp: lane.events for lane in lanes if lane.events} == {
        "consumer 0": [Event(0.0, 5.0, "multiplying")],
        "loader 0": [Event(0.0, 0.2, "waiting")],
    }


def test_means_are_over_all_warps_of_a_kind_and_over_blocks_that_ran():
    events = [(block, 0, 0, 1000 * (1 + block), "multiplying") for block in (0, 1)]
    events += [(1, 1, 0, 3000, "multiplying"), (0, 5, 0, 400, "waiting"), (0, 5, 400, 100, "gathering")]
    events += [(0, 5, 500, 400, "waiting")]

    _, means, lanes = timeline.decode(recording(events, blocks=3), consumers=2)

    assert means == [
        Mean("consumer", "multiplying", 1.5),
        Mean("gatherer", "waiting", 0.4),
        Mean("gatherer", "gathering", 0.05),
    ]
    assert {lane.block for lane in lanes} == {0, 1}


def test_of_many_blocks_some_are_kept_evenly_spread():
    recorded = recording([(block, 0, 0, 1000, "multiplying") for block in range(132)], blocks=132)

    _, _, lanes = timeline.decode(recorded, consumers=1)

    assert sorted({lane.block for lane in lanes}) == [0, 16, 33, 49, 66, 82, 99, 115]


@pytest.mark.parametrize(
    ("consumers", "warps"),
    [
        (1, {0: "consumer 0", 2: "sender 0", 3: "loader 0", 4: "gatherer 0", 5: "gatherer 1"}),
        (2, dict(enumerate(["consumer 0", "consumer 1", "sender 0", "sender 1", "loader 0", "gatherer 0"]))),
    ],
)
def test_tracks_have_the_names_of_the_warps_that_write_them(consumers, warps):
    assert timeline.warps_of_tracks(consumers) == warps


def test_what_is_decoded_is_what_the_kernel_writes():
    text = (source_directory() / "device" / "matmul" / "timeline.cuh").read_text()

    phases = re.search(r"enum TimelinePhase : u32 \{\s*(.*?)\};", text, re.DOTALL)[1]
    assert re.findall(r"^ *(\w+)(?: = 1)?,", phases, re.MULTILINE) == list(timelines.PHASES)
    assert phases.startswith("multiplying = 1,")
    assert re.findall(r"^ +(u\d+) \w+;", text, re.MULTILINE)[:3] == ["u64", "u32", "u32"]
    sizes = {name: int(value) for name, value in re.findall(r"constexpr u32 (\w+) = (\d+);", text)}
    assert sizes == {"tracks": timelines.TRACKS, "track_events": timelines.TRACK_EVENTS}


def test_the_op_with_most_rows_of_each_k_is_recorded_but_none_past_4096_or_on_the_cpu():
    sizes = {"rows": (1, 64, 1024, 512, 8192), "columns": 8192, "features": (8192, 28672), "methods": ()}

    assert [(one.m, one.k) for one in fused.recorded_layers(FusedPlan("cuda", 4, **sizes))] == [
        (1024, 2048),
        (1024, 7168),
    ]
    assert fused.recorded_layers(FusedPlan("cuda", 4, **sizes | {"rows": (1, 64)})) == []
    assert fused.recorded_layers(FusedPlan("cuda", 4, **sizes | {"columns": 131072, "rows": (256, 1024)}))[0].m == 256
    assert fused.recorded_layers(FusedPlan("cpu", 4, **sizes)) == []


class Recorded:
    """Stands in for a recorder whose last call left ``recorded``."""

    tile = MatmulTile(64, 64, stages=12, whole=True)
    timelines = ()

    def __init__(self, recorded, off=0):
        self.last, self.off = recorded, off

    def __call__(self, a, w):
        product = own_product(a, w)
        product.view(-1)[: self.off] += 1
        return product


@pytest.mark.parametrize("off", [0, 3])
def test_what_is_recorded_is_verified(monkeypatch, off):
    recorded = recording([(0, 0, 0, 8000, "multiplying")])
    monkeypatch.setattr(fused, "Recorder", lambda layer, ranks: Recorded(recorded, off))

    found = fused.record(A_LAYER, One(1))

    assert (found.m, found.n, found.k, found.tile) == (16, 32, 64, str(Recorded.tile))
    assert (found.total_us, found.means) == (8.0, [Mean("consumer", "multiplying", 8.0)])
    assert [lane.warp for lane in found.lanes] == ["consumer 0", "sender 0", "gatherer 0"]
    assert found.wrong == off


def test_a_recording_that_may_lack_events_is_none(monkeypatch):
    events = [(0, 0, 10 * at, 10, "multiplying") for at in range(timelines.TRACK_EVENTS)]
    monkeypatch.setattr(fused, "Recorder", lambda layer, ranks: Recorded(recording(events)))

    assert "more events than there is room for" in fused.record(A_LAYER, One(1))


def with_timeline(**changes):
    found = Fused([row("graphar", 500.0)], [replace(A_TIMELINE, **changes)])
    (section,) = found.sections()
    return found, section


def test_the_report_tells_where_the_time_of_an_op_goes():
    _, section = with_timeline()

    recorded, phases = section.body[3:]
    assert recorded.startswith(
        "Timeline of one call with M = 4096 and the tile `MatmulTile<64, 128, 7>`: 347 us on the first"
    )
    assert "| consumer | 247.9 | - | - | - | - | - |\n| sender | - | - | - | - | 93.9 | - |" in phases


def test_a_wrong_result_that_was_recorded_is_named():
    found, section = with_timeline(wrong=7)

    assert found.verdict() == "**WRONG RESULTS: 1 of 2 (the timeline at 4096 x 8192 x 2048).**"
    assert "The result was **WRONG**." in section.body[3]
    assert section.figures[-1].title.startswith("WRONG RESULT: Timeline of one call with M = 4096")


def test_a_timeline_has_a_row_a_warp_and_a_colour_a_phase():
    _, section = with_timeline()

    chart = section.figures[-1]
    assert chart.order == [f"{block} {warp}" for block in (0, 66) for warp in ("consumer 0", "sender 0", "gatherer 0")]
    adding = next(mark for mark in chart.marks if mark.name == "adding")
    assert (adding.row, adding.begin, adding.value) == ("0 consumer 0", 8.0, 8.5)
    assert list(dict.fromkeys(mark.name for mark in chart.marks)) == list(timelines.PHASES)


@pytest.mark.usefixtures("no_gpus")
def test_a_method_of_another_machine_is_refused(tmp_path):
    with pytest.raises(SystemExit, match="symm_fused: not on this machine"):
        program.main(["fused", "--methods", "symm_fused", "--out", str(tmp_path)])

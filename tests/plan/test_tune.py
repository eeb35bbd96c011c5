"""Tuning: candidates, the table made of measurements, and the command."""

from __future__ import annotations

import json
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import graphar
from graphar.cli import main as command
from graphar.cli import timing
from graphar.cli import tune as tune_command
from graphar.numerics.codecs import NAMES, codec
from graphar.plan import tune
from graphar.plan.algorithms import Algorithm, Shape
from graphar.plan.policy import Chip
from graphar.plan.scratch import WORLD_SIZES
from graphar.plan.shapes import shape_of
from graphar.plan.sizes import KB, MB
from graphar.plan.tables import Table, problem_with, shipped_table
from graphar.plan.times import expected_quantized_us
from graphar.runtime import user_tables
from graphar.runtime.user_tables import find_table

DEVICE = "NVIDIA B999"
SMS = 132
SMALL = Shape(Algorithm.ONE_SHOT_PUSH, 132, 128)
WIDE = Shape(Algorithm.ONE_SHOT_PUSH, 132, 512)
TWO_SHOT = Shape(Algorithm.TWO_SHOT_PUSH, 132, 1024)
LARGE = Shape(Algorithm.TWO_SHOT_PIPELINED, 132, 512, 2048)
OLDER = shipped_table("default").rows[2]
NEW = Table("nvidia_b999", "2x NVIDIA B999", "2026-01-01", None, rows={})


@pytest.fixture(autouse=True)
def user_folder(tmp_path, monkeypatch):
    """Where the user's tables are, not yet made."""
    monkeypatch.setenv("GRAPHAR_CACHE_DIR", str(tmp_path / "cache"))
    user_tables._warn_once.cache_clear()
    return tmp_path / "cache" / "tuning"


def limits_and_threads(rows):
    return [(row["max_nbytes"], row["algorithm"], row["threads"]) for row in rows]


# ---- candidates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_candidate_can_run_and_serves_its_size(world_size):
    for nbytes in tune.SIZES:
        for one in tune.candidates(world_size, nbytes, SMS):
            shape = shape_of(tune.row_of(one, None), world_size, nbytes)
            largest = one.algorithm.row.limit(world_size)
            assert (shape.threads, shape.chunk) == (one.threads, one.chunk)
            assert 1 <= shape.blocks <= one.blocks <= one.algorithm.row.max_blocks
            assert one.threads <= one.algorithm.row.max_threads
            assert one.chunk <= one.algorithm.row.scratch(world_size).capacity
            assert largest is None or nbytes <= largest


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_size_has_candidates_and_none_twice(world_size):
    for nbytes in tune.SIZES:
        found = tune.candidates(world_size, nbytes, SMS)
        assert found
        assert len(set(found)) == len(found)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_what_is_the_fastest_at_the_largest_size_serves_any(world_size):
    found = {one.algorithm for one in tune.candidates(world_size, tune.SIZES[-1], SMS)}

    assert found == {Algorithm.TWO_SHOT_PIPELINED}


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_table_of_any_measurements_is_valid(world_size):
    times = {n: {one: 1.0 + at for at, one in enumerate(tune.candidates(world_size, n, SMS))} for n in tune.SIZES}
    slowest_first = {n: dict(zip(of_size, reversed(of_size.values()), strict=True)) for n, of_size in times.items()}

    for measurements in (times, slowest_first, {n: times[n] for n in tune.SIZES[:3]}):
        made = tune.update(shipped_table("default"), NEW, {world_size: measurements})
        assert problem_with(json.loads(made.to_json())) == ""


# ---- rows -----------------------------------------------------------------------------------------------------------


def test_a_row_ends_with_the_largest_size_it_is_the_fastest_at():
    rows = tune.rows_from({1024: {SMALL: 1, WIDE: 2}, 2048: {SMALL: 2, WIDE: 3}, 4096: {SMALL: 4, WIDE: 3}}, [])

    assert limits_and_threads(rows) == [(2048, "one_shot_push", 128), (4096, "one_shot_push", 512)]


def test_a_row_goes_on_while_it_is_near_the_fastest():
    near, far = ({SMALL: 1.005, WIDE: 1}, {SMALL: 1.02, WIDE: 1})

    assert limits_and_threads(tune.rows_from({1: {SMALL: 1, WIDE: 2}, 2: near}, [])) == [(2, "one_shot_push", 128)]
    assert len(tune.rows_from({1: {SMALL: 1, WIDE: 2}, 2: far}, [])) == 2


def test_small_gains_at_many_sizes_make_a_row():
    little = {SMALL: 1.004, WIDE: 1}

    assert limits_and_threads(tune.rows_from({1: {SMALL: 1, WIDE: 2}, 2: little, 3: little}, []))[-1][2] == 128
    assert limits_and_threads(tune.rows_from({1: {SMALL: 1, WIDE: 2}, **dict.fromkeys((2, 3, 4), little)}, [])) == [
        (1, "one_shot_push", 128),
        (4, "one_shot_push", 512),
    ]


def test_a_row_ends_where_it_is_no_candidate_any_more():
    rows = tune.rows_from({1024: {SMALL: 1}, 2048: {WIDE: 9}}, [])

    assert limits_and_threads(rows) == [(1024, "one_shot_push", 128), (2048, "one_shot_push", 512)]


def test_the_order_of_the_measurements_does_not_matter():
    by_size = {1024: {SMALL: 1, WIDE: 2}, 4096: {SMALL: 4, WIDE: 3}}

    assert tune.rows_from(by_size, OLDER) == tune.rows_from(dict(reversed(by_size.items())), OLDER)


def test_an_algorithm_without_a_limit_takes_all_sizes_from_its_row_on():
    rows = tune.rows_from({MB: {TWO_SHOT: 1}, 16 * MB: {TWO_SHOT: 3, LARGE: 2}, 64 * MB: {LARGE: 8}}, OLDER)

    assert limits_and_threads(rows) == [(MB, "two_shot_push", 1024), (None, "two_shot_pipelined", 512)]
    assert rows[-1]["chunk"] == 2048


def test_the_rows_that_served_before_go_on_above_what_was_measured():
    rows = tune.rows_from({32 * KB: {SMALL: 1}}, OLDER)

    assert rows[0]["max_nbytes"] == 32 * KB
    assert rows[1:] == OLDER


# ---- tables ---------------------------------------------------------------------------------------------------------


def table_of(measurements, old=None):
    return tune.update(old or shipped_table("default"), NEW, measurements)


def test_other_world_sizes_of_the_same_table_stay():
    old = table_of({3: {MB: {TWO_SHOT: 7.0}}})

    made = table_of({2: {MB: {TWO_SHOT: 5.0}}}, old)

    assert (made.rows[3], made.measured) == (old.rows[3], {3: [[MB, 7.0]], 2: [[MB, 5.0]]})


def test_world_sizes_of_another_machines_table_do_not_stay():
    assert list(table_of({2: {MB: {TWO_SHOT: 5.0}}}).rows) == [2]


def test_points_above_what_was_measured_stay():
    old = table_of({2: {KB: {SMALL: 1.0}, MB: {TWO_SHOT: 9.0}}})

    assert table_of({2: {KB: {SMALL: 2.0}}}, old).measured == {2: [[KB, 2.0], [MB, 9.0]]}


def test_codecs_that_were_not_timed_again_stay():
    old = tune.update(shipped_table("default"), NEW, {2: {MB: {TWO_SHOT: 9.0}}}, {2: {"int8": {MB: 8.0}}})

    made = tune.update(old, NEW, {2: {MB: {TWO_SHOT: 9.0}}}, {2: {"int4": {MB: 6.0001}}})

    assert made.codecs == {2: {"int8": [[MB, 8.0]], "int4": [[MB, 6.0]]}}
    assert problem_with(json.loads(made.to_json())) == ""


def test_what_pays_is_said_of_every_codec():
    table = table_of({2: {KB: {SMALL: 2.0}, MB: {TWO_SHOT: 9.0}}})

    said = tune.what_pays(table, {2: {"int8": {KB: 3.0, MB: 10.0}, "int4": {KB: 2.5, MB: 6.0}}})

    assert said == [
        "2 ranks, int8: faster than exact at no size",
        "2 ranks, int4: faster than exact at 1 MB (6.0 us, exact 9.0 us)",
    ]


def test_what_changed_names_each_size_with_both_choices_and_the_times_that_are_known():
    measurements = {2: {32 * KB: {SMALL: 2.0}, MB: {WIDE: 8.0, TWO_SHOT: 12.5}, 2 * MB: {WIDE: 30.0, TWO_SHOT: 20.0}}}
    old = table_of({2: {2 * MB: {WIDE: 1.0}}})

    new = table_of(measurements, old)

    assert tune.what_changed(old, new, measurements) == [
        "2 ranks, 32 KB: one_shot_push (4 blocks of 512), not measured -> one_shot_push (16 blocks of 128), 2.0 us",
        "2 ranks, 2 MB: one_shot_push (132 blocks of 512), 30.0 us -> two_shot_push (128 blocks of 1024), 20.0 us",
    ]


def test_nothing_changed_where_the_choices_are_the_same():
    measurements = {2: {32 * KB: {SMALL: 2.0}, MB: {TWO_SHOT: 12.5}}}
    table = table_of(measurements)

    assert tune.what_changed(table, table, measurements) == []


# ---- the command ----------------------------------------------------------------------------------------------------


def test_without_a_command_the_help_is_shown(capsys):
    assert command.main([]) == 0
    assert "tune" in capsys.readouterr().out


def test_tuning_without_gpus_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert command.main(["tune"]) == 1
    assert capsys.readouterr() == (
        "",
        "graphar: tune: torch sees no CUDA device; it times kernels, and needs 2 GPUs or more\n",
    )


@pytest.fixture
def three_gpus(monkeypatch):
    """What the command sees of a machine, 2 us for every candidate, and 1.5 for every codec."""
    monkeypatch.setattr(tune_command, "is_available", lambda: graphar.Availability(True, ""))
    monkeypatch.setattr(tune_command, "chip", lambda device: Chip(SMS, "sm_90a"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: DEVICE)

    def measure(world_size, sizes, done):
        for nbytes in sizes:
            done(f"{nbytes}")
        return {nbytes: dict.fromkeys(tune.candidates(world_size, nbytes, SMS), 2.0) for nbytes in sizes}

    def measure_codecs(table, world_size, sizes, codecs, done):
        return {codec.text: dict.fromkeys(sizes, 1.5) for codec in codecs}

    monkeypatch.setattr(tune_command, "measure", measure)
    monkeypatch.setattr(tune_command, "measure_codecs", measure_codecs)


def test_the_table_that_tuning_writes_is_found(three_gpus, user_folder, capsys):
    assert command.main(["tune", "--report", "reports/mine.md"]) == 0

    found = find_table(DEVICE)
    assert (found.name, found.machine, found.report) == ("nvidia_b999", "3x NVIDIA B999", "reports/mine.md")
    assert list(found.rows) == [2, 3]
    assert found.measured[2] == [[nbytes, 2.0] for nbytes in tune.SIZES]
    assert str(user_folder / "nvidia_b999.json") in capsys.readouterr().out


def test_codecs_are_timed_as_well_and_what_pays_is_said(three_gpus, capsys):
    assert command.main(["tune", "--world-size", "2", "--max-nbytes", "128K"]) == 0

    found = find_table(DEVICE)
    assert found.codecs == {2: {name: [[32 * KB, 1.5], [128 * KB, 1.5]] for name in NAMES}}
    line = "2 ranks, int4: faster than exact at 32 KB (1.5 us, exact 2.0 us), 128 KB (1.5 us, exact 2.0 us)\n"
    assert line in capsys.readouterr().out


def test_tuning_can_do_with_few_codecs_or_none(three_gpus, capsys):
    assert command.main(["tune", "--world-size", "2", "--max-nbytes", "32K", "--codecs", "int8"]) == 0
    assert command.main(["tune", "--world-size", "3", "--max-nbytes", "32K", "--codecs"]) == 0

    assert find_table(DEVICE).codecs == {2: {"int8": [[32 * KB, 1.5]]}}  # and the second run left it
    assert capsys.readouterr().out.count("faster than exact") == 1


def test_what_tuning_found_is_one_document_or_a_line(three_gpus, user_folder, capsys):
    arguments = ["tune", "--world-size", "2", "--max-nbytes", "32K"]

    assert command.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(user_folder / "nvidia_b999.json")
    assert Table.from_json(json.dumps(found["table"])) == find_table(DEVICE)
    assert found["codecs"]

    assert command.main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == (f"wrote {found['path']}\n", "")


def test_a_table_can_be_written_elsewhere_and_go_on_from_there(three_gpus, tmp_path, capsys):
    out = tmp_path / "table.json"

    assert command.main(["tune", "--world-size", "3", "--out", str(out)]) == 0
    assert command.main(["tune", "--world-size", "2", "--max-nbytes", "64K", "--out", str(out)]) == 0

    assert list(Table.from_json(out.read_text()).rows) == [2, 3]
    assert find_table(DEVICE) == shipped_table("default")
    assert "2 ranks, 64 KB: " not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--world-size", "4"], ["--world-size", "1"], ["--max-nbytes", "1K"]])
def test_what_cannot_be_measured_is_refused(three_gpus, capsys, arguments):
    assert command.main(["tune", *arguments]) == 1
    assert "--world-size must be from 2 to 3" in capsys.readouterr().err


def test_a_file_that_holds_no_table_is_left_alone(three_gpus, tmp_path, capsys):
    out = tmp_path / "notes.json"
    out.write_text("{}")

    assert command.main(["tune", "--out", str(out)]) == 1
    assert out.read_text() == "{}"
    assert "notes.json holds no tuning table" in capsys.readouterr().err


# ---- on GPUs --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_two_gpus_are_tuned_and_calls_go_by_it(user_folder, capsys):
    assert command.main(["tune", "--world-size", "2", "--max-nbytes", "64K"]) == 0

    found = find_table(torch.cuda.get_device_name(0))
    sizes = [nbytes for nbytes in tune.SIZES if nbytes <= 64 * KB]
    with graphar.Communicator(devices=[0, 1]) as communicator:
        said = communicator.explain([torch.ones(4 * KB, dtype=torch.bfloat16, device=f"cuda:{r}") for r in range(2)])
    assert [nbytes for nbytes, _ in found.measured[2] if nbytes <= 64 * KB] == sizes
    assert all(0.5 < us < 100 for _, us in found.measured[2][: len(sizes)])
    assert said.expected_us == found.measured[2][1][1]
    assert found.name in said.reason


@pytest.mark.gpu
def test_a_candidate_with_wrong_sums_is_named(monkeypatch):
    monkeypatch.setattr(timing.reference, "allreduce", lambda parts: parts[0])

    with (
        timing.Timer(2) as timer,
        pytest.raises(graphar.GrapharError, match=r"one_shot_push.* gave wrong sums on rank"),
    ):
        timer.measure(32 * KB, [shape_of(tune.row_of(SMALL, None), 2, 32 * KB)])


@pytest.mark.gpu
def test_codecs_are_timed_and_what_they_take_is_expected(user_folder, capsys):
    sizes = [32 * KB, 2 * MB]

    times = tune_command.measure_codecs(
        shipped_table("default"), 2, sizes, [codec("int8"), codec("int4")], lambda step: None
    )

    assert {name: list(by_size) for name, by_size in times.items()} == {"int8": sizes, "int4": sizes}
    assert all(0.5 < us < 1000 for by_size in times.values() for us in by_size.values())
    table = tune.update(shipped_table("default"), NEW, {2: {MB: {TWO_SHOT: 9.0}}}, {2: times})
    assert expected_quantized_us(table, codec("int4"), 2, MB) == pytest.approx(times["int4"][2 * MB], abs=1e-3)


def test_what_is_timed_is_what_is_checked(monkeypatch):
    """A graph that leaves nothing behind is as wrong as a call that does."""
    xs = [torch.full((64,), float(rank), dtype=torch.bfloat16) for rank in (1, 2)]
    bound = lambda timer, shape, xs, outs: [partial(out.copy_, sum(xs)) for out in outs]  # noqa: E731
    monkeypatch.setattr(timing.Timer, "__init__", lambda timer: None)
    monkeypatch.setattr(timing.Timer, "_bind", bound)
    monkeypatch.setattr(timing.Timer, "_replay", lambda timer, graphs: 1.0)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    timer = timing.Timer()
    timer._world_size, timer._streams = 2, [None, None]
    timer._communicator = SimpleNamespace(synchronize=lambda: None)
    shape = SimpleNamespace(codec=None)

    monkeypatch.setattr(timing.Timer, "_capture", lambda timer, rank, run, count: SimpleNamespace(replay=run))
    assert timer.measure(128, [shape], xs) == [1.0 / timing.launches_of(128)]

    nothing = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(timing.Timer, "_capture", lambda timer, rank, run, count: nothing)
    with pytest.raises(graphar.GrapharError, match="gave wrong sums on rank"):
        timer.measure(128, [shape], xs)


def test_a_timer_that_cannot_be_had_keeps_no_communicator(monkeypatch):
    closed = []

    class Refusing:
        def __init__(self, **_) -> None:
            self.close = lambda: closed.append(True)

        def allreduce(self, xs) -> None:
            raise graphar.DriverError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory")

    monkeypatch.setattr(timing, "Communicator", Refusing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device="cpu"))

    with pytest.raises(graphar.DriverError):
        timing.Timer(2)

    assert closed == [True]

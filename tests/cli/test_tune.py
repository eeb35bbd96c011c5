"""python -m graphar tune: what it measures and writes, and that nothing wrong is timed."""

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
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
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.matmuls import choose_matmul
from graphar.plan.sizes import KB, MB
from graphar.plan.tables import Table, entry_of, expected_quantized_us, fitted, shipped_table
from graphar.plan.work import Sum
from graphar.runtime.user_tables import find_table
from tests.plan.test_tune import CHIP, DEVICE, NEW, SMALL, TWO_SHOT, candidates, limits_and_threads

pytestmark = pytest.mark.usefixtures("user_folder")


def test_tuning_without_gpus_says_what_is_missing(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    assert command.main(["tune"]) == 1
    assert capsys.readouterr() == (
        "",
        "graphar: tune: torch sees no CUDA device; it times kernels, and needs 2 GPUs or more\n",
    )


class EvenTimer(nullcontext):
    """A timer of a machine on which every call takes 2 us, whatever the table."""

    def __init__(self, world_size):
        self.world_size = world_size

    def __enter__(self):
        return self

    def measure_under(self, workload, tables):
        return [2.0] * len(tables)


@pytest.fixture
def three_gpus(monkeypatch):
    """A machine with three GPUs, on which every candidate takes 2 us and every codec 1.5 us."""
    monkeypatch.setattr(tune_command, "Timer", EvenTimer)
    monkeypatch.setattr(tune_command, "is_available", lambda: graphar.Availability(True, ""))
    monkeypatch.setattr(tune_command, "chip", lambda device: CHIP)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: DEVICE)

    def measure(world_size, sizes, done):
        for nbytes in sizes:
            done(f"{nbytes}")
        return {nbytes: dict.fromkeys(candidates(world_size, nbytes), 2.0) for nbytes in sizes}

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


CODECS = {  # by options: the times in the table, and what is said
    "--max-nbytes 128K": (
        {name: [[32 * KB, 1.5], [128 * KB, 1.5]] for name in NAMES},
        "2 ranks, int4: faster than exact at 32 KB (1.5 us, exact 2.0 us), 128 KB (1.5 us, exact 2.0 us)\n",
    ),
    "--max-nbytes 32K --codecs int8": ({"int8": [[32 * KB, 1.5]]}, "2 ranks, int8: faster than exact at 32 KB"),
    "--max-nbytes 32K --only codecs": (
        {name: [[32 * KB, 1.5]] for name in NAMES},
        "2 ranks, int4: exact was not measured\n",
    ),
}


@pytest.mark.parametrize("options", CODECS)
def test_codecs_are_timed_and_faster_codecs_are_said(three_gpus, options, capsys):
    times, line = CODECS[options]

    assert command.main(["tune", "--world-size", "2", *options.split()]) == 0
    said = capsys.readouterr().out
    assert command.main(["tune", "--world-size", "3", "--max-nbytes", "32K", "--codecs"]) == 0

    assert find_table(DEVICE).codecs == {2: times}  # the second run left it unchanged
    assert line in said
    assert said.count("faster than exact") == (0 if "--only" in options else len(times))
    assert "faster than exact" not in capsys.readouterr().out


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


BOUNDS = "--world-size must be from 2 to 3, and --max-nbytes at least 2 KB"
REFUSED = dict.fromkeys(("--world-size 4", "--world-size 1", "--max-nbytes 1K"), BOUNDS)


@pytest.mark.parametrize(("arguments", "said"), [*REFUSED.items(), ("--out /none/table.json", "cannot open /none/")])
def test_what_cannot_be_measured_or_written_is_refused_at_once(three_gpus, monkeypatch, capsys, arguments, said):
    monkeypatch.setattr(tune_command, "measure_all", None)

    assert command.main(["tune", *arguments.split()]) == 2
    assert said in capsys.readouterr().err


def test_numbers_that_gain_nothing_stay_and_parts_get_entries(three_gpus, capsys):
    assert command.main(["tune", "--max-nbytes", "32K"]) == 0

    found, default = find_table(DEVICE), shipped_table("default")
    assert {one.ratio for one in found.matmul.against_torch} == {1.0}  # every matmul takes as long
    found = replace(found, matmul=replace(found.matmul, against_torch=default.matmul.against_torch))
    assert [getattr(found, name) for name in tune_command.SECTIONS[3:]] == [
        getattr(default, name) for name in tune_command.SECTIONS[3:]
    ]
    assert [row["max_nbytes"] for row in found.parts["allgather"]][:1] == [32 * KB]
    assert Table.from_json(found.to_json()) == found


def test_a_number_that_makes_calls_faster_is_taken_and_told_with_its_mean_gain(three_gpus, monkeypatch, capsys):
    def measure_under(timer, workload, tables):
        """With 8 blocks, the first of the two calls takes half and the second an eighth of the time."""
        gain = 2.0 if workload.rows == 2048 else 8.0
        return [1.0 if table.beside.blocks == 8 else gain for table in tables]

    monkeypatch.setattr(EvenTimer, "measure_under", measure_under)

    assert command.main(["tune", "--only", "beside"]) == 0

    assert (find_table(DEVICE).beside.blocks, find_table(DEVICE).measured) == (8, {})
    assert "beside.blocks: 24 -> 8, 0.250 of the time\n" in capsys.readouterr().out


def test_graphars_matmul_is_timed_against_torchs_by_the_costs_that_were_found(three_gpus, monkeypatch, capsys):
    costs = set()

    def measure_under(timer, workload, tables):
        """Shorter waits are faster; torch's matmul is slower from 500 rows on."""
        policies = [table.matmul for table in tables]
        if workload.op != "matmul" or len({policy.own_from_rows for policy in policies}) == 1:
            return [policy.cost.wait_a_line for policy in policies]
        assert timer.world_size == 3
        costs.update(policy.cost.wait_a_line for policy in policies)
        shape = workload.rows, workload.columns, workload.k
        own, of_torch = (choose_matmul(policy, *shape, CHIP.sms).own for policy in policies)
        assert own
        assert not of_torch
        return [30.0, 20.0 if workload.rows < 500 else 60.0]

    monkeypatch.setattr(EvenTimer, "measure_under", measure_under)

    assert command.main(["tune", "--only", "matmul"]) == 0

    found, older = find_table(DEVICE).matmul, shipped_table("default").matmul
    assert costs == {older.cost.wait_a_line / 2}
    assert found.own_from_rows == older.own_from_rows
    assert {one[:3]: one.ratio for one in found.against_torch} == {
        one[:3]: 1.5 if one.m < 500 else 0.5 for one in older.against_torch
    }
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("matmul.against_torch: ")]
    changed = [one for one in older.against_torch if (one.ratio > 1) != (one.m < 500)]
    assert len(told) == len(changed) > 0
    assert (
        "matmul.against_torch: torch's matmul, which was measured to be 1.50 times as fast at 64 x 8192 x 2048" in told
    )


# By section: a number of the table of a user who measured all of them before.
MEASURED = {
    "rows": ("measured", 2, [[2048, 1.5]]),
    "codecs": ("codecs", 2, {"int8": [[32 * KB, 9.5]]}),
    "parts": ("parts", "allgather", [entry_of(Config(Algorithm.ALLGATHER_PUSH, 7, 64, 4), None)]),
    "quantized": ("quantized", "many_tiles", 77),
    "lossless": ("lossless", "allreduce_from_nbytes", {2: 777}),
    "norm": ("norm", "one_shot_sent_nbytes", 777),
    "beside": ("beside", "blocks", 7),
    "matmul": ("matmul", "skinny_least_busy", 0.7),
    "allgather_matmul": ("allgather_matmul", "tiles_from_rows", {2: 777}),
}


@pytest.mark.parametrize("section", MEASURED)
def test_sections_that_are_not_measured_stay_as_they_are(three_gpus, monkeypatch, tmp_path, section):
    def measure_under(timer, workload, tables):
        assert workload.op != "matmul" or section == "matmul"
        return [2.0] * len(tables)

    monkeypatch.setattr(EvenTimer, "measure_under", measure_under)
    out, older = tmp_path / "table.json", replace(shipped_table("default"), name=NEW.name)
    older = replace(older, measured={2: [], 3: []}, codecs={2: {}, 3: {}})
    for *path, value in MEASURED.values():
        older = tune.with_value(older, path, value)
    out.write_text(older.to_json())

    assert command.main(["tune", "--only", section, "--max-nbytes", "32K", "--out", str(out), "--quiet"]) == 0

    found = Table.from_json(out.read_text())
    kept = {name: path for name, (*path, _) in MEASURED.items() if name != section}
    assert {name: tune.value_at(found, path) for name, path in kept.items()} == {
        name: tune.value_at(older, path) for name, path in kept.items()
    }
    assert section == "rows" or found.rows == older.rows


def test_numbers_of_a_world_size_are_tried_between_that_many_gpus_and_others_between_all(three_gpus, monkeypatch):
    tried = []

    def measure_under(timer, workload, tables):
        differing = {name for name in tune_command.SECTIONS[3:] if len({str(getattr(t, name)) for t in tables}) > 1}
        tried.append((timer.world_size, *differing))
        return [2.0] * len(tables)

    monkeypatch.setattr(EvenTimer, "measure_under", measure_under)

    assert command.main(["tune", "--only", "norm", "matmul", "--quiet"]) == 0

    assert {(2, "matmul"), (3, "matmul"), (3, "norm")} == set(tried)


def test_the_fastest_grids_of_parts_become_their_entries(monkeypatch):
    def measure_under(timer, workload, tables):
        """Narrow blocks are the fastest for few rows, wide ones for many."""
        widths = [table.parts[workload.op][0]["threads"] for table in tables]
        return [width if workload.rows <= 64 else 2048 / width for width in widths]

    monkeypatch.setattr(EvenTimer, "measure_under", measure_under)
    monkeypatch.setattr(tune_command, "chip", lambda device: CHIP)

    timer = EvenTimer(2)
    parts = tune_command.measure_parts(timer, shipped_table("default"), 2, tune.PART_SIZES, lambda step: None)

    assert limits_and_threads(parts["reducescatter"]) == [
        (256 * KB, "reducescatter_push", 128),  # 32 rows of each of two ranks, 8 KB a row
        (None, "reducescatter_push", 512),
    ]
    assert limits_and_threads(parts["allgather"]) == [
        (256 * KB, "allgather_flagged", 128),
        (None, "allgather_push", 512),
    ]
    assert limits_and_threads(parts["alltoall"]) == [(256 * KB, "alltoall_flagged", 128), (None, "alltoall_push", 512)]


def test_a_file_that_holds_no_table_is_left_alone(three_gpus, tmp_path, capsys):
    out = tmp_path / "notes.json"
    out.write_text("{}")

    assert command.main(["tune", "--out", str(out)]) == 2
    assert out.read_text() == "{}"
    assert "notes.json holds no tuning table" in capsys.readouterr().err


@pytest.mark.gpu
def test_two_gpus_are_tuned_and_calls_go_by_it(user_folder, capsys):
    assert command.main(["tune", "--world-size", "2", "--max-nbytes", "64K", "--only", "rows", "parts", "norm"]) == 0

    found = find_table(torch.cuda.get_device_name(0))
    sizes = [nbytes for nbytes in tune.SIZES if nbytes <= 64 * KB]
    with graphar.Communicator(devices=[0, 1]) as communicator:
        said = communicator.explain([torch.ones(4 * KB, dtype=torch.bfloat16, device=f"cuda:{r}") for r in range(2)])
    assert [nbytes for nbytes, _ in found.measured[2] if nbytes <= 64 * KB] == sizes
    assert all(0.5 < us < 100 for _, us in found.measured[2][: len(sizes)])
    assert said.expected_us == pytest.approx(found.measured[2][1][1])
    assert found.name in said.reason


@pytest.mark.gpu
def test_a_candidate_with_wrong_sums_is_named(monkeypatch):
    monkeypatch.setattr(graphar.reference, "allreduce", lambda parts: parts[0])

    with (
        timing.Timer(2) as timer,
        pytest.raises(graphar.GrapharError, match=r"one_shot_push.* gave wrong sums on rank"),
    ):
        timer.measure(Call(Sum(16 * KB), torch.bfloat16, 0), [fitted(SMALL, 2, 32 * KB)])


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
    """A graph that writes no result is refused, as an eager call is."""
    xs = [torch.full((64,), float(rank), dtype=torch.bfloat16) for rank in (1, 2)]
    bound = lambda timer, call, config, xs, outs: [partial(out.copy_, sum(xs)) for out in outs]  # noqa: E731
    monkeypatch.setattr(timing.Timer, "__init__", lambda timer: None)
    monkeypatch.setattr(timing.Timer, "_bind", bound)
    monkeypatch.setattr(timing.specified, "random", lambda devices, numel, dtype: xs)
    monkeypatch.setattr(timing.Timer, "elapsed_us", lambda timer, run: 1.0)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    timer = timing.Timer()
    timer.streams = [None, None]
    timer.communicator = SimpleNamespace(synchronize=lambda: None, devices=())
    call = Call(Sum(64), torch.bfloat16, 0)

    monkeypatch.setattr(timing.Timer, "_capture", lambda timer, rank, run, count: SimpleNamespace(replay=run))
    assert timer.measure(call, [SMALL]) == [1.0 / timing.launches_of(128)]

    nothing = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(timing.Timer, "_capture", lambda timer, rank, run, count: nothing)
    with pytest.raises(graphar.GrapharError, match="gave wrong sums on rank"):
        timer.measure(call, [SMALL])


def test_a_timer_that_cannot_be_had_keeps_no_communicator(monkeypatch):
    closed = []

    class Refusing:
        def __init__(self, lossless, **_) -> None:
            assert lossless, "whether compression pays is measured even where the environment turns it off"
            self.close = lambda: closed.append(True)

        def allreduce(self, xs) -> None:
            raise graphar.DriverError("cuMemAlloc: CUDA_ERROR_OUT_OF_MEMORY: out of memory")

    monkeypatch.setattr(timing, "Communicator", Refusing)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device="cpu"))

    with pytest.raises(graphar.DriverError):
        timing.Timer(2)

    assert closed == [True]


def test_calls_under_tables_are_checked_after_their_time_was_taken(monkeypatch):
    seen, table = [], shipped_table("default")
    few = tune.with_value(table, ("beside", "blocks"), 8)

    def elapsed_us(timer, run):
        run()
        seen.append(communicator.engine.table.beside.blocks)
        return 12.0 * len(seen)

    monkeypatch.setattr(timing.Timer, "__init__", lambda timer: None)
    monkeypatch.setattr(timing.Timer, "elapsed_us", elapsed_us)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    timer = timing.Timer()
    timer.streams = [None, None]
    with graphar.Communicator(devices=["cpu"] * 2) as communicator:
        timer.communicator = communicator
        # The two tables take turns: repeats take 1, 2, 3 ... us a call, and the first of each warms up.
        assert timer.measure_under(tune.Workload("allreduce", 2, 64), [table, few]) == [7.0, 8.0]
        assert seen[:4] == [24, 8, 24, 8]
        assert communicator.engine.table.beside.blocks == 24

        monkeypatch.setattr(timing, "Prepared", Idle)
        with pytest.raises(graphar.GrapharError, match="rank 0 has a wrong result"):
            timer.measure_under(tune.Workload("allreduce", 2, 64), [table])


class Idle(timing.Prepared):
    """A workload whose calls do nothing after the first ones."""

    def __init__(self, *args):
        super().__init__(*args)
        run, calls = self.run, itertools.count()
        nothing = [(torch.zeros(2, 64, dtype=torch.bfloat16),)] * 2
        self.run = lambda at: run(at) if next(calls) < 20 else nothing

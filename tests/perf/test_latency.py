"""perf latency: which calls fit on one GPU, a run with stand-ins for its processes, and the report."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace

import pytest
import torch

from graphar.numerics.norms import ALLREDUCE_NORM, REDUCESCATTER_NORM
from graphar.plan.policy import Chip
from graphar.plan.sizes import KB, MB
from graphar.plan.work import MATMUL_ALLREDUCE
from perf import __main__ as program
from perf import machine
from perf.harness import shared_gpu
from perf.harness.shared_gpu import Case, count_wrong, expected, fit, operands, serve
from perf.topics.latency import OWN, WORLD_SIZES, Latency, LatencyPlan, Process, cases, words_of
from tests.perf.samples import MACHINE
from tests.perf.samples import latency_row as row

WHOLE = Chip(132, "sm_90a")
OTHER = f"{OWN} at 0123456789ab"
every_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


def halves_held(case):
    """Halves of SMs that the kernels of all ranks hold, with the next one of each."""
    config = fit(case, WHOLE).config
    return 2 * case.world_size * config.blocks * (1 if config.algorithm.row.takes_half(config.threads) else 2)


@every_world_size
def test_the_kernels_of_all_ranks_and_the_next_ones_are_resident_at_once(world_size):
    assert max(map(halves_held, cases(world_size))) <= 2 * WHOLE.sms


@every_world_size
def test_all_algorithms_that_auto_takes_are_timed(world_size):
    taken = {fit(case, WHOLE).config.algorithm.value for case in cases(world_size)}
    assert taken == {
        *(["matmul_two_shot"] if world_size > 2 else []),
        *("one_shot_push", "two_shot_push", "two_shot_pipelined", "two_shot_lossless", "reducescatter_push"),
        *("allgather_flagged", "allgather_push", "quantized_two_shot_push", "quantized_two_shot_pipelined"),
        *("quantized_reducescatter", "allreduce_rmsnorm_one_shot", "allreduce_rmsnorm_two_shot"),
        *("reducescatter_rmsnorm", "matmul_one_shot"),
    }


def test_a_call_that_fits_is_whole():
    fitted = fit(Case("allreduce", 4, 8 * KB), WHOLE)
    assert (fitted.amount, fitted.config.blocks, fitted.config.threads) == (4096, 9, 64)


@pytest.mark.parametrize(("size", "packs_a_thread"), [(MB, 1), (4 * MB, 4)])
def test_threads_do_what_they_do_between_whole_gpus(size, packs_a_thread):
    fitted = fit(Case("allreduce", 4, size), WHOLE)
    assert fitted.config.algorithm.value == "two_shot_push"
    threads = fitted.config.blocks * fitted.config.threads
    assert -(-fitted.amount // 8 // threads) == packs_a_thread
    assert fitted.amount % (8 * 4) == 0


def test_another_checkout_gets_the_same_data_in_its_own_grid():
    case = Case("allreduce", 4, MB)
    assert fit(case, WHOLE, fit(case, WHOLE).amount) == fit(case, WHOLE)
    assert fit(case, WHOLE, fit(case, WHOLE).amount // 2).config.blocks == 17


def test_clusters_that_are_not_resident_at_once_are_refused():
    with pytest.raises(ValueError, match="clusters of 8 blocks of all ranks are not resident at once"):
        fit(Case(ALLREDUCE_NORM, 4, 16, 8192), WHOLE)


SMALL = [
    Case("allreduce", 2, 64),
    Case("allreduce", 3, 4 * KB, codec="int8"),
    Case("reducescatter", 2, 64),
    Case("reducescatter", 2, 4 * KB, codec="int8"),
    Case("allgather", 3, 96),
    Case(ALLREDUCE_NORM, 2, 3, 64),
    Case(REDUCESCATTER_NORM, 2, 4, 64),
    Case(MATMUL_ALLREDUCE, 2, 3, 128, 256),
    Case(MATMUL_ALLREDUCE, 2, 3, 128, 256, scales="rows"),
    Case(MATMUL_ALLREDUCE, 2, 3, 128, 256, scales="blocks"),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: "-".join(map(str, case)))
def test_a_result_with_other_bits_than_the_specification_is_wrong(case, monkeypatch):
    monkeypatch.setattr(shared_gpu, "DEVICE", "cpu")
    ranks = operands(case, case.amount)
    right = expected(case, ranks)
    numel = sum(output.numel() for of_rank in ranks for output in of_rank.outputs)
    assert count_wrong(case, ranks, right) > numel // 2

    for of_rank, results in zip(ranks, right, strict=True):
        for output, want in zip(of_rank.outputs, results, strict=True):
            assert output.shape == want.shape
            output.copy_(want)
    assert count_wrong(case, ranks, right) == 0
    ranks[1].outputs[0].view(-1)[-1] = 100.0
    assert count_wrong(case, ranks, right) > 0


def test_an_error_is_an_answer(monkeypatch, capsys):
    def answer(asked):
        if asked["do"] == "make":
            raise ValueError("no room\nmore")
        return {"wrong": 0}

    monkeypatch.setattr(sys, "stdin", io.StringIO('{"do": "make"}\n{"do": "verify"}\n'))
    serve(answer)
    assert list(map(json.loads, capsys.readouterr().out.splitlines())) == [
        {"error": "ValueError: no room"},
        {"wrong": 0},
    ]


def test_a_process_of_another_checkout_imports_its_graphar(tmp_path):
    (tmp_path / "graphar").mkdir()
    (tmp_path / "graphar" / "__init__.py").write_text("name = 'the other'")
    (tmp_path / "perf" / "harness").mkdir(parents=True)
    answer = "print('a word'); print(json.dumps({'said': graphar.name}), flush=True)"
    server = f"import graphar, json\ninput()\n{answer}"
    (tmp_path / "perf" / "harness" / "shared_gpu.py").write_text(server)
    process = Process(tmp_path)
    assert process.ask(do="make") == {"said": "the other"}
    assert process.ask(do="time") == {"error": "the process has ended"}
    process.close()


class StandIn:
    """Answers as a process would, without a GPU: a call takes ``time_us``, and has ``wrong`` elements."""

    def __init__(self, time_us, log, name, errors=(), wrong=0):
        self.time_us, self.log, self.name, self.errors, self.wrong = time_us, log, name, errors, wrong

    def ask(self, do, case=None, amount=None):
        self.log.append((self.name, do))
        if do in self.errors:
            return {"error": f"{do} failed"}
        if do == "make":
            fitted = fit(case, WHOLE, amount)
            grid = f"{fitted.config.blocks} x {fitted.config.threads}"
            return {"algorithm": fitted.config.algorithm.value, "grid": grid, "amount": fitted.amount, "calls": 200}
        return {"time_us": self.time_us} if do == "time" else {"wrong": self.wrong}

    def close(self):
        self.log.append((self.name, "close"))


@pytest.fixture
def measure(monkeypatch, tmp_path):
    """Runs a plan with a stand-in for each checkout: the messages, and what was asked in which order."""
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setattr(machine, "describe", lambda: MACHINE)

    def measure(plan, **given):
        log, report = [], Latency()
        return list(report.measure(plan, lambda folder: StandIn(5.0, log, folder.name, **given))), log, report

    return measure


def plan_of(tmp_path, *wanted, repeats=2):
    return LatencyPlan(wanted, {OWN: tmp_path / "own", OTHER: tmp_path / "other"}, repeats, {})


def test_checkouts_take_turns_and_every_second_round_is_reversed(measure, tmp_path):
    rows, log, _ = measure(plan_of(tmp_path, Case("allreduce", 4, MB)))
    timed = [name for name, do in log if do == "time"]
    assert timed == ["own", "other", "other", "own"]
    assert [(row.method, row.median, row.grid, row.share) for row in rows] == [
        (OWN, 5.0, "32 x 512", 0.2422),
        (OTHER, 5.0, "32 x 512", 0.2422),
    ]
    assert log[-2:] == [("other", "close"), ("own", "close")]


def test_sizes_that_are_the_same_work_on_one_gpu_are_timed_once(measure, tmp_path):
    rows, _, _ = measure(plan_of(tmp_path, *(Case("allreduce", 4, size) for size in (64 * KB, 128 * KB))))
    assert {row.size for row in rows} == {"64 KB"}


@pytest.mark.parametrize("failing", ["make", "time", "verify"])
def test_a_call_that_cannot_run_says_why(measure, tmp_path, failing):
    messages, _, _ = measure(plan_of(tmp_path, Case("allreduce", 4, MB)), errors=(failing,))
    assert f"all-reduce, 1 MB, 4 ranks, {OWN}: {failing} failed" in messages
    assert not any(isinstance(message, type(row())) for message in messages)


def test_times_stand_beside_those_of_the_last_committed_report_of_the_machine(measure, tmp_path):
    folder = tmp_path / "reports" / machine.slug(MACHINE)
    Latency(rows=[row(size="1 MB", time_us=10.0)]).write(folder, MACHINE, "python -m perf latency")
    rows, _, report = measure(plan_of(tmp_path, Case("allreduce", 4, MB)))
    assert [row.of_before for row in rows] == [0.5, None]
    assert report.before == "0123456789ab, 2026-01-31"


def test_calls_and_another_checkout_can_be_named(tmp_path):
    (tmp_path / "graphar").mkdir()
    argv = ["latency", "--world-size", "4", "--only", "1 MB", "--baseline", str(tmp_path)]
    plan = Latency.plan(program.parse(argv), 1)
    assert {words_of(case)[1] for case in plan.cases} == {"1 MB"}
    assert plan.checkouts == {OWN: machine.ROOT, f"{OWN} at {tmp_path.name}": tmp_path}
    assert Latency.count(plan) == 2 * len(plan.cases)
    with pytest.raises(SystemExit, match="is no checkout of graphar"):
        Latency.plan(program.parse([*argv[:-1], str(tmp_path / "graphar")]), 1)


def test_the_report_has_both_ratios_and_names_what_became_slower():
    other = replace(row(time_us=8.0), method=OTHER, before_us=None)
    report = Latency("abc, 2026-01-31", [row(time_us=10.0, before_us=9.0), other])
    text = report.markdown(MACHINE, "a command")
    assert "| all-reduce | 2 KB | one_shot_push | 3 x 64 | 1.00 | 10 | 10 - 10 | 9 | 1.11 | 8 | 1.25 |" in text
    assert "Of the time of the last committed report (abc, 2026-01-31): 1.11, geometric mean 1.111, 1 calls." in text
    assert f"Of the time of {OTHER}: 1.25, geometric mean 1.250, 1 calls. Slower by more than 3 %: 1, the most" in text
    assert report.glance().shortfall == "1 of 1 cases; the worst is 1.11 (all-reduce, 2 KB, 4 ranks)"


def test_a_wrong_result_fails_the_run_and_has_no_ratio():
    report = Latency("abc", [row(wrong=3, before_us=9.0)])
    assert report.wrong() == [f"{OWN} at all-reduce, 2 KB"]
    assert report.rows[0].of_before is None
    assert Latency().glance().words == "nothing was timed here"


@pytest.mark.gpu(1)
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_call_between_ranks_on_one_gpu_gives_the_specification(world_size):
    server, failed = shared_gpu.Server(), {}
    for case in cases(world_size):
        try:
            server.answer({"do": "make", "case": case, "amount": None})
            if server.answer({"do": "verify"})["wrong"]:
                failed[case] = "wrong"
        except Exception as error:
            failed[case] = str(error)
    torch.cuda.synchronize()
    assert failed == {}

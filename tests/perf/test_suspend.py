"""perf suspend: plans, a measurement with stand-ins for the GPU, what counts as wrong, and the report."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.errors import UnsupportedError
from graphar.plan.sizes import MB
from graphar.runtime.engine import open_engines
from graphar.runtime.watch.stats import Memory, MemoryUse
from perf import __main__ as program
from perf import machine
from perf.harness import timing
from perf.harness.ranks import ProcessRanks
from perf.models.decoder import DECODE, PREFILL, SIZES, TINY, Case, Shard
from perf.report import read
from perf.topics import suspend as topic
from perf.topics.suspend import CASES, NEEDED, REPLAYS, Suspend, SuspendCase, SuspendPlan, partly_embedded
from tests.perf.samples import MACHINE
from tests.perf.samples import suspend_row as row

CYCLES, KEPT_NBYTES, SCRATCH_NBYTES = 3, 4096, 48 * MB
DECODED, PREFILLED = SuspendCase(Case(DECODE, 2, 16)), SuspendCase(Case(PREFILL, 8, 8), KEPT_NBYTES)


def options(world_size=None, cycles=CYCLES):
    return argparse.Namespace(world_size=world_size, cycles=cycles)


def test_steps_of_few_and_of_many_tokens_are_measured_and_one_with_a_symmetric_tensor():
    assert [case.words for case in CASES] == [
        "decode of 8 tokens",
        "prefill of 8192 tokens",
        "prefill of 8192 tokens, 256 MB kept",
    ]


def test_all_gpus_are_measured_unless_numbers_of_ranks_are_named():
    assert Suspend.plan(options(), 4) == [SuspendPlan(4, CYCLES)]
    assert Suspend.plan(options([2, 4]), 4) == [SuspendPlan(2, CYCLES), SuspendPlan(4, CYCLES)]
    assert Suspend.count(Suspend.plan(options([2, 4]), 4)) == 2 * len(CASES)


class OneRank(ProcessRanks):
    """The only rank of a group over gloo."""

    def __init__(self, *_):
        super().__init__(torch.device("cpu"), dist.HashStore())

    def time_us(self, launch, mode):
        launch()
        return 7.0


def is_suspended():
    return any(engine.suspended for engine in open_engines.values())


@pytest.fixture
def gpu(monkeypatch):
    """Stands in for a rank with a GPU, on which a communicator holds SCRATCH_NBYTES while it is not suspended."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    times = iter(range(1000, 10**6, 1000))
    scratch = {"one_shot_push": MemoryUse(SCRATCH_NBYTES, SCRATCH_NBYTES)}
    monkeypatch.setattr(graphar.Communicator, "memory", lambda self: Memory(scratch, MemoryUse(0, 0)))
    monkeypatch.setattr(timing, "capture", lambda run: run)
    monkeypatch.setattr(topic, "free_nbytes", lambda: 10**9 + SCRATCH_NBYTES * is_suspended())
    monkeypatch.setattr(topic, "host_time_us", lambda call: call() or next(times))
    monkeypatch.setattr(topic.ranks_of, "join", OneRank)
    monkeypatch.setattr(topic.ranks_of, "run", lambda processes, work: work(0, 0))
    yield
    dist.destroy_process_group()


def measured(*cases):
    return list(Suspend().measure([SuspendPlan(1, CYCLES, TINY, 2, cases)]))


def after_resumption(monkeypatch, act):
    """Has ``act`` run behind every resumption."""
    resume = graphar.resume

    def resume_and_act():
        resume()
        act()

    monkeypatch.setattr(graphar, "resume", resume_and_act)


def test_a_case_is_suspended_and_resumed_in_cycles_and_gives_its_memory_back(gpu):
    (result,) = measured(DECODED)

    assert (result.words, result.cycles, result.wrong) == ("decode of 2 tokens", CYCLES, 0)
    assert (result.scratch, result.symmetric_nbytes) == ({"one_shot_push": SCRATCH_NBYTES}, 0)
    assert (result.freed_nbytes, result.grown_nbytes) == (SCRATCH_NBYTES, 0)
    # suspensions and resumptions took turns: 1, 3 and 5 ms, and 2, 4 and 6 ms
    assert (result.first_suspend_us, result.suspend_us["median"]) == (1000.0, 3000.0)
    assert (result.first_resume_us, result.resume_us["median"]) == (2000.0, 4000.0)
    assert result.before_us == result.after_us == {"median": 7.0, "p10": 7.0, "p99": 7.0}


def test_the_content_of_symmetric_tensors_is_kept_where_there_are_some(gpu, monkeypatch):
    asked, suspend = [], graphar.suspend
    monkeypatch.setattr(graphar, "suspend", lambda keep: asked.append(keep) or suspend(keep))

    assert [row.wrong for row in measured(DECODED, PREFILLED)] == [0, 0]
    assert asked == [None] * CYCLES + ["symmetric"] * CYCLES


def test_the_least_that_was_freed_and_the_most_that_was_not_given_back_are_told(gpu, monkeypatch):
    free = iter([100, 148, 99, 99, 139, 99, 99, 147, 99])  # before, while suspended and after, in each cycle
    monkeypatch.setattr(topic, "free_nbytes", lambda: next(free))

    (result,) = measured(DECODED)

    assert (result.freed_nbytes, result.grown_nbytes) == (40, 1)


def test_a_bit_that_differs_after_a_resumption_is_wrong_in_every_replay(gpu, monkeypatch):
    flips = []
    after_resumption(monkeypatch, lambda: flips.append(1))

    def captured(run):
        def replay():
            run()
            run.func.__self__.result.view(torch.int16)[1, 5] ^= len(flips[:1])

        return replay

    monkeypatch.setattr(timing, "capture", captured)

    assert [row.wrong for row in measured(DECODED)] == [REPLAYS * CYCLES]


def test_a_replay_that_computes_nothing_leaves_nothing_right(gpu, monkeypatch):
    ended = []
    after_resumption(monkeypatch, lambda: ended.append(1))
    monkeypatch.setattr(timing, "capture", lambda run: lambda: None if ended else run())

    (result,) = measured(DECODED)

    assert result.wrong == REPLAYS * CYCLES * result.tokens * SIZES[TINY].hidden


def test_bytes_of_a_symmetric_tensor_that_do_not_come_back_are_wrong(gpu, monkeypatch):
    made, empty = [], graphar.Communicator.empty
    monkeypatch.setattr(
        graphar.Communicator, "empty", lambda *args, **options: made.append(empty(*args, **options)) or made[0]
    )

    def lose():
        if len(made) == 1:
            made.append(made[0][:5].bitwise_not_())

    after_resumption(monkeypatch, lose)

    assert [row.wrong for row in measured(PREFILLED)] == [5 * CYCLES]


def test_memory_that_cannot_be_given_back_is_told_for_each_case(gpu, monkeypatch):
    def refuse(keep):
        raise UnsupportedError("suspend: no virtual memory\nmore")

    monkeypatch.setattr(graphar, "suspend", refuse)

    assert measured(DECODED, PREFILLED) == [
        "1 rank, decode of 2 tokens: suspend: no virtual memory",
        "1 rank, prefill of 8 tokens, 4 KB kept: suspend: no virtual memory",
    ]


def test_ranks_without_kernels_are_told(gpu, monkeypatch):
    monkeypatch.setattr(graphar.Communicator, "memory", lambda self: Memory({}, MemoryUse(0, 0)))

    (told,) = measured(DECODED)

    assert told.startswith("1 rank, decode of 2 tokens: graphar's kernels do not reach all ranks")


def test_each_token_is_embedded_on_one_rank():
    x = torch.randn(9, 8).bfloat16()

    parts = [partly_embedded(x, Shard(rank, 4, torch.device("cpu"))) for rank in range(4)]

    assert sum(parts).equal(x)
    assert all(part.count_nonzero() < x.count_nonzero() for part in parts)


def test_a_run_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "describe", lambda: MACHINE)
    monkeypatch.setattr(topic.ranks_of, "run", lambda processes, work: iter([row()]))

    assert program.main(["suspend", "--out", str(tmp_path)]) == 0

    assert read(tmp_path / "h200x4", Suspend).report.rows == [row()]
    assert "All 1 results were verified: none is wrong." in (tmp_path / "h200x4" / "suspend.md").read_text()


def prefill(**more):
    """A row of a prefill that kept 256 MB and gave nine tenths of its memory back."""
    time_us = {"median": 40000.0, "p10": 30000.0, "p90": 50000.0}
    held = {"scratch": {"matmul_allreduce": 64 * MB}, "symmetric_nbytes": 256 * MB, "freed_nbytes": 288 * MB}
    return row(phase="prefill", tokens=8192, suspend_us=time_us, grown_nbytes=2 * MB, **held, **more)


def test_a_table_has_the_memory_and_another_the_times():
    memory, times = Suspend([row(), prefill()]).sections()

    assert [memory.title, times.title] == [f"2 ranks, 4 layers of llama-3-70b: {what}" for what in ("memory", "times")]
    assert memory.body[0].splitlines()[2:] == [
        "| decode of 8 tokens | 32.0 | 0.0 | 32.0 | 1.00 | 0.0 | allreduce_rmsnorm_one_shot 16.0, one_shot_push 16.0 |",
        "| prefill of 8192 tokens, 256 MB kept | 64.0 | 256.0 | 288.0 | 0.90 | 2.0 | matmul_allreduce 64.0 |",
    ]
    decode, more = times.body[0].splitlines()[2:]
    assert decode == (
        "| decode of 8 tokens | 32.0 | 2.00 (2.00 to 2.00) | 5.00 | 3.00 (3.00 to 3.00) | 6.00"
        " | 1000.0 | 1010.0 | 1.01 | 0 |"
    )
    assert "| 320.0 | 40.00 (30.00 to 50.00) | 5.00 |" in more


def test_numbers_of_ranks_have_sections_of_their_own():
    sections = Suspend([row(), row(world_size=4)]).sections()

    assert [section.title.split(",")[0] for section in sections] == ["2 ranks", "2 ranks", "4 ranks", "4 ranks"]


def test_a_glance_is_the_time_to_resume_the_most_memory():
    glance = Suspend([prefill(), row()]).glance()

    assert glance.headline == "3.00 ms"
    assert glance.words == "to resume 320.0 MB between 2 ranks; suspending took 40.00 ms and gave 90% of that back"


def test_a_wrong_result_is_named():
    report = Suspend([row(wrong=3), prefill()])

    assert report.wrong() == ["graphar at 4 layers of llama-3-70b, decode of 8 tokens"]
    assert "| **3 WRONG** |" in report.sections()[1].body[0]
    assert Suspend([row(wrong=3)]).glance().headline == "-"


def test_two_runs_are_compared_by_suspensions_resumptions_and_steps():
    timed = Suspend([prefill()]).timed()

    medians = {call.method: call.median for call in timed}
    assert medians == {"suspend": 40e3, "resume": 3e3, "step after": 1010.0}
    assert (timed[0].time_us["p10"], timed[0].time_us["p90"]) == (30e3, 50e3)


def test_a_report_without_rows_has_no_figures():
    report = Suspend(skipped=[NEEDED])

    assert (report.glance().headline, report.sections()) == ("-", [])

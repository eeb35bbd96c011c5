"""Suspend and resume: communicators on the CPU, and runners on a driver on the CPU (tests/fake_gpu.py)."""

import contextlib
import os
import re
import signal
import time
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.errors import CommunicatorError, ConcurrentCallError, DriverError, GrapharError, UnsupportedError
from graphar.plan.algorithms import Algorithm
from graphar.plan.scratch import SENTINEL
from graphar.ranks import capture
from graphar.ranks.rendezvous import Alone, exchange_json
from graphar.runtime import runner as runners
from graphar.runtime.arguments import Counters, Record
from graphar.runtime.engine import open_engines
from graphar.runtime.memory import suspension
from graphar.runtime.memory.peer_memory import LocalMemory, ProcessMemory
from graphar.runtime.memory.suspension import Suspension
from graphar.runtime.runner import COUNTERS_NBYTES, Runner
from graphar.runtime.watch.stats import Memory, MemoryUse, memory_of
from tests.fake_gpu import FakeDriver, descriptors, installed, tensor_at
from tests.processes import on_ranks, run_ranks

REFUSED = r"this communicator is suspended; call its resume\(\) on every rank before"


def test_calls_of_a_suspended_communicator_are_errors_that_name_resume(pair):
    xs = [torch.ones(8, 8)] * 2
    for _ in range(3):  # the last repeats the one before
        pair.allreduce(xs)

    pair.suspend()

    for op, call in {
        "allreduce": lambda: pair.allreduce(xs),
        "reducescatter": lambda: graphar.reducescatter(xs, pair),
        "allgather": lambda: pair.allgather(xs),
        "fused_matmul_allreduce": lambda: graphar.fused_matmul_allreduce(xs, xs, group=pair),
        "prepare": pair.prepare,
        "empty": lambda: pair.empty(3),
        "explain": lambda: pair.explain(xs),
    }.items():
        named = "allreduce" if op == "explain" else op  # an explanation is of a call
        with pytest.raises(CommunicatorError, match=f"{named}: {REFUSED}"):
            call()


def test_after_resume_calls_work_and_go_by_the_plans_they_had(pair):
    xs = [torch.arange(8.0)] * 2
    pair.allreduce(xs)
    before = pair.stats()

    pair.suspend()
    pair.resume()

    assert pair.allreduce(xs)[1].tolist() == [2 * one for one in range(8)]
    assert pair.stats().plans == before.plans
    assert pair.stats().calls[0].calls == 2


def test_a_compiled_call_is_refused_meanwhile_and_works_afterwards(pair):
    compiled = torch.compile(lambda x, y: graphar.allreduce([x, y], pair)[0], backend="eager")
    x = torch.ones(4)
    compiled(x, x)

    pair.suspend()
    with pytest.raises(CommunicatorError, match=REFUSED):
        compiled(x, x)
    pair.resume()

    assert compiled(x, x).tolist() == [2.0] * 4


def test_to_suspend_twice_and_to_resume_twice_changes_nothing(pair):
    for change in (pair.suspend, pair.suspend, pair.resume, pair.resume):
        change()

    assert pair.allreduce([torch.ones(3)] * 2)[0].tolist() == [2.0] * 3


@pytest.mark.parametrize("keep", ["all", "", 1, True])
def test_what_cannot_be_kept_is_refused(pair, keep):
    for suspend in (pair.suspend, graphar.suspend):
        with pytest.raises(ValueError, match='suspend: keep must be "symmetric" or None, got'):
            suspend(keep)


def test_a_closed_communicator_is_neither_suspended_nor_resumed(pair):
    pair.close()

    for change in (pair.suspend, pair.resume):
        with pytest.raises(CommunicatorError, match="this communicator is closed"):
            change()


def test_a_suspended_communicator_can_be_closed(pair):
    pair.suspend()
    pair.close()

    assert pair.closed


def test_without_kernels_there_is_no_memory(pair):
    pair.allreduce([torch.ones(3)] * 2)

    assert pair.memory() == Memory({}, MemoryUse(0, 0))


def test_all_communicators_of_a_process_are_suspended_and_resumed(pair):
    with graphar.Communicator(devices=["cpu"] * 3) as other:
        graphar.suspend()
        refused = [one.engine.suspended for one in (pair, other)]
        graphar.resume()

        assert refused == [True, True]
        assert [one.engine.suspended for one in (pair, other)] == [False, False]


@on_ranks(3)
def test_the_calls_of_a_process_group_are_suspended_too(rank, world_size):
    x = torch.full((4,), float(rank))
    graphar.allreduce(x)
    with graphar.Communicator() as other:
        graphar.suspend("symmetric")
        said = []
        for group in (None, other):
            with pytest.raises(CommunicatorError) as error:
                graphar.allreduce(x, group)
            said.append(str(error.value))
        graphar.resume()
        said, *sums = said, graphar.allreduce(x).tolist(), other.allreduce(x).tolist()
        assert said == ["allreduce: this communicator is suspended; call its resume() on every rank before"] * 2
        assert sums == [[3.0] * 4] * 2


@on_ranks(2)
def test_ranks_that_differ_in_what_to_keep_are_told_and_go_on(rank, world_size):
    communicator = graphar.Communicator(timeout_s=10)
    with pytest.raises(CommunicatorError) as error:
        communicator.suspend("symmetric" if rank else None)
    said = "suspend: ranks must pass the same keep, got, in rank order, ['None', 'symmetric']"
    assert (str(error.value), communicator.allreduce(torch.ones(2)).tolist()) == (said, [2.0, 2.0])


def miss(rank, world_size, step):
    """What rank 0 is told if rank 1 does not come to a step; whether calls are refused afterwards."""
    communicator = graphar.Communicator(timeout_s=3)
    communicator.allreduce(torch.ones(2))
    if step == "resume":
        communicator.suspend()
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.wait(["rank 0 is done"])
        return None
    with pytest.raises(CommunicatorError) as error:
        getattr(communicator, step)()
    begin = time.monotonic()
    for again in (getattr(communicator, step), partial(communicator.allreduce, torch.ones(2))):
        with pytest.raises(CommunicatorError):
            again()
    took_s = time.monotonic() - begin
    store.set("rank 0 is done", "")
    return str(error.value), took_s


@pytest.mark.parametrize("step", ["suspend", "resume"])
def test_a_rank_that_does_not_come_is_named_within_the_deadline_and_at_once_the_next_time(step):
    (said, took_s), _ = run_ranks(miss, 2, step)

    assert took_s < 1
    assert re.match(rf"{step}: rank 0 waited [123] s for rank\(s\) \[1\];", said)


def die(rank, world_size):
    communicator = graphar.Communicator(timeout_s=60)
    communicator.suspend()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicatorError) as error:
        communicator.resume()
    return str(error.value)


def test_a_rank_that_died_meanwhile_is_named_at_once():
    assert run_ranks(die, 2, lost=[1])[0] == "resume: rank 0 waits for rank(s) [1], whose process has ended"


@on_ranks(2)
def test_a_process_suspends_what_all_ranks_know_in_one_order(rank, world_size):
    x = torch.full((4,), float(rank))
    first, second = (dist.new_group([0, 1]) for _ in range(2))
    made = len(open_engines)
    if rank == 0:
        graphar.stats(second)
        graphar.stats()
        assert len(open_engines) == made
        graphar.explain(x, second)
    for group in (first, second):
        graphar.allreduce(x, group)
    if rank == 0:
        graphar.explain(graphar.allgather, x)  # makes a plan
        graphar.Communicator().stats()
    graphar.suspend()
    for group in (first, second):
        with pytest.raises(CommunicatorError, match=REFUSED):
            graphar.allreduce(x, group)
    graphar.resume()
    assert [graphar.allreduce(x, group).tolist() for group in (first, second, None)] == [[1.0] * 4] * 3


def fail_in_one_host(rank, world_size, step):
    """What ranks of two hosts are told if a step fails in the second; what is suspended then; and a call at the end."""
    communicator, x = graphar.Communicator(hosts=[[0], [1]], timeout_s=20), torch.ones(4)
    outer = communicator.engine
    communicator.allreduce(x, algorithm="hierarchical")
    outer.hierarchy.kernels = inner = outer._part(outer.hierarchy._groups[0], 20.0)

    def fail(*_):
        inner.suspended = step in ("give_back", "resume")
        raise DriverError("no room")

    if rank == 1:
        setattr(inner, step, fail if step != "why_stays" else lambda: "it is a sandbox")
    if step == "resume":
        graphar.suspend()
    with pytest.raises(GrapharError) as error:
        graphar.resume() if step == "resume" else graphar.suspend()
    suspended = outer.suspended, inner.suspended
    vars(inner).pop(step, None)
    graphar.resume()
    return type(error.value).__name__, suspended, communicator.allreduce(x, algorithm="hierarchical").tolist()


@pytest.mark.parametrize(
    ("step", "told", "suspended"),
    [
        ("why_stays", ("UnsupportedError", "UnsupportedError"), ((False, False), (False, False))),
        ("end_work", ("CommunicatorError", "DriverError"), ((False, False), (False, False))),
        ("give_back", ("CommunicatorError", "DriverError"), ((True, True), (True, True))),
        ("resume", ("CommunicatorError", "DriverError"), ((True, False), (True, True))),
    ],
)
def test_a_failure_in_one_host_is_one_in_all_hosts(step, told, suspended):
    assert run_ranks(fail_in_one_host, 2, step) == [(*one, [2.0] * 4) for one in zip(told, suspended, strict=True)]


class Member:
    """A rank on a driver on the CPU."""

    def __init__(self, rank):
        self.rank, self.device, self.record, self.abort = rank, rank, Record(), 0

    def clear_record(self):
        given_up, self.record = bool(self.record.kind), Record()
        return given_up


@contextlib.contextmanager
def running(make_memory, ranks, rendezvous, *algorithms):
    """A runner of two ranks with scratch of some algorithms and a symmetric tensor, on a driver on the CPU."""
    with pytest.MonkeyPatch.context() as patch, installed(FakeDriver()) as fake:
        patch.setattr(torch.cuda, "synchronize", lambda device: fake.synchronized.append(device))
        patch.setattr(runners, "is_capturing", lambda device: False)
        patch.setattr(Runner, "_read_counters", lambda self, member: {})
        patch.setattr(runners, "calls_begun", begun)
        patch.setattr(suspension, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        fake.synchronized = []
        memory = make_memory()
        made = Runner([*map(Member, ranks)], 2, None, memory, rendezvous, multicast_memory=None)
        for one in algorithms:
            made.regions[one] = made._allocate(one)
        made.symmetric.buffers.append(memory.allocate(2 << 20))
        made.fake = fake
        yield made


@pytest.fixture
def runner():
    """A runner of two ranks of this process."""
    algorithms = Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PIPELINED
    with running(lambda: LocalMemory([0, 1]), (0, 1), Alone(), *algorithms) as made:
        yield made


def begun(counters, device):
    return Counters.from_address(counters).epoch_state[0].epoch


def suspended(runner, keeps_tensors=False):
    made = Suspension(runner, keeps_tensors)
    made.give_back()
    return made


def counters_of(runner, algorithm, rank=0):
    return Counters.from_address(runner.regions[algorithm].pointers[rank])


def test_nothing_but_a_guard_stays_resident(runner):
    before = memory_of(runner.regions, runner.symmetric.buffers)

    suspended(runner)

    after = memory_of(runner.regions, runner.symmetric.buffers)
    assert before.total.resident_nbytes == before.total.reserved_nbytes == after.total.reserved_nbytes
    assert after.total.resident_nbytes == 0
    assert len(runner.fake.handles) == 1  # the guard's
    assert set(before.scratch) == {"one_shot_push", "two_shot_pipelined"}


def test_a_guard_tells_every_kernel_that_its_call_is_aborted_and_not_alone(runner):
    suspended(runner)

    for algorithm in runner.regions:
        for rank in range(2):
            found = counters_of(runner, algorithm, rank)
            assert {(one.epoch, one.aborted) for one in found.epoch_state} == {(0, 1)}
            assert set(found.busy) == {1}


def test_resumed_scratch_is_as_at_the_first_call(runner):
    algorithm = Algorithm.ONE_SHOT_PUSH
    region = runner.regions[algorithm]
    pointers, needs = list(region.pointers), algorithm.row.scratch(2)
    for pointer in pointers:
        tensor_at(pointer, region.nbytes).fill_(0x33)

    suspended(runner).resume()

    assert region.pointers == pointers
    for pointer in pointers:
        counters, scratch = tensor_at(pointer, region.nbytes).split([COUNTERS_NBYTES, needs.nbytes])
        assert not counters.any()
        assert scratch.eq(SENTINEL).all()
    assert runner.fake.handles == {}


def test_launches_before_are_counted_on(runner):
    counters_of(runner, Algorithm.ONE_SHOT_PUSH).epoch_state[0].epoch = 5
    going_on = suspended(runner)
    assert runner.launches() == {"one_shot_push": 5}

    going_on.resume()
    counters_of(runner, Algorithm.ONE_SHOT_PUSH).epoch_state[0].epoch = 3

    assert runner.launches() == {"one_shot_push": 8}


def test_launches_are_counted_once_where_a_suspension_fails(runner, monkeypatch):
    counters_of(runner, Algorithm.ONE_SHOT_PUSH).epoch_state[0].epoch = 5
    monkeypatch.setattr(suspension, "_pinned", lambda nbytes: torch.empty(-1))

    with pytest.raises(RuntimeError):
        Suspension(runner, keeps_tensors=True)

    assert runner.launches() == {"one_shot_push": 5}


@pytest.mark.parametrize("keeps", [True, False])
def test_symmetric_tensors_are_kept_if_asked(runner, keeps):
    (buffer,) = runner.symmetric.buffers
    for rank, pointer in enumerate(buffer.pointers):
        tensor_at(pointer, buffer.nbytes).fill_(rank + 1)

    suspended(runner, keeps).resume()

    found = [tensor_at(pointer, buffer.nbytes).unique().tolist() for pointer in buffer.pointers]
    assert found == ([[1], [2]] if keeps else [[0], [0]])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_graph_that_was_replayed_meanwhile_is_warned_of_once(runner, rank):
    going_on = suspended(runner)
    runner.members[rank].record.kind = 2  # `overlapped` in cuda_src/device/sync/record.cuh

    with pytest.raises(CommunicatorError, match="a captured graph was replayed while its communicator was suspended"):
        runner.raise_failure()
    with pytest.warns(RuntimeWarning, match="a captured graph was replayed while its communicator was suspended"):
        going_on.resume()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        suspended(runner).resume()


def test_memory_that_must_stay_is_a_refusal_with_the_reason(pair, runner):
    pair.engine.runner = runner
    runner.memory.why_stays = "rank 1: it is a sandbox"

    with pytest.raises(UnsupportedError, match="cannot be given back while its addresses stay: rank 1: it is a sandb"):
        pair.suspend()
    assert pair.memory().total.resident_nbytes
    pair.engine.runner = None


SMALL = Algorithm.ALLGATHER_FLAGGED, Algorithm.MATMUL_ONE_SHOT  # with little scratch


def what_is_held(runner):
    fake = runner.fake
    return (
        memory_of(runner.regions, runner.symmetric.buffers),
        dict(fake.mapped),
        dict(fake.reserved),
        dict(fake.handles),
        descriptors(),
    )


def holds_again(runner, before, within_s=10.0):
    """Whether a runner soon holds what it held ``before``: the kernel closes connections late, also those of before."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        *held, opened = what_is_held(runner)
        if held == before[:-1] and opened <= before[-1]:
            before[-1] = opened
            return True
        time.sleep(0.01)
    return False


def fail_everywhere(engine, step, fails_here=True):
    """Lets each driver call of a suspension or a resumption fail in turn, here or meanwhile in another process.

    Returns for each whether scratch was mapped to memory or to the guard, and whether another cycle then kept the
    symmetric tensor, armed the scratch, and left nothing.
    """
    runner, seen, reached = engine.runner, [], True
    (buffer,), before = runner.symmetric.buffers, [*what_is_held(runner)]
    ranks = [member.rank for member in runner.members]
    counters = [(one, rank) for one in runner.regions for rank in ranks]
    while reached:
        content = len(seen) % 100 + 1
        for rank in ranks:
            tensor_at(buffer.pointers[rank], buffer.nbytes).fill_(content)
        for one in counters:
            counters_of(runner, *one).epoch_state[3].epoch = 7
        if step == "resume":
            engine.suspend("symmetric")
        runner.fake.succeeding = len(seen) if fails_here else None
        with contextlib.suppress(GrapharError):
            engine.suspend("symmetric") if step == "suspend" else engine.resume()
        regions = runner.regions
        mapped = all(
            runner.fake.mapped.keys() >= {*regions[algorithm].pointers}  # the peers' too
            and counters_of(runner, algorithm, rank).epoch_state[3].aborted != regions[algorithm].resident
            for algorithm, rank in counters
        )
        reached = True in exchange_json(engine.rendezvous(), "look", fails_here and runner.fake.succeeding < 0)
        runner.fake.succeeding = None
        engine.suspend("symmetric")
        engine.resume()
        kept = [tensor_at(buffer.pointers[rank], buffer.nbytes).unique().tolist() for rank in ranks]
        armed = not any(counters_of(runner, *one).epoch_state[3].epoch for one in counters)
        seen.append((mapped, kept == [[content]] * len(ranks), armed, holds_again(runner, before)))
    return seen


@pytest.mark.parametrize("step", ["suspend", "resume"])
def test_a_driver_call_that_fails_halfway_leaves_all_mapped_and_a_second_resume_works(pair, step):
    with running(lambda: LocalMemory([0, 1]), (0, 1), Alone(), *SMALL) as pair.engine.runner:
        seen = fail_everywhere(pair.engine, step)
        pair.engine.runner = None

    assert len(seen) > 20
    assert seen == [(True, True, True, True)] * len(seen)


def fail_in_processes(rank, world_size, step, poor):
    engine = graphar.Communicator(timeout_s=30).engine
    memory = ProcessMemory(rank, engine.rendezvous())

    def checked():
        memory.check()
        return memory

    with running(checked, [rank], engine.rendezvous(), *SMALL) as engine.runner:
        seen = fail_everywhere(engine, step, rank == poor)
        engine.runner = None
        memory.close()
    return seen


@pytest.mark.parametrize("step", ["suspend", "resume"])
def test_a_failure_halfway_on_one_rank_is_one_on_all_and_a_second_resume_works(step, tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHAR_SOCKET_DIR", str(tmp_path / "sockets"))
    first, second = run_ranks(fail_in_processes, 2, step, 1)

    assert len(first) == len(second) > 20
    assert first == second == [(True, True, True, True)] * len(first)


def test_records_of_two_members_are_cleared_and_warned_of_once(runner):
    going_on = suspended(runner)
    for member in runner.members:
        member.record.kind = 2
    runner.fake.succeeding = 30  # and the resumption fails once records are cleared, or before
    with pytest.raises(DriverError):
        going_on.resume()
    runner.fake.succeeding = None

    with pytest.warns(RuntimeWarning, match="a captured graph was replayed while its communicator was suspended"):
        going_on.resume()

    assert [member.record.kind for member in runner.members] == [0, 0]


def test_work_is_waited_for_on_all_devices_and_an_earlier_failure_is_raised_with_nothing_given_back(pair, runner):
    pair.engine.runner = runner
    pair.suspend()
    assert runner.fake.synchronized == [0, 1]
    pair.resume()
    runner.members[1].record.kind = 2

    with pytest.raises(ConcurrentCallError):
        pair.suspend()

    assert (pair.engine.suspended, pair.memory().total.resident_nbytes) == (False, pair.memory().total.reserved_nbytes)
    pair.engine.runner = None


@pytest.mark.parametrize("op", ["suspend", "close"])
def test_it_is_refused_while_a_graph_is_captured(pair, runner, monkeypatch, op):
    monkeypatch.setattr(capture, "is_capturing", lambda device: device == 1)
    monkeypatch.setattr(pair.engine, "runner", runner)

    with pytest.raises(CommunicatorError, match=f"{op}: cannot be captured into a graph here; call it before or"):
        getattr(pair, op)()

    assert not pair.closed


def test_a_suspended_runner_is_closed_without_a_trace(runner):
    for member in runner.members:
        member.free = lambda: None
    going_on = suspended(runner)
    going_on.end()
    runner.close()

    assert (runner.fake.handles, runner.fake.mapped, runner.fake.reserved) == ({}, {}, {})


def test_memory_is_printed_as_a_table():
    mb = 1 << 20
    scratch = {"one_shot_push": MemoryUse(16 * mb, 0), "two_shot_push": MemoryUse(256 * mb, 0)}

    assert str(Memory(scratch, MemoryUse(mb, mb))).splitlines() == [
        "                     reserved    resident",
        "one_shot_push           16 MB         0 B",
        "two_shot_push          256 MB         0 B",
        "symmetric tensors        1 MB        1 MB",
        "total                  273 MB        1 MB",
    ]

"""Suspend and resume: communicators on the CPU, and runners on a driver on the CPU (tests/fake_gpu.py)."""

from __future__ import annotations

import os
import re
import signal
import warnings

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.errors import CommunicatorError, DriverError, UnsupportedError
from graphar.plan.algorithms import Algorithm
from graphar.plan.scratch import SENTINEL
from graphar.ranks.rendezvous import Alone
from graphar.runtime import runner as runners
from graphar.runtime import suspension
from graphar.runtime.arguments import Counters, Record
from graphar.runtime.kernels import COUNTERS_NBYTES
from graphar.runtime.memory import Memory, MemoryUse
from graphar.runtime.peer_memory import LocalMemory
from graphar.runtime.runner import Runner
from graphar.runtime.suspension import Suspension
from tests.fake_gpu import FakeDriver, installed, tensor_at
from tests.processes import run_ranks

REFUSED = r"this communicator is suspended; call its resume\(\) on every rank before"


@pytest.fixture
def pair():
    """A communicator of two ranks on the CPU."""
    with graphar.Communicator(devices=["cpu"] * 2) as communicator:
        yield communicator


# ---- calls ----------------------------------------------------------------------------------------------------------


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
        with pytest.raises(CommunicatorError, match=f"{op}: {REFUSED}"):
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


# ---- ranks in processes ---------------------------------------------------------------------------------------------


def suspend_in_processes(rank, world_size):
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
        return said, graphar.allreduce(x).tolist(), other.allreduce(x).tolist()


def test_the_calls_of_a_process_group_are_suspended_too():
    for said, *sums in run_ranks(suspend_in_processes, 3):
        assert said == ["allreduce: this communicator is suspended; call its resume() on every rank before"] * 2
        assert sums == [[3.0] * 4] * 2


def differ(rank, world_size):
    communicator = graphar.Communicator(timeout_s=10)
    with pytest.raises(CommunicatorError) as error:
        communicator.suspend("symmetric" if rank else None)
    return str(error.value), communicator.allreduce(torch.ones(2)).tolist()


def test_ranks_that_differ_in_what_to_keep_are_told_and_go_on():
    said = "suspend: ranks must pass the same keep, got, in rank order, ['None', 'symmetric']"

    assert run_ranks(differ, 2) == [(said, [2.0, 2.0])] * 2


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
    with pytest.raises(CommunicatorError):
        communicator.allreduce(torch.ones(2))
    store.set("rank 0 is done", "")
    return str(error.value)


@pytest.mark.parametrize("step", ["suspend", "resume"])
def test_a_rank_that_does_not_come_is_named_within_the_deadline(step):
    said, _ = run_ranks(miss, 2, step)

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


# ---- memory ---------------------------------------------------------------------------------------------------------


class Member:
    """A rank on a driver on the CPU."""

    def __init__(self, rank):
        self.rank, self.device, self.record, self.abort = rank, rank, Record(), 0

    def clear_record(self):
        given_up, self.record = bool(self.record.kind), Record()
        return given_up


@pytest.fixture
def runner(monkeypatch):
    """A runner of two ranks with scratch of two algorithms and a symmetric tensor, on a driver on the CPU."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(runners, "is_capturing", lambda device: False)
    monkeypatch.setattr(suspension, "is_capturing", lambda device: False)
    monkeypatch.setattr(runners, "compare_last_calls", lambda *_: None)
    monkeypatch.setattr(runners, "calls_begun", begun)
    monkeypatch.setattr(suspension, "_pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    with installed(FakeDriver()) as fake:
        memory = LocalMemory([0, 1])
        made = Runner([Member(0), Member(1)], 2, chip=None, memory=memory, rendezvous=Alone(), multicast_memory=None)
        for one in (Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PIPELINED):
            made.kernels._regions[one] = made.kernels._allocate(one)
        made.symmetric.buffers.append(memory.allocate(2 << 20))
        made.fake = fake
        yield made


def begun(counters, device):
    return Counters.from_address(counters).epoch_state[0].epoch


def suspended(runner, keeps_tensors=False):
    made = Suspension(runner)
    made.end_work(keeps_tensors)
    made.give_back()
    return made


def counters_of(runner, algorithm, rank=0):
    return Counters.from_address(runner.kernels.regions()[algorithm].pointers[rank])


def test_nothing_but_a_guard_stays_resident(runner):
    before = runner.memory_use()

    suspended(runner)

    after = runner.memory_use()
    assert before.total.resident_nbytes == before.total.reserved_nbytes == after.total.reserved_nbytes
    assert after.total.resident_nbytes == 0
    assert len(runner.fake.handles) == 1  # the guard's
    assert set(before.scratch) == {"one_shot_push", "two_shot_pipelined"}


def test_a_guard_tells_every_kernel_that_its_call_is_aborted_and_not_alone(runner):
    suspended(runner)

    for algorithm in runner.kernels.regions():
        for rank in range(2):
            found = counters_of(runner, algorithm, rank)
            assert {(one.epoch, one.aborted) for one in found.epoch_state} == {(0, 1)}
            assert set(found.busy) == {1}


def test_resumed_scratch_is_as_at_the_first_call(runner):
    algorithm = Algorithm.ONE_SHOT_PUSH
    region = runner.kernels.regions()[algorithm]
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


@pytest.mark.parametrize("keeps", [True, False])
def test_symmetric_tensors_are_kept_if_asked(runner, keeps):
    (buffer,) = runner.symmetric.buffers
    for rank, pointer in enumerate(buffer.pointers):
        tensor_at(pointer, buffer.nbytes).fill_(rank + 1)

    suspended(runner, keeps).resume()

    found = [tensor_at(pointer, buffer.nbytes).unique().tolist() for pointer in buffer.pointers]
    assert found == ([[1], [2]] if keeps else [[0], [0]])


def test_a_graph_that_was_replayed_meanwhile_is_warned_of_once(runner):
    going_on = suspended(runner)
    runner.members[1].record.kind = 2  # `overlapped` in cuda_src/device/sync/record.cuh

    with pytest.raises(CommunicatorError, match="a captured graph was replayed while its communicator was suspended"):
        runner.raise_failure()
    with pytest.warns(RuntimeWarning, match="a captured graph was replayed while its communicator was suspended"):
        going_on.resume()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        suspended(runner).resume()


def test_without_room_it_stays_suspended_and_a_second_resume_works(runner):
    going_on = suspended(runner)
    runner.fake.left_nbytes = 4 << 20

    with pytest.raises(DriverError, match="cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"):
        going_on.resume()
    assert set(counters_of(runner, Algorithm.TWO_SHOT_PIPELINED).busy) == {1}
    runner.fake.left_nbytes = 1 << 40
    going_on.resume()

    assert runner.memory_use().total.resident_nbytes == runner.memory_use().total.reserved_nbytes


def test_memory_that_must_stay_is_a_refusal_with_the_reason(runner):
    runner.memory.why_stays = "rank 1: it is a sandbox"

    with pytest.raises(UnsupportedError, match="cannot be given back while its addresses stay: rank 1: it is a sandb"):
        Suspension(runner).end_work(False)


def test_it_is_refused_while_a_graph_is_captured(runner, monkeypatch):
    monkeypatch.setattr(suspension, "is_capturing", lambda device: device == 1)

    with pytest.raises(CommunicatorError, match="suspend: a graph is being captured; end the capture before"):
        Suspension(runner).end_work(False)


def test_many_cycles_leave_nothing(runner):
    for _ in range(50):
        suspended(runner, keeps_tensors=True).resume()

    regions = 2 * (len(runner.kernels.regions()) + 1)
    assert (runner.fake.handles, len(runner.fake.mapped), len(runner.fake.reserved)) == ({}, regions, regions)


def test_a_suspended_runner_is_closed_without_a_trace(runner):
    for member in runner.members:
        member.free = lambda: None
    going_on = suspended(runner)

    going_on.end()
    runner.close()

    assert (runner.fake.handles, runner.fake.mapped, runner.fake.reserved) == ({}, {}, {})


# ---- what memory() says ---------------------------------------------------------------------------------------------


def test_memory_is_printed_as_a_table():
    mb = 1 << 20
    memory = Memory(
        {"one_shot_push": MemoryUse(16 * mb, 0), "two_shot_push": MemoryUse(256 * mb, 0)}, MemoryUse(mb, mb)
    )

    assert str(memory).splitlines() == [
        "                     reserved    resident",
        "one_shot_push         16.0 MB      0.0 MB",
        "two_shot_push        256.0 MB      0.0 MB",
        "symmetric tensors      1.0 MB      1.0 MB",
        "total                273.0 MB      1.0 MB",
    ]

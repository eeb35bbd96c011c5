"""Waits on the CPU end in bounded time and name the missing rank: over gloo, at a process's end, after a failure."""

import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import CollectiveTimeout, CommunicatorError
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.work import Sum
from graphar.ranks import hosts
from graphar.ranks.cpu import without_kernels
from graphar.ranks.cpu.transport import GroupFailed
from graphar.ranks.hosts import has_ended, identify
from graphar.ranks.rendezvous import RanksAbsent, StoreRendezvous, meet
from graphar.runtime.registry import engine_of
from tests.processes import on_ranks, run_ranks

TIMEOUT_S = 10.0
SHORT_S = 0.5


def store():
    return dist.distributed_c10d._get_default_store()


def repeat(function, *args):
    while True:
        function(*args)


def test_a_process_is_seen_to_have_ended_whether_its_parent_knows_or_not():
    # The file alone: graphar would import torch.
    code = f"import runpy; print(runpy.run_path({hosts.__file__!r})['identify'](), flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    identity = child.stdout.readline().strip()
    assert not has_ended(identity)

    child.stdin.write("\n")
    child.stdin.close()
    child.stdout.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # still a zombie
    assert has_ended(identity)
    child.wait()
    assert has_ended(identity)


def test_nothing_is_known_of_a_process_elsewhere():
    _, number, start = identify().rsplit(" ", 2)

    assert not has_ended(f"another-boot pid:[1] {number} {int(start) + 1}")


def call_until_rank_one_is_gone(rank, world_size, number, op):
    communicator = graphar.Communicator(timeout_s=TIMEOUT_S)
    call = getattr(communicator, op)
    for _ in range(20):
        call(torch.ones(1000))
    if rank == 1:
        os.kill(os.getpid(), number)
        time.sleep(TIMEOUT_S)
    begin = time.monotonic()
    with pytest.raises(CollectiveTimeout) as raised:
        repeat(call, torch.ones(1000))
    took_s = time.monotonic() - begin
    communicator.close()
    return took_s, time.monotonic() - begin, raised.value.record.peer, str(raised.value), torch.ones(3).sum().item()


@pytest.mark.parametrize("op", ["allreduce", "reducescatter", "allgather"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_that_is_killed_is_named_by_the_others(number, op):
    first, _, last = run_ranks(call_until_rank_one_is_gone, 3, number, op, lost=[1])

    for took_s, closed_s, peer, message, total in (first, last):
        assert took_s < TIMEOUT_S
        assert closed_s < 2 * TIMEOUT_S
        assert peer == 1
        assert "rank(s) [1] failed" in message
        assert "its process has ended" in message
        assert total == 3


@pytest.mark.parametrize(
    ("timeout_s", "said"),
    [
        (60.0, r"allreduce call 0 .*: a rank failed, or was not done after 0\.0 s \(connection closed\)"),
        (1e-9, r"allreduce call 0 .*: a rank failed, or was not done within 1e-09 s \(connection closed\)"),
    ],
)
def test_a_failure_says_when_it_came_and_what_is_known_of_ranks(monkeypatch, timeout_s, said):
    def fail(ranks):
        raise GroupFailed("connection closed")

    monkeypatch.setattr(without_kernels, "_GRACE_S", 0.0)
    rendezvous = StoreRendezvous(dist.HashStore(), "a communicator", 0, 1, TIMEOUT_S)
    calls, x = without_kernels.GroupCalls(SimpleNamespace(_get_backend=lambda device: None), rendezvous), torch.ones(3)

    with pytest.raises(CollectiveTimeout, match=said):
        calls.bind(Call.of(Sum(3), x), x, timeout_s, fail, Algorithm.FALLBACK)([Operands((x,), (x,))])

    assert str(*rendezvous.last_words()) == "allreduce call 0, in which it gave up, with no rank known to be missing"


def wait_for_the_dead(rank, world_size):
    rendezvous = meet(dist.group.WORLD, timeout_s=60)
    rendezvous.exchange("set-up", b"")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(RanksAbsent, match=r"whose process has ended") as raised:
        rendezvous.exchange("set-up", b"")
    return time.monotonic() - begin, raised.value.absent, raised.value.ended


def test_a_meeting_does_not_wait_for_a_process_that_has_ended():
    first, _, last = run_ranks(wait_for_the_dead, 3, lost=[1])

    for took_s, absent, ended in (first, last):
        assert took_s < 10
        assert absent == ended == [1]


@on_ranks(3)
def test_the_error_after_a_failure_says_how_to_go_on(rank, world_size):
    x = torch.full((3,), float(rank))
    engine_of(None).timeout_s = SHORT_S
    if rank == 1:
        store().wait(["others have failed"])
    else:
        for told in ("over torch.distributed: rank", r"not made: .*, as graphar.allreduce\(x, dist.new_"):
            with pytest.raises(CollectiveTimeout, match=told):
                graphar.allreduce(x)
        store().set("others have failed", "")
    assert graphar.allreduce(x, dist.new_group()).tolist() == [3.0] * 3


@pytest.mark.parametrize("numel", [3, 100_000], ids=["whole", "in shards"])
@on_ranks(2)
def test_an_error_of_the_rank_itself_is_raised_as_it_is_and_ends_nothing(rank, world_size, numel):
    warnings.simplefilter("ignore")  # torch's of its tracer
    x, errors = torch.full((numel,), float(rank)), []
    for _ in range(2):
        with pytest.raises(RuntimeError) as raised:
            torch.jit.trace(graphar.allreduce, (x,))
        errors.append(isinstance(raised.value, graphar.GrapharError))
    assert (errors, graphar.allreduce(x)[-1].item()) == ([False, False], 1.0)


@pytest.mark.promise("After a timeout the communicator refuses calls, and another one works.")
@on_ranks(2)
def test_after_a_timeout_all_but_explain_is_refused_and_another_communicator_works(rank, world_size):
    communicator = graphar.Communicator(timeout_s=SHORT_S)
    communicator.allreduce(torch.ones(3))
    if rank == 1:
        store().wait(["others have failed"])
    else:
        with pytest.raises(CollectiveTimeout) as first:
            communicator.allgather(torch.ones(3))
        for refused in (
            lambda: communicator.allreduce(torch.ones(3)),
            lambda: communicator.allreduce(torch.ones(0)),
            lambda: communicator.reducescatter(torch.ones(3)),
            lambda: communicator.empty(3),
            lambda: communicator.prepare(),
        ):
            with pytest.raises(CollectiveTimeout) as again:
                refused()
            assert str(again.value).startswith("this call was not made: an earlier one of its communicator failed")
            assert str(again.value).endswith(f"\n{first.value}")
            assert again.value.record == first.value.record
        assert communicator.explain(torch.ones(3)).algorithm == "fallback"
        store().set("others have failed", "")
    communicator.close()
    with graphar.Communicator(dist.new_group(range(world_size)), timeout_s=TIMEOUT_S) as another:
        assert another.allreduce(torch.full((3,), float(rank))).tolist() == [1.0] * 3


def end_beside_a_rank_that_stands_still(rank, world_size, pids):
    (pids / str(rank)).symlink_to(str(os.getpid()))
    if rank == 1:
        store().set("rank 1 stands still", "")
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    communicator = graphar.Communicator(timeout_s=SHORT_S)
    store().wait(["rank 1 stands still"])
    with pytest.raises(CollectiveTimeout):
        communicator.allreduce(torch.ones(3))
    return time.monotonic()


def is_gone(pid):
    if not pid.is_symlink():  # not begun
        return False
    try:
        os.kill(int(pid.readlink().name), 0)
    except ProcessLookupError:
        return True
    return False


def test_a_process_ends_at_once_though_a_rank_stands_still(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        ranks = pool.submit(run_ranks, end_beside_a_rank_that_stands_still, 2, tmp_path, timeout_s=60, lost=[1])
        while not ranks.done() and not is_gone(tmp_path / "0"):
            time.sleep(0.01)
        end = time.monotonic()
        if not ranks.done():
            os.kill(int((tmp_path / "1").readlink().name), signal.SIGKILL)

    timed_out, _ = ranks.result()
    assert end - timed_out < 20  # the group's time-out is 60


def lose_the_store(rank, world_size):
    """Over a store that rank 1 serves, at a port that it holds from the beginning."""
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank == 1 else None
    said = [served and served.port]
    dist.broadcast_object_list(said, src=1)
    served = served or dist.TCPStore("127.0.0.1", said[0], is_master=False)
    dist.distributed_c10d._world.pg_map[dist.group.WORLD] = ("gloo", served)
    communicator = graphar.Communicator(timeout_s=20)
    if rank == 1:
        communicator.engine.rendezvous().exchange("set-up", b"")
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicatorError, match="does not reach the process group's store"):
        repeat(communicator.engine.rendezvous().exchange, "set-up", b"")


def test_a_store_that_ended_is_an_error_of_graphars():
    run_ranks(lose_the_store, 2, lost=[1])

"""Ranks that meet through a store, and errors about a rank that does not come or whose step fails."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar import CollectiveTimeout, CommunicatorError, CompileError
from graphar.ranks.rendezvous import Alone, RanksAbsent, StoreRendezvous
from tests.processes import on_ranks, run_ranks

PATIENCE_S = 30.0


def meet(world_size, act, *, timeout_s=PATIENCE_S, ranks=None, prefix="test", store=None):
    """Runs ``act(rendezvous)`` in a thread for each rank that comes. Returns its results or exceptions by rank."""
    store = store or dist.HashStore()

    def run(rank):
        try:
            return act(StoreRendezvous(store, prefix, rank, world_size, timeout_s))
        except Exception as error:
            return error

    ranks = range(world_size) if ranks is None else ranks
    with ThreadPoolExecutor(len(ranks)) as pool:
        return dict(zip(ranks, pool.map(run, ranks), strict=True))


def test_every_rank_gets_all_payloads_of_each_meeting_in_rank_order():
    results = meet(3, lambda r: [r.exchange("counting", b"%d of %d" % (call, r.rank)) for call in range(5)])

    of_meetings = [[b"%d of %d" % (call, rank) for rank in range(3)] for call in range(5)]
    assert results == dict.fromkeys(range(3), of_meetings)


def test_communicators_with_other_prefixes_do_not_mix():
    store = dist.HashStore()
    first = meet(2, lambda r: r.exchange("greeting", b"first"), prefix="first", store=store)
    second = meet(2, lambda r: r.exchange("greeting", b"second"), prefix="second", store=store)

    assert first[0] == [b"first"] * 2
    assert second[0] == [b"second"] * 2


def test_absent_ranks_are_named_within_the_deadline():
    begin = time.monotonic()
    results = meet(4, lambda r: r.exchange("set-up", b""), timeout_s=0.5, ranks=[0, 2])

    assert 0.5 <= time.monotonic() - begin < 10
    for rank, error in results.items():
        assert isinstance(error, CommunicatorError)
        assert str(error) == (
            f"set-up: rank {rank} waited 0.5 s for rank(s) [1, 3]; every rank of the group must make the same graphar "
            "calls in the same order"
        )


def test_a_rank_that_is_late_is_waited_for_beside_one_that_has_ended(monkeypatch):
    monkeypatch.setattr("graphar.ranks.rendezvous._LIVENESS_S", 0.02)
    monkeypatch.setattr("graphar.ranks.rendezvous.has_ended", lambda identity: identity == "ended")
    store = dist.HashStore()
    store.set("test/process/2", "ended")

    def come(r):
        time.sleep(0.2 * r.rank)
        return r.exchange("greeting", b"")

    errors = meet(3, come, ranks=[0, 1], store=store).values()

    assert [(type(error), error.absent, error.ended) for error in errors] == [(RanksAbsent, [2], [2])] * 2


def test_the_deadline_is_for_the_whole_meeting():
    def act(rendezvous):
        time.sleep(0.8 * rendezvous.rank)
        return rendezvous.exchange("set-up", b"")

    results = meet(4, act, timeout_s=1.2)

    assert str(results[0]).startswith("set-up: rank 0 waited 1.2 s for rank(s) [2, 3]")
    assert str(results[3]).startswith("set-up: rank 3 came too late: set-up: rank 0 waited 1.2 s for rank(s) [2, 3]")
    assert {type(result) for result in results.values()} == {RanksAbsent}


def test_ranks_that_come_for_different_things_are_told_so():
    results = meet(3, lambda r: r.exchange("closing" if r.rank == 1 else "set-up", b""))

    for error in results.values():
        assert isinstance(error, CommunicatorError)
        assert str(error) == (
            "ranks must make the same graphar calls in the same order, got\n"
            "rank 0: set-up\nrank 1: closing\nrank 2: set-up"
        )


def test_meetings_leave_nothing_behind_in_the_store():
    store = dist.HashStore()
    meet(2, lambda r: r.exchange("counting", b""), store=store)
    before = store.num_keys()
    meet(2, lambda r: [r.exchange("counting", b"") for _ in range(50)], store=store, prefix="longer")

    assert store.num_keys() <= 2 * before + 2


def test_ranks_that_met_less_often_meet_to_close():
    def act(rendezvous):
        for _ in range(rendezvous.rank):
            with pytest.raises(CommunicatorError):
                rendezvous.exchange("set-up", b"", timeout_s=0.1)
        rendezvous.close(0)

    assert meet(2, act) == {0: None, 1: None}


def test_where_all_succeed_each_gets_its_own_result():
    assert meet(3, lambda r: r.agree("adding", lambda: r.rank + 1)) == {0: 1, 1: 2, 2: 3}


@pytest.mark.parametrize("failing", [(1,), (0, 2)])
def test_a_step_that_fails_on_some_ranks_fails_on_all_and_names_them(failing):
    def step(rank):
        if rank in failing:
            raise CompileError(f"{rank}.cu", 12, "no such thing")

    results = meet(3, lambda r: r.agree("loading a kernel", lambda: step(r.rank)))

    lines = [f"rank {rank}: CompileError: {rank}.cu:12: does not compile\nno such thing" for rank in failing]
    for rank, error in results.items():
        assert isinstance(error, CompileError if rank in failing else CommunicatorError)
        assert rank in failing or str(error) == "\n".join(["loading a kernel failed on another rank", *lines])


def test_ranks_can_meet_again_after_a_failure():
    def act(rendezvous):
        with pytest.raises((CommunicatorError, ZeroDivisionError)):
            rendezvous.agree("dividing", lambda: 1 // rendezvous.rank)
        return rendezvous.exchange("greeting", b"%d" % rendezvous.rank)

    assert meet(2, act) == {0: [b"0", b"1"], 1: [b"0", b"1"]}


def test_what_needs_the_store_fails_once_it_was_left():
    def act(rendezvous):
        rendezvous.leave()
        words = [str(word) for word in rendezvous.last_words()]
        rendezvous.exchange("greeting", words[0].encode())

    error = meet(1, act)[0]
    assert isinstance(error, CommunicatorError)
    assert str(error) == "rank 0 left the store: its group was destroyed, or communicator closed"


def test_a_rank_that_has_made_fewer_calls_is_behind():
    store = dist.HashStore()
    first, second = (StoreRendezvous(store, "test", rank, 2, PATIENCE_S) for rank in range(2))
    for rendezvous, call in ((first, "call 0"), (second, "call 0"), (first, "call 1")):
        rendezvous.note(call)

    assert [(word.what, word.behind) for word in first.last_words()] == [("call 1", False), ("call 0", True)]
    assert [(word.what, word.behind) for word in second.last_words()] == [("call 1", False), ("call 0", False)]


def test_words_are_published_for_all_ranks_until_they_are_withdrawn_or_the_store_is_left():
    store = dist.HashStore()
    first, second = (StoreRendezvous(store, "test", rank, 2, PATIENCE_S) for rank in range(2))
    first.publish("a call", "allreduce of 4 elements")
    first.publish("another", "allreduce of 5 elements")
    assert second.published("a call", 0) == "allreduce of 4 elements"
    assert (second.published("a call", 1), second.published("a third", 0)) == (None, None)

    first.withdraw("another")
    assert second.published("another", 0) is None

    class Between(dist.HashStore):
        """A store in which another rank withdraws its words between two questions."""

        def check(self, keys):
            found = super().check(keys)
            StoreRendezvous(self, "another", 0, 2, PATIENCE_S).withdraw("a call")
            return found

    between = Between()
    between.set_timeout(timedelta(seconds=0.1))
    other = StoreRendezvous(between, "another", 0, 2, PATIENCE_S)
    other.publish("a call", "allreduce of 6 elements")
    assert StoreRendezvous(between, "another", 1, 2, PATIENCE_S).published("a call", 0) == "allreduce of 6 elements"

    second.leave()
    second.publish("a call", "nothing")
    second.withdraw("a call")
    assert (first.published("a call", 0), first.published("a call", 1)) == ("allreduce of 4 elements", None)
    assert second.published("a call", 0) is None


def test_a_process_alone_waits_for_nobody():
    assert Alone().exchange("greeting", b"me") == [b"me"]
    assert Alone().agree("adding", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        Alone().agree("dividing", lambda: 1 // 0)


def call_without_rank_one(rank, world_size, in_the_call):
    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["others are done/0", "others are done/2"])
        return None
    communicator = graphar.Communicator(timeout_s=PATIENCE_S if in_the_call else 0.5)
    begin = time.monotonic()
    with pytest.raises(
        CollectiveTimeout, match=r"rank\(s\) \[1\] failed, or did not take part within 0\.5 s"
    ) as raised:
        communicator.allreduce(torch.ones(1000), timeout_s=0.5 if in_the_call else None)
    took_s = time.monotonic() - begin
    dist.distributed_c10d._get_default_store().set(f"others are done/{rank}", "")
    return took_s, raised.value.record


@pytest.mark.promise("A wait ends at its deadline with a record of who is missing; torch goes on working.")
@pytest.mark.parametrize("in_the_call", [False, True], ids=["communicator's", "call's"])
def test_a_rank_that_never_calls_lets_the_others_go_at_the_deadline(in_the_call):
    first, absent, last = run_ranks(call_without_rank_one, 3, in_the_call)

    assert absent is None
    for rank, (took_s, record) in zip((0, 2), (first, last), strict=True):
        assert 0.5 <= took_s < 10
        assert (record.op, record.algorithm, record.sequence) == ("allreduce", "fallback", 0)
        assert (record.rank, record.peer) == (rank, 1)
        assert record.last_calls[1] == "no call known"
        assert record.last_calls[rank] == "allreduce of [1000] torch.float32, call 0 over torch.distributed"


@on_ranks(3)
def test_a_rank_that_comes_late_but_in_time_is_waited_for(rank, world_size):
    if rank == 1:
        time.sleep(1)
    assert graphar.allreduce(torch.ones(3), timeout_s=PATIENCE_S).tolist() == [3.0] * 3


def meet_others(rank, world_size, backend, folder):
    """Process 0 meets process 1, and then process 2, which has met nobody yet, in another store."""
    dist.destroy_process_group()
    found = []
    for other in (1, 2):
        if rank not in (0, other):
            continue
        store, limit = dist.FileStore(str(folder / f"store {other}"), 2), timedelta(seconds=20)
        dist.init_process_group(backend, store=store, rank=min(rank, 1), world_size=2, timeout=limit)
        x = torch.full((3,), 1.0 + rank)
        if backend == "gloo":
            found += graphar.allreduce(x, timeout_s=20).tolist()
        else:
            dist.all_reduce(x)
            found += x.tolist()
        dist.destroy_process_group()
    return found


@pytest.mark.parametrize("backend", ["gloo", "cpu:graphar"])
def test_a_process_that_outlives_its_peer_meets_another(tmp_path, backend):
    assert run_ranks(meet_others, 3, backend, tmp_path) == [[3.0] * 3 + [4.0] * 3, [3.0] * 3, [4.0] * 3]


def come_late_to_a_meeting(rank, world_size, numel):
    communicator, store = graphar.Communicator(timeout_s=0.5), dist.distributed_c10d._get_default_store()
    communicator.allreduce(torch.ones(numel))
    if rank == 0:
        store.wait(["others gave up"])
    begin, said = time.monotonic(), []
    for call in (communicator.suspend, lambda: communicator.allreduce(torch.ones(numel))):
        with pytest.raises(CommunicatorError) as raised:
            call()
        said.append(str(raised.value))
    if rank == 1:
        store.set("others gave up", "")
    return said, time.monotonic() - begin


def test_a_rank_that_comes_to_a_meeting_that_others_gave_up_is_told_so():
    (late, took_s), *others = run_ranks(come_late_to_a_meeting, 2, 3)

    assert late[0].startswith("suspend: rank 0 came too late: suspend: rank 1 waited 0.5 s for rank(s) [0]")
    assert took_s < 0.5
    for said, _ in others:
        assert said[0].startswith("suspend: rank 1 waited 0.5 s for rank(s) [0]")
    for refused in (late, *(said for said, _ in others)):
        assert refused[1].startswith("this call was not made")
        assert refused[1].endswith(refused[0])

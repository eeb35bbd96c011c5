"""What ranks told each other, compared and put into words: the errors of a rank whose counters are made up."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from graphar import CollectiveTimeout, CommunicatorError
from graphar.plan.algorithms import Algorithm
from graphar.plan.policy import Chip
from graphar.ranks.agreement import Fingerprints
from graphar.ranks.rendezvous import RanksAbsent
from graphar.runtime import runner
from graphar.runtime.arguments import KEPT_CALLS, Counters, Record
from graphar.runtime.runner import Runner

PUSH, PIPELINED = Algorithm.ONE_SHOT_PUSH, Algorithm.TWO_SHOT_PIPELINED
WORLD_SIZE = 3
EPOCHS = 1 << 32
EXPIRED, DISAGREED = 1, 3  # `expired` and `disagreed` in cuda_src/device/sync/record.cuh
# Kernels compare calls at every eighth one. The last ones are before the count of calls wraps.
FIRST_CALLS = [0, 5, 6, 7, 100, EPOCHS - 1, EPOCHS - 4, EPOCHS - 7]


class Store:
    """One rank's view of the words that all ranks published, by (name, rank)."""

    def __init__(self, said, rank):
        self.publish = lambda name, words: said.update({(name, rank): words})
        self.published = lambda name, of_rank: said.get((name, of_rank))
        self.withdraw = lambda name: said.pop((name, rank))
        self.ended = list


class Ranks:
    """Three ranks, some of which are in this process. What they told each other lies in ``counters``."""

    def __init__(self, monkeypatch, own):
        said = {}
        self.counters = {}  # by the address of a rank's Counters of an algorithm
        self.own = own
        self.stores = [Store(said, rank) for rank in range(WORLD_SIZE)]
        members = [SimpleNamespace(rank=rank, device=rank, record=Record()) for rank in own]
        self.runner = Runner(members, WORLD_SIZE, Chip(132, "sm_90a"), None, self.stores[own[0]], None)
        self.fingerprints = [
            self.runner._fingerprints if rank in own else Fingerprints(store) for rank, store in enumerate(self.stores)
        ]
        for algorithm in (PUSH, PIPELINED):
            addresses = [0x1000 * (1 + algorithm.number) + 0x100 * rank for rank in range(WORLD_SIZE)]
            self.runner.regions[algorithm] = SimpleNamespace(pointers=addresses)
            self.counters |= {address: Counters() for address in addresses}

        def read(struct, address):
            counters = self.counters[address]
            return counters if struct is Counters else counters.epoch_state[0]

        monkeypatch.setattr(runner, "read", read)
        monkeypatch.setattr(runner, "on_device", contextlib.nullcontext)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)

    def counters_of(self, algorithm, rank):
        return self.counters[self.runner.regions[algorithm].pointers[rank]]

    def call(self, rank, algorithm, first, calls, to=range(WORLD_SIZE)):
        """Makes calls, given in words, of which the first one has a number, and tells the ranks ``to`` of each."""
        for sequence, words in enumerate(calls, first):
            entry = (sequence + 1) % EPOCHS << 32 | self.fingerprints[rank].of(words)
            for other in to:
                self.counters_of(algorithm, other).called[rank][sequence % KEPT_CALLS] = entry
        self.counters_of(algorithm, rank).epoch_state[0].epoch = (first + len(calls)) % EPOCHS

    def report(self, rank, kind, algorithm, sequence, peer):
        """Writes a record, as a kernel of ``rank`` does."""
        member = next(one for one in self.runner.members if one.rank == rank)
        record, own = member.record, self.counters_of(algorithm, rank).called
        record.algorithm, record.sequence, record.rank, record.peer = algorithm.number, sequence % EPOCHS, rank, peer
        record.expected, record.seen = (own[one][sequence % KEPT_CALLS] % EPOCHS for one in (rank, peer))
        record.kind = kind


@pytest.fixture
def ranks(monkeypatch):
    """Three ranks, of which rank 1 is in this process."""
    return Ranks(monkeypatch, own=[1])


def told_by(failing):
    """What an error says of the calls of ranks: {rank: call}."""
    with pytest.raises(CommunicatorError) as raised:
        failing()
    lines = [line.partition(": ") for line in str(raised.value).splitlines()]
    return str(raised.value), {int(rank.split()[1]): call for rank, _, call in lines if rank.startswith("rank ")}


def numbered(first, count, **unlike):
    """Calls that differ from each other: their words have their numbers. ``unlike`` are others, as call_3="..."."""
    return [unlike.get(f"call_{number}", f"call {number}") for number in range(first, first + count)]


@pytest.mark.parametrize("first", FIRST_CALLS)
@pytest.mark.parametrize("ahead", [-20, -16, -8, -1, 0, 1, 8, 16, 20])
def test_a_rank_that_made_equal_calls_and_more_or_fewer_is_not_said_to_differ(ranks, first, ahead):
    """Entries of different calls lie in one place where a rank is 16 calls ahead."""
    for rank, more in ((0, 0), (1, 0), (2, ahead)):
        ranks.call(rank, PUSH, first, numbered(first, 24 + more))

    ranks.runner.synchronize()

    assert ranks.runner.members[0].record.kind == 0


@pytest.mark.parametrize("first", FIRST_CALLS)
@pytest.mark.parametrize(("earlier", "later"), [(0, 2), (2, 0), (2, 2), (0, 0)])
def test_the_first_of_all_calls_that_differ_is_named_with_what_both_ranks_called(ranks, first, earlier, later):
    """Ranks ``earlier`` and ``later`` each make a call that the others do not."""
    for rank in range(WORLD_SIZE):
        calls = numbered(first, 10)
        for at, odd in ((5, earlier), (8, later)):
            calls[at] = f"another call {first + at}" if rank == odd else calls[at]
        ranks.call(rank, PIPELINED, first, calls)

    message, told = told_by(ranks.runner.synchronize)

    assert message.startswith(f"allreduce call {(first + 5) % EPOCHS} by two_shot_pipelined: ")
    assert told == {1: f"call {first + 5}", earlier: f"another call {first + 5}"}


def test_calls_of_every_algorithm_are_compared(ranks):
    for rank in range(WORLD_SIZE):
        ranks.call(rank, PUSH, 0, ["a call"])
        ranks.call(rank, PIPELINED, 0, ["one call" if rank < 2 else "another"])

    message, told = told_by(ranks.runner.synchronize)

    assert message.startswith("allreduce call 0 by two_shot_pipelined: ")
    assert told == {1: "one call", 2: "another"}


@pytest.mark.parametrize("odd", [0, 2])
def test_each_rank_of_a_process_compares_what_it_was_told_itself(monkeypatch, odd):
    ranks = Ranks(monkeypatch, own=[0, 2])
    ranks.call(1, PUSH, 4, ["one call"], to=[0, 1, 2])
    for rank in (0, 2):
        ranks.call(rank, PUSH, 4, ["one call"], to=[rank])
    ranks.call(1, PUSH, 4, ["another"], to=[odd])

    _, told = told_by(ranks.runner.synchronize)

    assert told == {odd: "one call", 1: "another"}
    assert [one.rank for one in ranks.runner.members if one.record.kind] == [odd]


def test_what_a_kernel_reported_is_not_replaced_by_what_the_host_finds(ranks):
    for rank in range(WORLD_SIZE):
        ranks.call(rank, PUSH, 0, ["a call", "one call" if rank else "another", "one" if rank < 2 else "two"])
    ranks.report(1, DISAGREED, PUSH, 2, peer=2)

    _, told = told_by(ranks.runner.synchronize)

    assert told == {1: "one", 2: "two"}


@pytest.mark.parametrize("peer", [0, 2])
def test_the_words_of_a_report_are_those_of_the_rank_and_of_its_peer(ranks, peer):
    for rank in range(WORLD_SIZE):
        ranks.call(rank, PUSH, 7, [f"the call of rank {rank}"])
    ranks.report(1, DISAGREED, PUSH, 7, peer)

    _, told = told_by(ranks.runner.raise_failure)

    assert told == {1: "the call of rank 1", peer: f"the call of rank {peer}"}


@pytest.mark.parametrize("first", FIRST_CALLS)
@pytest.mark.parametrize("peer", [0, 2])
def test_of_an_expired_wait_both_ranks_calls_are_named_if_the_peer_began_another(ranks, first, peer):
    """The peer has made every call but the last one of this rank, and in its place one of another algorithm."""
    for rank in range(WORLD_SIZE):
        ranks.call(rank, PUSH, first, numbered(first, 20 if rank == 1 else 19))
        ranks.call(rank, PIPELINED, first, [*numbered(first, 3), *[f"pipelined by {rank}"] * (rank != 1)])
    ranks.report(1, EXPIRED, PUSH, first + 19, peer)

    message, told = told_by(ranks.runner.raise_failure)

    assert message.startswith(f"allreduce call {(first + 19) % EPOCHS} by one_shot_push: ")
    assert told == {1: f"call {first + 19}", peer: f"pipelined by {peer}"}


@pytest.mark.parametrize("first", FIRST_CALLS)
@pytest.mark.parametrize("behind", [1, 15, 16, 17])
def test_a_rank_that_is_behind_is_not_said_to_have_called_anything_else(ranks, first, behind):
    """What it told of calls 16 before lies where the awaited calls of this rank do."""
    for rank in range(WORLD_SIZE):
        for algorithm in (PUSH, PIPELINED):
            ranks.call(rank, algorithm, first, numbered(first, 40 if rank == 1 else 40 - behind))
    ranks.report(1, EXPIRED, PUSH, first + 40 - behind, peer=2)

    with pytest.raises(CollectiveTimeout):
        ranks.runner.raise_failure()


def test_a_rank_that_waits_in_the_loading_of_a_kernel_is_told_what_each_absent_rank_called(ranks):
    ranks.call(1, PUSH, 0, numbered(0, 7))
    ranks.call(0, PUSH, 0, [*numbered(0, 7), "the eighth of rank 0"])
    ranks.call(2, PUSH, 0, [*numbered(0, 7), "the eighth of rank 2"])

    def load():
        with ranks.runner.announced("a call that is new"):
            raise RanksAbsent("loading: ranks 0 and 2 are absent", [0, 2])

    with pytest.raises(RanksAbsent) as raised:
        load()

    assert str(raised.value).splitlines() == [
        "loading: ranks 0 and 2 are absent",
        "rank 0: the eighth of rank 0",
        "rank 2: the eighth of rank 2",
    ]
    assert raised.value.absent == [0, 2]
    assert ranks.stores[0].published("preparing", 1) == "a call that is new"  # for ranks that wait longer

"""The runner apart from launches: refusals, the order of threads, failures, closing. Needs no GPU."""

import contextlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from graphar import CollectiveTimeout, CommunicatorError, ConcurrentCallError, UnsupportedError
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Operands
from graphar.plan.config import Config, Kernel
from graphar.plan.policy import Chip
from graphar.plan.slices import Slice
from graphar.ranks.rendezvous import Alone, RanksAbsent
from graphar.runtime import launcher, runner
from graphar.runtime.arguments import Arguments, Record
from graphar.runtime.bind import launches
from graphar.runtime.bind.collective import plan_of_slices
from graphar.runtime.launcher import Grid, Launch
from graphar.runtime.runner import Runner

CHIP = Chip(132, "sm_90a")


def test_a_device_too_old_for_a_kernel_is_named(monkeypatch):
    monkeypatch.setattr(launcher, "architecture", lambda device: "sm_80")
    member = SimpleNamespace(rank=0, device=1)
    of_one = Runner([member], 2, CHIP, memory=None, rendezvous=Alone(), multicast_memory=None)

    with pytest.raises(UnsupportedError, match=r"two_shot_tma needs sm_90 or newer, cuda:1 is sm_80"):
        of_one.prepare(Kernel(Algorithm.TWO_SHOT_TMA, torch.bfloat16))


class Peers:
    """Stands in for a rendezvous of rank 0 with a rank on another chip."""

    rank = 0

    def __init__(self, chip):
        self.word, self.meetings = json.dumps({"table": "", "chip": asdict(chip)}).encode(), []

    def agree(self, what, prepare):
        return prepare()

    def exchange(self, what, payload):
        self.meetings.append(what)
        return [payload, self.word if what == "reading the tuning table" else payload]


HOPPER, AMPERE = Chip(132, "sm_90a"), Chip(108, "sm_80")


@pytest.mark.parametrize(
    ("own", "theirs", "common"),
    [
        ([HOPPER], HOPPER, HOPPER),
        ([HOPPER], AMPERE, AMPERE),
        ([HOPPER, AMPERE], HOPPER, AMPERE),
        ([HOPPER], Chip(160, "sm_100a"), Chip(132, "sm_90")),
    ],
)
def test_choices_go_by_what_the_devices_of_every_rank_have(monkeypatch, own, theirs, common):
    """Ranks that chose by their own devices would load different kernels, and then wait for each other."""
    monkeypatch.setattr(launcher, "chip", lambda device: own[device])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "no GPU")
    memory = SimpleNamespace(check=lambda: None, close=lambda: None)
    for name, made in {"LocalMemory": memory, "ProcessMemory": memory, "TorchMemory": None, "Member": None}.items():
        monkeypatch.setattr(runner, name, lambda *_, made=made: made)
    monkeypatch.setattr(runner, "Runner", lambda members, world_size, chip, *rest: chip)
    peers = Peers(theirs)
    devices = [torch.device("cuda", at) for at in range(len(own))]

    local = devices if len(own) > 1 else None
    ranks = SimpleNamespace(group=None, devices=local, world_size=2, rendezvous=lambda: peers)

    chip, _ = runner.set_up(ranks, devices[0], lossless=True, stand_in=False)

    assert chip == common
    assert chip.has_clusters == (common is not AMPERE)
    assert peers.meetings == ["agreeing on settings", "reading the tuning table"]


@pytest.mark.parametrize(
    ("overlap", "cluster", "attributes"), [(True, 1, 1), (True, 2, 2), (False, 2, 1), (False, 1, 0)]
)
def test_a_launch_has_an_attribute_for_each_of_early_and_cluster(monkeypatch, overlap, cluster, attributes):
    configs, launches = [], []
    plain = launcher.driver.CUlaunchConfig
    monkeypatch.setattr(launcher.driver, "CUlaunchConfig", lambda: configs.append(plain()) or configs[-1])
    monkeypatch.setattr(
        launcher,
        "launch_kernel",
        lambda: lambda *_: launches.append((int(configs[0].hStream), configs[0].numAttrs)) or 0,
    )
    launch = Launch(1, [Arguments()], Grid(2, 32, 0, overlap, cluster))

    for stream in (5, 6, 6):
        launch.enqueue(stream)

    assert launches == [(stream, attributes) for stream in (5, 6, 6)]


def test_calls_of_several_threads_reach_all_devices_in_one_order(monkeypatch):
    """Otherwise the kernels of two calls would take each other's data."""
    members = [SimpleNamespace(rank=rank, device=rank, record=record_of(kind=0)) for rank in range(2)]
    of_two, launched = Runner(members, 2, CHIP, None, Alone(), None), []

    def launch(rank, inputs, *_):
        launched.append((rank, *inputs))
        time.sleep(0.001)  # time for another thread

    monkeypatch.setattr(launches, "on_own_device", lambda device, launch: launch)
    bound = [[partial(launch, rank) for rank in range(2)]]
    run = plan_of_slices(of_two, Config(Algorithm.ONE_SHOT_PUSH, 1, 32), [Slice(8)], bound).run

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda call: run([Operands((call,), ())] * 2), range(16)))

    first, second = ([x for rank, x in launched if rank == of_rank] for of_rank in range(2))
    assert first == second
    assert sorted(first) == list(range(16))


def test_slices_of_a_call_with_error_feedback_are_of_the_rounding_errors_too(monkeypatch):
    monkeypatch.setattr(launches, "on_own_device", lambda device, launch: launch)
    member, got = SimpleNamespace(rank=0, device=0), []
    of_one = Runner([member], 2, CHIP, memory=None, rendezvous=Alone(), multicast_memory=None)
    arguments, x, errors = Arguments(), torch.arange(8.0), torch.arange(8.0)

    def launch(inputs, outputs, *rest):
        arguments.put_errors(inputs, outputs, *rest)
        got.append((inputs[0].data_ptr() - x.data_ptr(), arguments.errors - errors.data_ptr()))

    slices = [Slice(6), Slice(2, offset=6)]
    plan = plan_of_slices(of_one, Config(Algorithm.QUANTIZED_TWO_SHOT_PUSH, 1, 32), slices, [[launch]] * 2, sliced=2)

    plan.run([Operands((x, errors), (x,))])

    assert got == [(0, 0), (6 * 4, 6 * 4)]


def record_of(**fields):
    return Record(algorithm=Algorithm.TWO_SHOT_PUSH.number, sequence=41, rank=0, peer=2, **fields)


def runner_of(monkeypatch, record, world_size=3, rendezvous=None):
    member = SimpleNamespace(rank=0, device=0, record=record, free=lambda: None)
    memory = SimpleNamespace(close=lambda: None)
    made = Runner([member], world_size, CHIP, memory=memory, rendezvous=rendezvous or Alone(), multicast_memory=None)
    begun = {0x1000: 42, 0x2000: 42, 0x3000: 41, 0x4000: 3, 0x5000: 3, 0x6000: 4}
    monkeypatch.setattr(runner, "calls_begun", lambda counters, device: begun[counters])
    monkeypatch.setattr(runner, "read", lambda struct, address: struct())  # no rank has told what it calls
    monkeypatch.setattr(runner, "on_device", contextlib.nullcontext)
    made.regions = {
        Algorithm.TWO_SHOT_PUSH: SimpleNamespace(pointers=[0x1000, 0x2000, 0x3000]),
        Algorithm.ONE_SHOT_PUSH: SimpleNamespace(pointers=[0x4000, 0x5000, 0x6000]),
    }
    return made


def test_a_timeout_says_which_call_waited_for_whom_and_what_each_rank_did_last(monkeypatch):
    failed = runner_of(monkeypatch, record_of(kind=1, block=3, expected=42, seen=41))

    with pytest.raises(CollectiveTimeout) as raised:
        failed.raise_failure()

    last_calls = (*["two_shot_push call 41, one_shot_push call 2"] * 2, "two_shot_push call 40, one_shot_push call 3")
    record = raised.value.record
    assert (record.op, record.algorithm, record.sequence) == ("allreduce", "two_shot_push", 41)
    assert (record.rank, record.peer, record.last_calls) == (0, 2, last_calls)
    assert (record.block, record.expected, record.seen) == (3, 42, 41)
    assert str(raised.value) == (
        "allreduce call 41 by two_shot_push: rank 0 waited past the deadline for rank 2 (block 3, expected 0x2a, saw "
        "0x29); close this communicator\nlast calls:\n"
        + "\n".join(f"  rank {rank}: {what}" for rank, what in enumerate(last_calls))
    )


class Words:
    """A rendezvous in which ranks publish words."""

    def __init__(self, published=()):
        self.words = dict(published)  # by (name, rank)
        self.publish = lambda name, said: self.words.update({(name, 0): said})
        self.published = lambda name, rank: self.words.get((name, rank))
        self.withdraw = lambda name: self.words.pop((name, 0))
        self.ended = list


def test_a_timeout_says_what_a_rank_is_loading_kernels_for(monkeypatch):
    rendezvous = Words({("preparing", 2): "allreduce of 9 elements"})
    failed = runner_of(monkeypatch, record_of(kind=1), rendezvous=rendezvous)

    with pytest.raises(CollectiveTimeout, match=r"rank 2: .*call 3; preparing allreduce of 9 elements"):
        failed.raise_failure()


@pytest.mark.parametrize("error", [None, ValueError])
def test_what_a_rank_loads_kernels_for_is_said_meanwhile_only(monkeypatch, error):
    rendezvous = Words()
    loading = runner_of(monkeypatch, record_of(kind=0), rendezvous=rendezvous)

    with contextlib.suppress(ValueError), loading.announced("a fused matmul"), loading.announced("its sum"):
        assert rendezvous.words == {("preparing", 0): "a fused matmul"}
        if error:
            raise error

    assert rendezvous.words == {}


def test_the_failure_stays_the_one_it_was(monkeypatch):
    failed = runner_of(monkeypatch, record_of(kind=1))
    with pytest.raises(CollectiveTimeout) as first:
        failed.raise_failure()
    failed.members[0].record.peer = 1
    failed.regions.clear()

    with pytest.raises(CollectiveTimeout) as second:
        failed.raise_failure()

    assert str(second.value) == str(first.value)
    assert second.value is not first.value


def test_a_rank_whose_process_has_ended_or_that_cannot_be_read_is_told_apart(monkeypatch):
    rendezvous = SimpleNamespace(ended=lambda: [2], published=lambda name, rank: None)
    failed = runner_of(monkeypatch, record_of(kind=1), rendezvous=rendezvous)
    unreadable = {0x1000: 42, 0x2000: None, 0x3000: 0}
    monkeypatch.setattr(runner, "calls_begun", lambda counters, device: unreadable[counters])
    del failed.regions[Algorithm.ONE_SHOT_PUSH]

    with pytest.raises(CollectiveTimeout) as raised:
        failed.raise_failure()

    assert raised.value.record.last_calls == ("two_shot_push call 41", "unknown", "none; its process has ended")


def test_what_kernels_have_counted_is_told_by_algorithm_of_this_processs_ranks(monkeypatch):
    asked = runner_of(monkeypatch, record_of(kind=0))
    assert asked.calls_begun() == {Algorithm.TWO_SHOT_PUSH: [42], Algorithm.ONE_SHOT_PUSH: [3]}


def test_calls_at_the_same_time_are_an_error_of_their_own(monkeypatch):
    with pytest.raises(ConcurrentCallError, match="allreduce call 41 by two_shot_push ran while another call"):
        runner_of(monkeypatch, record_of(kind=2)).raise_failure()


CALLS = {7: "allreduce of 8 elements", 8: "allreduce of 9 elements"}


@pytest.mark.promise("Ranks whose calls differ all get an error that says what each called.")
def test_ranks_whose_calls_differ_are_told_what_each_called(monkeypatch):
    failed = runner_of(monkeypatch, record_of(kind=3, expected=7, seen=8))
    monkeypatch.setattr(failed._fingerprints, "words", lambda fingerprint, rank, patience_s=0.0: CALLS[fingerprint])

    with pytest.raises(CommunicatorError) as raised:
        failed.raise_failure()

    assert str(raised.value) == (
        "allreduce call 41 by two_shot_push: ranks must make the same graphar calls in the same order, got\n"
        "rank 0: allreduce of 8 elements\nrank 2: allreduce of 9 elements\n"
        "Results since that call may be wrong; close this communicator."
    )


class Region:
    def __init__(self) -> None:
        self.done, self.pointers = [], [0x4000]
        self.unmap, self.free = lambda: self.done.append("unmap"), lambda: self.done.append("free")


def close_with(monkeypatch, error):
    """What was done to the memory when closing met with ``error``, whether the member's words were freed, and what the
    runner then tells of launches and symmetric tensors."""

    def close(step):
        if error:
            raise error

    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(runner, "on_device", lambda device: contextlib.nullcontext())
    closing = runner_of(monkeypatch, record_of(kind=0), rendezvous=SimpleNamespace(close=close))
    freed, region = [], Region()
    closing.members[0].free = lambda: freed.append(True)
    closing.regions, closing.symmetric.buffers = {Algorithm.ONE_SHOT: region}, [Region()]
    try:
        closing.close()
    except RanksAbsent:
        region.done.append("raised")
    return region.done, freed, closing.launches(), closing.symmetric.buffers


@pytest.mark.parametrize(
    ("error", "done"),
    [
        (None, ["unmap", "free"]),
        (RanksAbsent("closing", [1, 2], [1, 2]), ["unmap", "free"]),  # their processes have ended
        (RanksAbsent("closing", [1, 2], [1]), ["raised"]),
    ],
    ids=["all ranks come", "the absent ranks have ended", "an absent rank may write"],
)
def test_closing_frees_the_memory_that_no_absent_rank_may_write_to_and_keeps_counts(monkeypatch, error, done):
    assert close_with(monkeypatch, error) == (done, [True], {"one_shot": 3}, [])

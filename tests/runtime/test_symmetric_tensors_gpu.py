"""All-reduces straight into symmetric tensors: the same bits, nothing else written, nothing too early."""

from __future__ import annotations

import random

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.slices import Slice
from graphar.plan.work import Sum
from tests.cases import normal, same_bits
from tests.gpu import DIRECT_ALGORITHMS, DTYPES, KERNEL_ALGORITHMS, Ranks, bare_launches, fits
from tests.ops.gpu_cases import settle
from tests.runtime.test_graphs_gpu import capture

pytestmark = pytest.mark.gpu

NUMELS = (1, 7, 8199, 262149, 16777240)
GUARD = 4096  # elements on either side
PIPELINED = "two_shot_pipelined"
every_direct = pytest.mark.parametrize("algorithm", DIRECT_ALGORITHMS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture
def ranks(fresh_ranks: Ranks) -> Ranks:
    """Ranks for one test alone, so that its symmetric tensors are freed with it."""
    return fresh_ranks


class Room:
    """A symmetric tensor on every rank, full of sevens, and a slice of it that leaves both ends out."""

    def __init__(self, ranks: Ranks, numel: int, dtype: torch.dtype, offset: int = 0) -> None:
        self.start, self.end = GUARD + offset, GUARD + offset + numel
        self.whole = ranks.communicator.empty(self.end + GUARD, dtype=dtype)
        for one in self.whole:
            one.fill_(7)
        self.parts = [one[self.start : self.end] for one in self.whole]

    def hold(self, values) -> Room:
        for part, value in zip(self.parts, values, strict=True):
            part.copy_(value)
        return self

    def guards_are_as_before(self) -> bool:
        return all(bool((one[: self.start] == 7).all() and (one[self.end :] == 7).all()) for one in self.whole)


def assert_direct(ranks: Ranks, xs, outs, algorithm: str) -> None:
    assert ", straight " in ranks.communicator.explain(xs, out=outs, algorithm=algorithm).reason


def assert_sum(ys, xs) -> None:
    """The specification's sum made on the first GPU, for sizes that take the CPU too long."""
    expected = graphar.reference.allreduce([x.to("cuda:0") for x in xs])
    for rank, y in enumerate(ys):
        assert same_bits(y.to("cuda:0"), expected) == 0, f"rank {rank}"


@every_dtype
@every_direct
def test_a_direct_call_gives_the_specification_and_writes_nothing_else(ranks: Ranks, algorithm, dtype):
    for numel in NUMELS:
        if not fits(algorithm, ranks.world_size, numel, dtype):
            continue
        inputs = [normal(rank, numel, dtype) for rank in range(ranks.world_size)]
        xs, outs = Room(ranks, numel, dtype).hold(inputs), Room(ranks, numel, dtype)
        assert_direct(ranks, xs.parts, outs.parts, algorithm)

        ranks.communicator.allreduce(xs.parts, out=outs.parts, algorithm=algorithm)

        ranks.communicator.synchronize()
        assert_sum(outs.parts, inputs)
        assert_sum(outs.parts, xs.parts)
        assert xs.guards_are_as_before()
        assert outs.guards_are_as_before()


def test_large_tensors_go_straight_by_themselves(ranks: Ranks):
    numel = 1 << 26  # past what auto gives to other algorithms
    outs = ranks.communicator.empty(4, numel // 4, dtype=torch.float16)  # bf16 is compressed
    xs = [torch.randn(4, numel // 4, dtype=torch.float16, device=out.device) for out in outs]
    assert [(out.shape, out.device) for out in outs] == [(x.shape, x.device) for x in xs]
    assert_direct(ranks, xs, outs, "auto")
    before = ranks.calls_of(PIPELINED)

    returned = ranks.communicator.allreduce(xs, out=outs)

    ranks.communicator.synchronize()
    assert all(a is b for a, b in zip(returned, outs, strict=True))
    assert_sum(outs, xs)
    assert ranks.calls_of(PIPELINED) == before + 1


@pytest.mark.parametrize("offset", [8, 1])
@every_direct
def test_views_at_an_offset(ranks: Ranks, algorithm, offset):
    """A view that packs can be stored to is written directly; any other view is not."""
    inputs = [normal(rank, 8199, torch.bfloat16) for rank in range(ranks.world_size)]
    xs, outs = Room(ranks, 8199, torch.bfloat16, offset).hold(inputs), Room(ranks, 8199, torch.bfloat16, offset)
    said = ranks.communicator.explain(xs.parts, out=outs.parts, algorithm=algorithm).reason
    assert (", straight " in said) == (offset == 8)

    ranks.communicator.allreduce(xs.parts, out=outs.parts, algorithm=algorithm)

    ranks.communicator.synchronize()
    ranks.check_result(outs.parts, inputs)
    assert xs.guards_are_as_before()
    assert outs.guards_are_as_before()


@pytest.mark.parametrize("algorithm", [*KERNEL_ALGORITHMS, "fallback"])
def test_in_place(ranks: Ranks, algorithm):
    for numel in (8199, 262149):
        inputs = [normal(rank, numel, torch.bfloat16) for rank in range(ranks.world_size)]
        xs = Room(ranks, numel, torch.bfloat16).hold(inputs)

        ranks.communicator.allreduce(xs.parts, out=xs.parts, algorithm=algorithm)

        ranks.communicator.synchronize()
        ranks.check_result(xs.parts, inputs)
        assert xs.guards_are_as_before()


def test_a_smaller_result_leaves_the_rest_of_a_larger_one(ranks: Ranks):
    inputs = [normal(rank, 1 << 20, torch.bfloat16) for rank in range(ranks.world_size)]
    xs, outs = ranks.place(inputs), ranks.communicator.empty(1 << 20, dtype=torch.bfloat16)
    total = graphar.reference.allreduce(inputs)
    for numel in (1 << 20, 99999, 8199, 7, 1):
        small = [out[:numel] for out in outs]
        ranks.communicator.allreduce([x[-numel:] for x in xs], out=small, algorithm=PIPELINED)
        ranks.communicator.synchronize()
        total[:numel] = graphar.reference.allreduce([one[-numel:] for one in inputs])
        for out in outs:
            assert same_bits(out.cpu(), total) == 0


def test_an_empty_tensor(ranks: Ranks):
    xs = ranks.communicator.empty(0, 3)

    ys = ranks.communicator.allreduce(xs, out=xs, algorithm=PIPELINED)

    assert [(y.shape, y.device.index) for y in ys] == [((0, 3), rank) for rank in range(ranks.world_size)]


@every_direct
def test_each_result_is_the_next_calls_input(ranks: Ranks, algorithm):
    inputs = [normal(rank, 262149, torch.float32) for rank in range(ranks.world_size)]
    a, b = Room(ranks, 262149, torch.float32).hold(inputs), Room(ranks, 262149, torch.float32)
    total = graphar.reference.allreduce(inputs)
    for _ in range(20):
        ranks.communicator.allreduce(a.parts, out=b.parts, algorithm=algorithm)
        a, b = b, a
    ranks.communicator.synchronize()
    for _ in range(19):
        total = graphar.reference.allreduce([total] * ranks.world_size)
    for part in a.parts:
        assert same_bits(part.cpu(), total) == 0


def test_direct_and_ordinary_calls_in_random_order(ranks: Ranks):
    """Sizes and places differ by call, and one rank is late now and then."""
    choices = random.Random(11)
    numel = 1 << 18
    inputs = ranks.place([normal(rank, numel, torch.bfloat16) for rank in range(ranks.world_size)])
    total = graphar.reference.allreduce([x.to("cuda:0") for x in inputs])
    xs = ranks.communicator.empty(numel, dtype=torch.bfloat16)
    for x, value in zip(xs, inputs, strict=True):
        x.copy_(value)
    symmetric, ordinary = ranks.communicator.empty(numel, dtype=torch.bfloat16), [torch.empty_like(x) for x in xs]
    for call in range(1000):
        size = int(2 ** choices.uniform(0, 18))
        start = choices.randrange((numel - size) // 8 + 1) * 8
        part = slice(start, start + size)
        outs = [out[part] for out in choices.choice([symmetric, symmetric, ordinary])]
        algorithm = choices.choice(["auto", *DIRECT_ALGORITHMS, *KERNEL_ALGORITHMS])
        ranks.be_late(choices)
        ranks.communicator.allreduce([x[part] for x in choices.choice([xs, inputs])], out=outs, algorithm=algorithm)
        if call % 5 == 0:
            ranks.communicator.synchronize()
            for rank, out in enumerate(outs):
                assert same_bits(out.to("cuda:0"), total[part]) == 0, f"call {call}, rank {rank}: {algorithm}, {size}"


@every_direct
def test_a_graph_replays_with_other_inputs(ranks: Ranks, algorithm):
    numel = 8199
    xs, outs = Room(ranks, numel, torch.bfloat16), Room(ranks, numel, torch.bfloat16)
    ranks.communicator.allreduce(xs.parts, out=outs.parts, algorithm=algorithm)
    graph = capture(ranks, xs.parts, outs.parts, algorithm, calls=2)
    ranks.communicator.engine.plans.clear()
    for turn in range(100):
        inputs = [normal(100 * turn + rank, numel, torch.bfloat16) for rank in range(ranks.world_size)]
        xs.hold(inputs)
        settle(ranks)
        graph.replay()
        settle(ranks)
        ranks.check_result(outs.parts, inputs)
    assert outs.guards_are_as_before()


def test_prepare_loads_what_direct_calls_need(ranks: Ranks):
    numel = 1 << 26  # past what auto gives to other algorithms
    outs = ranks.communicator.empty(numel, dtype=torch.float16)  # bf16 is compressed
    xs = [torch.randn(numel, dtype=torch.float16, device=out.device) for out in outs]
    ranks.communicator.prepare(dtypes=[torch.float16])
    assert_direct(ranks, xs, outs, "auto")
    graph = capture(ranks, xs, outs)

    graph.replay()

    settle(ranks)
    assert_sum(outs, xs)


@every_direct
def test_a_rank_that_never_calls_is_named_within_the_deadline(ranks: Ranks, algorithm):
    xs, outs = ranks.communicator.empty(8192), ranks.communicator.empty(8192)
    for x in xs:
        x.fill_(1)
    ranks.communicator.allreduce(xs, out=outs, algorithm=algorithm)
    ranks.communicator.synchronize()
    engine = ranks.communicator.engine
    call, config = Call.of(Sum(8192), xs[0]), Config(Algorithm(algorithm), 4, 128, 512, direct=True)
    launches = bare_launches(engine, call, config, Slice(8192), timeout_s=0.5)
    ranks.launch_on_all_but_the_last(launches, xs, outs)
    ranks.assert_the_last_is_named(algorithm)


def test_without_peer_access_tensors_are_ordinary(monkeypatch):
    def refuse(self):
        raise graphar.UnsupportedError("cuda:0 has no peer access to cuda:1")

    monkeypatch.setattr("graphar.runtime.memory.peer_memory.LocalMemory.check", refuse)
    with graphar.Communicator(devices=range(2)) as communicator:
        outs = communicator.empty(8192, dtype=torch.float32)
        inputs = [normal(rank, 8192, torch.float32) for rank in range(2)]
        communicator.allreduce([part.to(f"cuda:{rank}") for rank, part in enumerate(inputs)], out=outs)
        assert communicator.engine.symmetric is None
        assert_sum(outs, inputs)


def test_their_memory_is_freed_when_the_communicator_is_closed():
    with graphar.Communicator(devices=range(2)) as communicator:
        communicator.empty(8)
        before = torch.cuda.mem_get_info(0)[0]
        communicator.empty(1 << 28)
        assert torch.cuda.mem_get_info(0)[0] <= before - (1 << 30)
    assert torch.cuda.mem_get_info(0)[0] >= before

"""An all-gather and matmul in chunks, between ranks in the host's memory: each step is done when it is enqueued."""

import contextlib
import ctypes
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch

from graphar import reference
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.work import Product
from graphar.product import gathered_chunks
from graphar.product.gathered_chunks import GatheredChunks
from graphar.product.multiply import multiply
from graphar.product.operands import MatmulOperands
from graphar.runtime.bind import by_copies
from tests.cases import same_bits

ROWS_A_LAUNCH, K = 5, 12


class Stream:
    """Stands in for a stream whose work is always done. ``steps`` is what all streams did, in order: (stream, what)."""

    def __init__(self, name, steps):
        self.name, self.cuda_stream, self._steps, self._events = name, name, steps, 0

    def wait_stream(self, other):
        self._steps.append((self.name, f"wait for {other.name}"))

    def wait_event(self, event):
        self._steps.append((self.name, f"wait for {event}"))

    def record_event(self, event=None):
        if self.name.startswith("main"):  # a side stream waits for it at once
            return self.name
        self._events += 1
        event = f"event {self._events} of {self.name}"
        self._steps.append((self.name, f"record {event}"))
        return event


class Ranks:
    """Stands in for an engine with ``world_size`` devices. ``steps`` is what their streams did, in order."""

    def __init__(self, world_size: int, monkeypatch) -> None:
        self.world_size, self.steps, self._device = world_size, [], 0
        self._scratch = Algorithm.ALLGATHER_MATMUL.row.scratch(world_size)
        self._memory = [torch.empty(self._scratch.nbytes, dtype=torch.uint8) for _ in range(world_size)]
        self.runner = SimpleNamespace(
            lock=threading.Lock(),
            members=[SimpleNamespace(rank=rank, device=rank, leave=lambda: None) for rank in range(world_size)],
            raise_failure=lambda: self.steps.append(("host", "raise an earlier failure")),
            scratch=lambda algorithm: [one.data_ptr() for one in self._memory],
            prepare_all=lambda *given: None,
        )
        pairs = [(Stream(f"main {rank}", self.steps), Stream(f"side {rank}", self.steps)) for rank in range(world_size)]
        in_turn = itertools.cycle(pairs)
        monkeypatch.setattr(gathered_chunks, "meetings", lambda *_: lambda: self.steps.append(("all", "meet")))
        monkeypatch.setattr(gathered_chunks, "streams_of", lambda device: next(in_turn))
        monkeypatch.setattr(by_copies, "here", self._on_device)
        monkeypatch.setattr(by_copies, "_functions", lambda: (self._copy, None))
        monkeypatch.setattr(gathered_chunks, "tensor_at", self._tensor_at)
        monkeypatch.setattr(gathered_chunks, "gathered_rows_a_launch", lambda world_size, k: ROWS_A_LAUNCH)
        monkeypatch.setattr(gathered_chunks, "multiply", self._multiply)

    @contextlib.contextmanager
    def _on_device(self, device):
        before, self._device = self._device, device
        yield
        self._device = before

    def _copy(self, to, source, nbytes, stream):
        assert stream.endswith(f" {self._device}"), "a stream's own device is current"
        ctypes.memmove(to, source, nbytes)
        self.steps.append((stream, f"copy to {self._place(to)}"))

    def _place(self, address):
        owners = [rank for rank, one in enumerate(self._memory) if 0 <= address - one.data_ptr() < one.nbytes]
        return f"rank {owners[0]}" if owners else "the gathered rows"

    def _multiply(self, *step):
        self.steps.append(("current", "multiply"))
        multiply(*step)

    @staticmethod
    def _tensor_at(pointer, device, like):
        raw = (ctypes.c_char * like.nbytes).from_address(pointer)
        return torch.frombuffer(raw, dtype=like.dtype).view(like.shape)


def operands(counts, with_bias=False, gathered=True):
    """The operands of every rank: small integers, whose products are exact. Rank r has a weight of 3 + r rows."""
    found = []
    for rank, count in enumerate(counts):
        a, w = (torch.randint(-4, 5, (rows, K)).bfloat16() for rows in (count, 3 + rank))
        bias = torch.randint(-4, 5, (len(w),)).bfloat16() if with_bias else None
        out = torch.full((sum(counts), len(w)), 7.0).bfloat16()
        rows = torch.full((sum(counts), K), 7.0).bfloat16() if gathered else None
        found.append(MatmulOperands(a, w, bias, out, rows))
    return found


def run(ranks, members) -> None:
    counts = tuple(len(one.a) for one in members)
    algorithm, first = Algorithm.ALLGATHER_MATMUL, members[0]
    bias, gathered = first.bias is not None, first.gathered is not None
    call = Call.of(Product(algorithm.op, counts, K, bias, gathered=gathered), first.a, timeout_s=1.0)
    operands = [Operands((one.a, one.w, *[one.bias] * bias), (one.out, *[one.gathered] * gathered)) for one in members]
    GatheredChunks(ranks, call).run(operands)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
def test_every_rank_multiplies_the_rows_of_all(world_size, with_bias, monkeypatch):
    torch.manual_seed(world_size)
    counts = [0, 7, 3, 12, 1, 5, 10, 6][:world_size]
    ranks, members = Ranks(world_size, monkeypatch), operands(counts, with_bias)

    run(ranks, members)

    rows = [one.a for one in members]
    for one in members:
        assert same_bits(one.gathered, reference.allgather(rows)) == 0
        assert same_bits(one.out, reference.fused_allgather_matmul(rows, one.w, one.bias)) == 0


def test_rows_that_lie_apart_are_sent_as_well(monkeypatch):
    members = operands([4, 4])
    apart = [MatmulOperands(one.a.t().contiguous().t(), one.w, None, one.out) for one in members]

    run(Ranks(2, monkeypatch), apart)

    for one in members:
        assert same_bits(one.out, reference.fused_allgather_matmul([one.a for one in members], one.w)) == 0


def test_after_an_error_the_callers_streams_wait_for_the_copies(monkeypatch):
    ranks, members = Ranks(2, monkeypatch), operands([2, 2])
    monkeypatch.setattr(gathered_chunks, "multiply", lambda *step: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run(ranks, members)

    assert ranks.steps[-3::2] == [("main 0", "wait for side 0"), ("main 1", "wait for side 1")]


def order_of(rank, world_size, counts, gathered):
    """What the streams of a rank do in a call of one launch, to which the ranks bring so many rows, in order."""
    main, side = f"main {rank}", f"side {rank}"
    steps = [("all", "meet")]
    for hop in range(1, world_size):
        steps += [(side, f"wait for {main}")]
        steps += [(side, f"copy to rank {(rank + hop) % world_size}")] if counts[rank] else []
        steps += [(side, f"record event {hop} of {side}")]
    for hop in range(world_size):
        steps += [(main, f"wait for event {hop} of {side}"), ("all", "meet")] if hop else []
        if gathered and counts[(rank - hop) % world_size]:
            ends = world_size + sum(counts[(rank - one) % world_size] > 0 for one in range(hop))
            steps += [(side, f"wait for {main}"), (side, "copy to the gathered rows")]
            steps += [(side, f"record event {ends} of {side}")]
    return [*steps, (side, f"wait for {main}"), (main, f"wait for {side}")]


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("counts", [(2, 2), (1, 0, 3), (2, 1, 2, 5)], ids=str)
def test_the_streams_of_each_rank_wait_for_each_other_and_for_the_copy_of_the_same_step(monkeypatch, counts, gathered):
    world_size = len(counts)
    ranks = Ranks(world_size, monkeypatch)

    run(ranks, operands(counts, gathered=gathered))

    for rank in range(world_size):
        own = [step for step in ranks.steps if step[0] in (f"main {rank}", f"side {rank}", "all")]
        assert own == order_of(rank, world_size, counts, gathered)


def test_the_next_launch_begins_when_the_copies_of_the_one_before_have_ended(monkeypatch):
    ranks, counts = Ranks(2, monkeypatch), (2 * ROWS_A_LAUNCH, 0)

    run(ranks, operands(counts, gathered=False))

    own = [step for step in ranks.steps if step[0] in ("main 0", "side 0", "all")]
    first = order_of(0, 2, counts, gathered=False)
    second = [(stream, what.replace("event 1", "event 2")) for stream, what in first]
    assert own == [*first, *second]


def test_ranks_meet_before_the_first_copy_and_before_they_read_the_rows_of_each_peer(monkeypatch):
    ranks = Ranks(3, monkeypatch)

    run(ranks, operands([2, 2, 2], gathered=False))

    steps = [what.split(" to ")[0] for _, what in ranks.steps if not what.startswith(("wait", "record"))]
    once = ["meet", *["multiply"] * 3]
    assert steps == ["raise an earlier failure", "meet", *["copy"] * 6, *["multiply"] * 3, *once, *once]

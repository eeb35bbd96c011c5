"""An all-gather and matmul in chunks, between ranks in the host's memory: each step is done when it is enqueued."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from types import SimpleNamespace

import pytest
import torch

from graphar import reference
from graphar.matmul import gathered_chunks
from graphar.matmul.gathered_chunks import GatheredChunks
from graphar.matmul.operands import MatmulOperands
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call, Operands
from graphar.plan.work import Product
from tests.cases import same_bits

ROWS_A_LAUNCH, K = 5, 12


class Stream:
    """Stands in for a stream whose work is always done. ``waited`` is what it waited for last."""

    cuda_stream, waited = 0, None

    def wait_stream(self, other):
        self.waited = other

    wait_event = wait_stream

    def record_event(self):
        pass


class Ranks:
    """Stands in for an engine with ``world_size`` devices. ``steps`` is what it did, in order."""

    def __init__(self, world_size: int, monkeypatch) -> None:
        self.world_size, self.steps = world_size, []
        scratch = Algorithm.ALLGATHER_MATMUL.row.scratch(world_size)
        memory = [torch.empty(scratch.nbytes, dtype=torch.uint8) for _ in range(world_size)]
        self.runner = SimpleNamespace(
            lock=threading.Lock(),
            members=[SimpleNamespace(rank=rank, device=rank) for rank in range(world_size)],
            raise_failure=lambda: self.steps.append("raise an earlier failure"),
            kernels=SimpleNamespace(scratch=lambda algorithm: [one.data_ptr() for one in memory]),
        )
        monkeypatch.setattr(GatheredChunks, "_meeting", lambda *_: lambda: self.steps.append("meet"))
        monkeypatch.setattr(gathered_chunks, "streams_of", lambda device: (Stream(), Stream()))
        monkeypatch.setattr(gathered_chunks, "on_device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(gathered_chunks, "driver_call", self._copy)
        monkeypatch.setattr(gathered_chunks, "driver", SimpleNamespace(cuMemcpyAsync=None))
        monkeypatch.setattr(gathered_chunks, "tensor_at", self._tensor_at)
        monkeypatch.setattr(gathered_chunks, "gathered_rows_a_launch", lambda algorithm, world_size, k: ROWS_A_LAUNCH)

    def _copy(self, function, to, source, nbytes, stream):
        ctypes.memmove(to, source, nbytes)
        self.steps.append("copy")

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
    GatheredChunks(ranks, call, algorithm).run(operands)


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


def test_after_an_error_the_callers_stream_waits_for_the_copies(monkeypatch):
    members, (main, side) = operands([2, 2]), (Stream(), Stream())
    ranks = Ranks(2, monkeypatch)
    monkeypatch.setattr(gathered_chunks, "streams_of", lambda device: (main, side))
    monkeypatch.setattr(torch, "mm", lambda *args, **how: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        run(ranks, members)

    assert main.waited is side


def test_ranks_meet_before_the_first_copy_and_before_they_read_the_rows_of_each_peer(monkeypatch):
    ranks, members = Ranks(3, monkeypatch), operands([2, 2, 2], gathered=False)
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **how: ranks.steps.append("multiply") or multiply(*args, **how))

    run(ranks, members)

    once = ["meet", *["multiply"] * 3]
    assert ranks.steps == ["raise an earlier failure", "meet", *["copy"] * 6, *["multiply"] * 3, *once, *once]

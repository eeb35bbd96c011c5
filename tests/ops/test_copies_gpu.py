"""Calls by copy engines between processes, which share a GPU where there is one: bits, graphs, late ranks, suspension.

What every kernel is asked, they are asked by tests.ops.gpu_cases and tests.ranks.test_shared_gpu, too.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import graphar
from graphar import reference
from graphar.numerics.dtypes import TYPE_NAMES
from graphar.plan.algorithms import COPYING
from graphar.plan.call import Call, Operands
from graphar.plan.scratch import COPY_UNIT_NBYTES
from graphar.plan.work import MOVING, Exchange, Parts, Sum
from tests.cases import bit_patterns, raw, same_bits
from tests.processes import run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

pytestmark = pytest.mark.gpu(2, shared=True)

SIZES = (1, 77, 20_001, 5)


def communicator_of_small_chunks() -> graphar.Communicator:
    """One whose parts travel in chunks of one page: tensors of few bytes take all places several times. Collective."""
    made = graphar.Communicator(timeout_s=20)
    made.prepare([torch.bfloat16], ops=["allgather"])  # finds its table
    policy = replace(made.engine.table.copies, chunk_nbytes=COPY_UNIT_NBYTES, chunks=1 << 20)
    made.engine.use_table(replace(made.engine.table, copies=policy))
    return made


def counts_of(size: int, world_size: int) -> tuple[int, ...]:
    """Uneven parts, of which one may be empty; the same on every rank."""
    choices = random.Random(size)
    return (*(choices.choice([0, size, size // 2, 3]) for _ in range(world_size - 1)), size)


class Made:
    """A call of this rank, and what it must give. Tensors begin at any byte that their dtype allows."""

    def __init__(self, op: str, size: int, dtype: torch.dtype, rank: int, world_size: int) -> None:
        counts = (size,) * world_size if op == "alltoall" else counts_of(size, world_size)
        numels = counts if op == "allgather" else (sum(counts),) * world_size
        fill = bit_patterns if dtype in TYPE_NAMES else raw
        self._fill = lambda seed: [fill(seed + 10 * at, one, dtype) for at, one in enumerate(numels)]
        works = {"allreduce": Sum(sum(counts)), "alltoall": Exchange(rank, (1,), (counts,), (counts,))}
        work = works.get(op, Parts(op, counts))
        self._op, self._counts, self._rank = op, counts, rank
        self.x = torch.empty(numels[rank] + 1, dtype=dtype, device="cuda")[size % 2 :][: numels[rank]]
        numel = counts[rank] if op == "reducescatter" else sum(counts)
        self._around = torch.full((numel + 3,), 7.0, device="cuda").to(dtype)
        self.out = self._around[1 : numel + 1]
        self.call = Call.of(work, self.x, algorithm=COPYING[op].value)

    def use(self, seed: int) -> torch.Tensor:
        """Puts other data into the input, and returns the result for it."""
        xs = self._fill(seed)
        self.x.copy_(xs[self._rank])
        if self._op in MOVING:
            return torch.cat(xs) if self._op == "allgather" else reference.alltoall(xs)[self._rank]
        total = reference.allreduce(xs)
        return total.split(self._counts)[self._rank] if self._op == "reducescatter" else total

    def run(self, communicator: graphar.Communicator) -> None:
        communicator.engine.run(self.call, [Operands((self.x,), (self.out,))])

    def is_right(self, expected: torch.Tensor) -> bool:
        beside = torch.cat([self._around[:1], self._around[len(self.out) + 1 :]]).float().tolist()
        return same_bits(self.out.cpu(), expected) == 0 and beside == [7.0] * 3


def calls(rank: int, world_size: int):
    for op in COPYING:
        for size in SIZES:
            for dtype in (*TYPE_NAMES, *([torch.uint8] if op in MOVING else [])):
                yield (op, size, str(dtype)), Made(op, size, dtype, rank, world_size)


def eager_and_captured(rank, world_size):
    """The calls whose results are wrong: eager, with a rank late; of replayed graphs; and after a suspension."""
    wrong, communicator = [], communicator_of_small_chunks()
    made = dict(calls(rank, world_size))
    for turn, (name, one) in enumerate(made.items()):
        expected = one.use(turn)
        if turn % 5 == rank:
            torch.cuda._sleep(20_000_000)
        one.run(communicator)
        one.run(communicator)
        communicator.synchronize()
        wrong += [] if one.is_right(expected) else [("eager", *name)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in made.values():
            one.run(communicator)
    communicator.engine.plans.clear()  # a graph needs nothing of Python's
    for when in ("replayed", "resumed"):
        expected = {name: one.use(1000 + turn) for turn, (name, one) in enumerate(made.items())}
        for one in made.values():
            one.out.view(torch.uint8).fill_(9)
        torch.cuda.synchronize()
        graph.replay()
        communicator.synchronize()
        wrong += [(when, *name) for name, one in made.items() if not one.is_right(expected[name])]
        if when == "replayed":
            scratch = communicator.memory().scratch
            assert {one.value for one in COPYING.values()} <= set(scratch)
            assert all(scratch[one.value].resident_nbytes <= 194 << 20 for one in COPYING.values())
            communicator.suspend()
            assert communicator.memory().total.resident_nbytes == 0
            communicator.resume()
    communicator.close()
    return wrong


@pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)
def test_results_are_the_specifications_whatever_is_late_captured_or_suspended(world_size):
    assert run_on_gpus(eager_and_captured, world_size, timeout_s=400) == [[]] * world_size


def into_symmetric_tensors(rank, world_size):
    """Whether peers copy into a symmetric output; and what a rank raises whose output is another one."""
    communicator, dtype = communicator_of_small_chunks(), torch.bfloat16
    outs = [communicator.empty(99_999, dtype=dtype) for _ in range(2)]
    xs = [bit_patterns(other, 99_999, dtype) for other in range(world_size)]
    found = []
    for out in (*outs, outs[0][16:50_000]):
        numel = out.numel()
        communicator.allreduce(xs[rank][:numel].cuda(), out=out, algorithm="two_shot_copies")
        communicator.synchronize()
        found.append(same_bits(out.cpu(), reference.allreduce([x[:numel] for x in xs])))
        equal = [x[: numel // world_size * world_size] for x in xs]
        parts = out[: len(equal[0])]
        communicator.alltoall(equal[rank].cuda(), out=parts, algorithm="alltoall_copies")
        communicator.synchronize()
        found.append(same_bits(parts.cpu(), reference.alltoall(equal)[rank]))

    def call_unlike() -> None:
        communicator.allreduce(xs[rank].cuda(), out=outs[min(rank, 1)], algorithm="two_shot_copies")
        communicator.synchronize()

    with pytest.raises(graphar.CommunicatorError) as error:
        call_unlike()
    return found, str(error.value)


def test_peers_copy_into_symmetric_outputs_which_must_be_the_same():
    for found, message in run_on_gpus(into_symmetric_tensors, 2):
        assert found == [0] * 6
        assert "two_shot_copies" in message
        assert "symmetric tensor 0" in message
        assert "symmetric tensor 1" in message


def explained(rank, world_size):
    engine, made = graphar.Communicator(timeout_s=20).engine, [Made(op, 77, torch.bfloat16, rank, 2) for op in COPYING]
    found = [engine.explain(one.call, one.x) for one in made]
    return [str(one) for one in found], [one.blocks for one in found]


def test_explain_says_how_many_blocks_a_call_holds():
    for found, blocks in run_on_gpus(explained, 2):
        assert all("by copy engines, 1 block while ranks meet" in one for one in found)
        assert [" and 32 while a rank adds" in one for one in found] == [op not in MOVING for op in COPYING]
        assert blocks == [1 if op in MOVING else 32 for op in COPYING]

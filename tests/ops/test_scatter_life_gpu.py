"""Reduce-scatter and all-gather on GPUs over time: on several streams, with a rank that does not come."""

import time

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.entries import by_entries
from graphar.plan.slices import slices
from tests.cases import normal, same_bits
from tests.gpu import Ranks, bare_launches

pytestmark = pytest.mark.gpu

DTYPE = torch.bfloat16
every_op = pytest.mark.parametrize("op", ["reducescatter", "allgather"])


class Call:
    """Inputs, outputs and expected outputs. A part has ``numel`` elements, one more on rank 0."""

    def __init__(self, ranks: Ranks, op: str, numel: int, seed: int = 0) -> None:
        self.ranks, self.op = ranks, op
        self.counts = tuple(numel + (rank == 0) for rank in range(ranks.world_size))
        total = sum(self.counts)
        if op == "reducescatter":
            parts = [normal(100 * seed + rank, total, DTYPE) for rank in range(ranks.world_size)]
            self.expected = list(graphar.reference.allreduce(parts).split(self.counts))
        else:
            parts = [normal(100 * seed + rank, count, DTYPE) for rank, count in enumerate(self.counts)]
            self.expected = [torch.cat(parts)] * ranks.world_size
        self.xs = ranks.place(parts)
        self.ys = ranks.place([torch.empty_like(one) for one in self.expected])

    def run(self) -> None:
        self.ranks.run_parts(self.op, self.xs, self.ys, self.counts)

    def run_and_check(self) -> None:
        self.forget()
        self.run()
        self.check()

    def forget(self) -> None:
        for y in self.ys:
            y.fill_(float("nan"))
        self.settle()

    def check(self) -> None:
        self.settle()
        for rank, (y, expected) in enumerate(zip(self.ys, self.expected, strict=True)):
            assert same_bits(y.cpu(), expected) == 0, f"rank {rank}"

    def settle(self) -> None:
        for device in range(self.ranks.world_size):
            torch.cuda.synchronize(device)


# ---- streams --------------------------------------------------------------------------------------------------------


@every_op
def test_calls_on_two_streams_follow_each_other(ranks: Ranks, op):
    calls = [Call(ranks, op, 1 << 16, seed) for seed in range(20)]
    calls[0].run_and_check()
    ranks.in_turn_on_two_streams([call.run for call in calls])
    for call in calls:
        call.check()


def test_the_ops_take_turns_on_one_communicator(ranks: Ranks):
    calls = [Call(ranks, op, numel) for numel in (3, 8199, 1 << 18) for op in ("reducescatter", "allgather")]
    parts = [normal(rank, 8199, DTYPE) for rank in range(ranks.world_size)]
    xs = ranks.place(parts)
    for _ in range(10):
        for call in calls:
            call.run()
            sums = ranks.communicator.allreduce(xs)
    ranks.check_result(sums, parts)
    for call in calls:
        call.check()


# ---- a rank that does not come --------------------------------------------------------------------------------------


def launch_all_but_last(call: Call, timeout_s: float) -> Algorithm:
    """Makes the call on all ranks but the last one. Returns its algorithm."""
    engine, world_size = call.ranks.communicator.engine, call.ranks.world_size
    config = by_entries(engine.table.parts[call.op], 1, max(call.counts) * DTYPE.itemsize)
    (only,) = slices(config.algorithm, world_size, call.counts, DTYPE.itemsize)
    planned = call.ranks.call_of_parts(call.op, call.xs[0], call.counts)
    launches = bare_launches(engine, planned, config, only, timeout_s)
    call.ranks.launch_on_all_but_the_last(launches, call.xs, call.ys)
    return config.algorithm


@every_op
@pytest.mark.parametrize("numel", [0, 8192, 1 << 20], ids=["empty parts but one's", "equal parts", "large parts"])
def test_a_rank_that_never_calls_is_named_within_the_deadline(fresh_ranks: Ranks, op, numel):
    call = Call(fresh_ranks, op, numel)
    call.run_and_check()
    algorithm = launch_all_but_last(call, timeout_s=0.5)
    fresh_ranks.assert_the_last_is_named(algorithm)
    with pytest.raises(graphar.CollectiveTimeout):
        call.run()
    assert torch.ones(8, device="cuda:0").sum().item() == 8


@every_op
def test_what_is_queued_behind_a_timeout_ends_at_once(fresh_ranks: Ranks, op):
    call = Call(fresh_ranks, op, 8192)
    call.run_and_check()
    begin = time.monotonic()
    for _ in range(100):
        launch_all_but_last(call, timeout_s=1)
    with pytest.raises(graphar.CollectiveTimeout):
        fresh_ranks.communicator.synchronize()
    assert time.monotonic() - begin < 10

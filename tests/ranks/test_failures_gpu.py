"""Failures on GPUs are reported in bounded time, and torch goes on working."""

import time

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.slices import Slice
from graphar.plan.tables import measured_config
from graphar.plan.work import Sum
from tests.cases import integers, normal
from tests.gpu import KERNEL_ALGORITHMS, Ranks, bare_launches

pytestmark = pytest.mark.gpu


def launch_all_but_last(ranks: Ranks, algorithm: str, timeout_s: float) -> None:
    """A call in which the last rank takes no part."""
    xs = ranks.place([torch.ones(8192, dtype=torch.bfloat16)] * ranks.world_size)
    outs = [torch.empty_like(x) for x in xs]
    ranks.launch_on_all_but_the_last(launches_of(ranks, algorithm, timeout_s), xs, outs)


def launches_of(ranks: Ranks, algorithm: str, timeout_s: float) -> list:
    """One launch a rank, for 8192 elements of bfloat16."""
    engine = ranks.communicator.engine
    config = measured_config(engine.table, ranks.world_size, 2 * 8192, Algorithm(algorithm))
    return bare_launches(engine, Call(Sum(8192), torch.bfloat16, 0), config, Slice(8192), timeout_s)


@pytest.mark.parametrize("algorithm", KERNEL_ALGORITHMS)
def test_a_rank_that_never_calls_is_named_within_the_deadline(fresh_ranks: Ranks, algorithm):
    fresh_ranks.check(integers, 8192, torch.bfloat16, algorithm)
    launch_all_but_last(fresh_ranks, algorithm, timeout_s=0.5)
    fresh_ranks.assert_the_last_is_named(algorithm)
    # The communicator refuses what follows with the same error, and torch still works.
    with pytest.raises(graphar.CollectiveTimeout):
        fresh_ranks.check(integers, 8192, torch.bfloat16, "auto")
    assert torch.ones(8, device="cuda:0").sum().item() == 8


def test_what_is_queued_behind_a_timeout_ends_at_once(fresh_ranks: Ranks):
    fresh_ranks.check(integers, 8192, torch.bfloat16, "one_shot_push")
    begin = time.monotonic()
    for _ in range(100):
        launch_all_but_last(fresh_ranks, "one_shot_push", timeout_s=1)
    with pytest.raises(graphar.CollectiveTimeout):
        fresh_ranks.communicator.synchronize()
    assert time.monotonic() - begin < 10


@pytest.mark.promise("After a timeout the communicator refuses calls, and another one works.")
def test_another_communicator_works_after_a_timeout(fresh_ranks: Ranks):
    fresh_ranks.check(integers, 8192, torch.bfloat16, "two_shot_push")
    launch_all_but_last(fresh_ranks, "two_shot_push", timeout_s=0.2)
    with pytest.raises(graphar.CollectiveTimeout):
        fresh_ranks.communicator.synchronize()
    fresh_ranks.communicator.close()
    again = Ranks(fresh_ranks.world_size)
    again.check(integers, 8192, torch.bfloat16, "two_shot_push")
    again.communicator.close()


def test_calls_on_two_streams_follow_each_other(ranks: Ranks):
    parts = [[normal(10 * seed + r, 1 << 18, torch.bfloat16) for r in range(ranks.world_size)] for seed in range(3)]
    xs = [ranks.place(one) for one in parts]
    ranks.reduce(xs[0], "auto")
    calls = [lambda turn=turn: ranks.communicator.allreduce(xs[turn % 3]) for turn in range(40)]
    for turn, ys in enumerate(ranks.in_turn_on_two_streams(calls)):
        ranks.check_result(ys, parts[turn % 3])


@pytest.mark.promise("Streams and graphs of one communicator give right results or an error, never a deadlock.")
def test_two_calls_at_the_same_time_are_reported(fresh_ranks: Ranks):
    """The launches bypass the host's ordering, as two graphs on two streams do."""
    fresh_ranks.check(integers, 8192, torch.bfloat16, "one_shot")
    launches = [launches_of(fresh_ranks, "one_shot", timeout_s=0.5)[0] for _ in range(2)]
    x = torch.ones(8192, dtype=torch.bfloat16, device="cuda:0")
    outs = [torch.empty_like(x) for _ in launches]
    torch.cuda.synchronize(0)
    for launch, out in zip(launches, outs, strict=True):
        stream = torch.cuda.Stream(0)
        launch(x, out, stream.cuda_stream)
    with pytest.raises(graphar.ConcurrentCallError, match="on another stream"):
        fresh_ranks.communicator.synchronize()


def test_a_communicator_can_be_closed_and_made_again(ranks: Ranks):
    for _ in range(3):
        again = Ranks(ranks.world_size)
        again.check(integers, 8192, torch.bfloat16, "auto")
        again.communicator.close()
        with pytest.raises(graphar.CommunicatorError, match="closed"):
            again.communicator.allreduce(again.place([torch.ones(8)] * ranks.world_size))

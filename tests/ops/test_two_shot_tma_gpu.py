"""two_shot_tma with many chunks, which reuse the places in its scratch: its roles wait for each other."""

import random
import time

import pytest
import torch

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.call import Call
from graphar.plan.config import Config
from graphar.plan.scratch import TMA_BLOCKS, TMA_CHANNELS, TMA_DEPTH, TMA_THREADS
from graphar.plan.slices import Slice
from graphar.plan.work import Sum
from tests.cases import integers, normal, same_bits
from tests.gpu import Ranks, bare_launches

pytestmark = pytest.mark.gpu

NAME = "two_shot_tma"


def launch(ranks: Ranks, config: Config, numels: list[int], xs: list, outs: list, timeout_s: float = 10) -> None:
    """One call of a given configuration, in which rank r takes part with ``numels[r]`` elements.

    Ranks agree on the call: they say the elements of rank 0.
    """
    engine = ranks.communicator.engine
    call = Call.of(Sum(numels[0]), xs[0])
    for at, (member, numel, x, out) in enumerate(zip(engine.runner.members, numels, xs, outs, strict=True)):
        with torch.cuda.device(member.device):
            run = bare_launches(engine, call, config, Slice(numel), timeout_s)[at]
            run(x, out, torch.cuda.current_stream().cuda_stream)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("numel", [2097152, 16777216, 16777217, 16777240])
def test_many_chunks_give_the_specification(ranks: Ranks, numel, dtype):
    ranks.check_on_gpu(numel, dtype, NAME)


@pytest.mark.parametrize("blocks", [1, 3, 12, TMA_BLOCKS])
@pytest.mark.parametrize("chunk", [1, 7, 64, 384])
def test_every_grid_and_chunk_gives_the_specification(ranks: Ranks, blocks, chunk):
    ranks.check(integers, 8192, torch.bfloat16, NAME)  # makes the plan
    numel = 7 * blocks * TMA_CHANNELS * ranks.world_size * chunk * 8 + 5
    parts = [normal(rank, numel, torch.bfloat16) for rank in range(ranks.world_size)]
    xs = ranks.place(parts)
    outs = [torch.full_like(x, torch.nan) for x in xs]
    for _ in range(3):
        config = Config(Algorithm.TWO_SHOT_TMA, blocks, TMA_THREADS, chunk)
        launch(ranks, config, [numel] * ranks.world_size, xs, outs)
    ranks.communicator.synchronize()
    ranks.check_result(outs, parts)


def test_calls_that_change_their_grid_follow_each_other(ranks: Ranks):
    """Unsynchronised calls, so that ranks are in different ones; a late rank now and then."""
    choices = random.Random(11)
    most = 6 << 20
    xs = ranks.place([normal(rank, most, torch.bfloat16) for rank in range(ranks.world_size)])
    expected = graphar.reference.allreduce([x.to("cuda:0") for x in xs]).cpu()
    for _ in range(20):
        calls = [int(2 ** choices.uniform(0, 22.5)) for _ in range(10)]
        late = choices.randrange(ranks.world_size)
        with torch.cuda.device(late):
            torch.cuda._sleep(2_000_000)
        results = [ranks.communicator.allreduce([x[:numel] for x in xs], algorithm=NAME) for numel in calls]
        ranks.communicator.synchronize()
        for numel, ys in zip(calls, results, strict=True):
            for rank, y in enumerate(ys):
                assert same_bits(y.cpu(), expected[:numel]) == 0, f"rank {rank}, {numel} elements of {calls}"


def test_a_rank_that_ends_in_the_middle_is_named_and_every_role_gets_out(fresh_ranks: Ranks):
    ranks = fresh_ranks
    ranks.check(integers, 8192, torch.bfloat16, NAME)
    in_step = 2 * TMA_CHANNELS * ranks.world_size * 64 * 8
    others = [3 * TMA_DEPTH * in_step] * (ranks.world_size - 1)
    xs = ranks.place([torch.ones(others[0], dtype=torch.bfloat16)] * ranks.world_size)
    config = Config(Algorithm.TWO_SHOT_TMA, 2, TMA_THREADS, 64)
    begin = time.monotonic()
    launch(ranks, config, [*others, 2 * in_step], xs, xs, timeout_s=0.5)
    for _ in range(10):  # queued behind the time-out
        launch(ranks, config, [*others, 0], xs, xs, timeout_s=0.5)
    with pytest.raises(graphar.CollectiveTimeout) as raised:
        ranks.communicator.synchronize()
    assert time.monotonic() - begin < 3
    assert (raised.value.record.algorithm, raised.value.record.peer) == (NAME, ranks.world_size - 1)

"""CUDA graphs: captured calls replay, whatever happens to the Python objects in between."""

import pytest
import torch

from graphar.plan.call import Call
from graphar.plan.work import Sum
from tests.cases import normal
from tests.gpu import Ranks, operands
from tests.ops.gpu_cases import settle

pytestmark = pytest.mark.gpu


def capture(ranks: Ranks, xs, outs, algorithm="auto", calls=1) -> torch.cuda.CUDAGraph:
    def call() -> None:
        for _ in range(calls):
            ranks.communicator.allreduce(xs, out=outs, algorithm=algorithm)

    return ranks.capture(call)


def test_replays_are_among_the_launches_of_stats_and_not_among_its_calls(fresh_ranks: Ranks):
    ranks = fresh_ranks
    xs = ranks.place([normal(rank, 8192, torch.bfloat16) for rank in range(ranks.world_size)])
    ranks.reduce(xs, "one_shot_push")
    graph = capture(ranks, xs, [torch.empty_like(x) for x in xs], "one_shot_push", calls=3)
    before = ranks.communicator.stats()

    for _ in range(2):
        graph.replay()
    settle(ranks)

    after = ranks.communicator.stats()
    assert after.launches["one_shot_push"] - before.launches["one_shot_push"] == 2 * 3
    assert after.calls == before.calls


def test_a_sum_beside_other_work_is_captured_once_its_kernel_is_prepared(fresh_ranks: Ranks):
    numel = 1 << 20
    fresh_ranks.communicator.prepare(dtypes=[torch.bfloat16], max_nbytes=2 * numel)
    parts = [normal(rank, numel, torch.bfloat16) for rank in range(fresh_ranks.world_size)]
    xs = fresh_ranks.place(parts)
    outs = [torch.full_like(x, torch.nan) for x in xs]
    engine = fresh_ranks.communicator.engine
    call = Call.of(Sum(numel), xs[0], blocks=engine.table.beside.blocks)
    graph = fresh_ranks.capture(lambda: engine.run(call, operands(xs, outs)))
    settle(fresh_ranks)
    graph.replay()
    settle(fresh_ranks)
    fresh_ranks.check_result(outs, parts)

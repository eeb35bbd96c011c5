"""CUDA graphs: captured calls replay, whatever happens to the Python objects in between."""

from __future__ import annotations

import gc

import pytest
import torch

import graphar
from graphar.plan.call import Call
from graphar.plan.work import Sum
from tests.cases import normal
from tests.gpu import KERNEL_ALGORITHMS, Ranks, operands

pytestmark = pytest.mark.gpu


def capture(ranks: Ranks, xs, outs, algorithm="auto", calls=1) -> torch.cuda.CUDAGraph:
    def call() -> None:
        for _ in range(calls):
            ranks.communicator.allreduce(xs, out=outs, algorithm=algorithm)

    return ranks.capture(call)


def settle(ranks: Ranks) -> None:
    for device in range(ranks.world_size):
        torch.cuda.synchronize(device)


@pytest.mark.promise("Graphs replay after everything that Python held is gone, and epochs may wrap.")
@pytest.mark.parametrize("algorithm", KERNEL_ALGORITHMS)
def test_a_graph_replays_after_every_reference_is_gone(fresh_ranks: Ranks, algorithm):
    ranks = fresh_ranks
    parts = [normal(rank, 8199, torch.bfloat16) for rank in range(ranks.world_size)]
    xs = ranks.place(parts)
    outs = [torch.empty_like(x) for x in xs]
    ranks.reduce(xs, algorithm)
    graph = capture(ranks, xs, outs, algorithm, calls=3)
    ranks.communicator.engine.plans.clear()
    del ranks.communicator
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 26,), 0x55, dtype=torch.uint8, device=x.device) for x in xs]
    for _ in range(1000):
        graph.replay()
    settle(ranks)
    for out in outs:
        out.fill_(float("nan"))
    settle(ranks)
    graph.replay()
    settle(ranks)
    ranks.check_result(outs, parts)
    assert all(bool((one == 0x55).all()) for one in junk)


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


def test_replays_mix_with_eager_calls_and_other_graphs(ranks: Ranks):
    small, large = 8192, 1 << 20
    parts = {n: [normal(rank, n, torch.bfloat16) for rank in range(ranks.world_size)] for n in (small, large)}
    xs = {n: ranks.place(parts[n]) for n in parts}
    outs = {n: [torch.empty_like(x) for x in xs[n]] for n in parts}
    for n in parts:
        ranks.reduce(xs[n], "auto")
    graphs = {n: capture(ranks, xs[n], outs[n]) for n in parts}
    for turn in range(50):
        for n in parts:
            for out in outs[n]:
                out.fill_(float("nan"))
            settle(ranks)
            graphs[n].replay()
            settle(ranks)
            ranks.check_result(outs[n], parts[n])
            if turn % 3 == 0:
                ranks.check_result(ranks.reduce(xs[n], "auto"), parts[n])


@pytest.mark.promise("Kernels are loaded before they are launched, and never during a capture.")
def test_capturing_what_was_not_prepared_is_refused(fresh_ranks: Ranks):
    xs = fresh_ranks.place([torch.ones(8192, dtype=torch.float16)] * fresh_ranks.world_size)
    outs = [torch.empty_like(x) for x in xs]
    fresh_ranks.communicator.prepare(dtypes=[torch.bfloat16])
    graph = torch.cuda.CUDAGraph()
    refused = pytest.raises(graphar.CommunicatorError, match="no plan yet")
    with refused, torch.cuda.device(0), torch.cuda.graph(graph):
        xs[0].add(1)  # torch warns of an empty graph
        fresh_ranks.communicator.allreduce(xs, out=outs)
    fresh_ranks.check_parts([x.cpu() for x in xs], "auto")


def test_a_size_not_seen_before_is_captured_once_its_kernel_is_prepared(fresh_ranks: Ranks):
    fresh_ranks.communicator.prepare(dtypes=[torch.bfloat16])
    parts = [normal(rank, 12345, torch.bfloat16) for rank in range(fresh_ranks.world_size)]
    xs = fresh_ranks.place(parts)
    outs = [torch.full_like(x, torch.nan) for x in xs]
    graph = capture(fresh_ranks, xs, outs)
    settle(fresh_ranks)
    graph.replay()
    settle(fresh_ranks)
    fresh_ranks.check_result(outs, parts)


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

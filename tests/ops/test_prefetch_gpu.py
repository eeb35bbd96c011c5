"""All-reduces that prefetch, on real GPUs: the same bits with a hint of any kind and without, eager and in graphs."""

from __future__ import annotations

import pytest
import torch

import graphar
from graphar.plan.algorithms import kernels_that
from graphar.plan.tables import shipped_table
from tests.cases import bit_patterns, normal, same_bits
from tests.gpu import DTYPES, EXACT_ALGORITHMS, Ranks, fits
from tests.processes import run_ranks

pytestmark = pytest.mark.gpu

POLICY = shipped_table("nvidia_h200").prefetch
NUMELS = (1, 7, 8192, 8199, 65536, POLICY.largest_nbytes // 2, POLICY.largest_nbytes // 2 + 1)
HINTS = {
    "a weight": lambda device: torch.ones(1024, 7168, dtype=torch.bfloat16, device=device),
    "a transposed one": lambda device: torch.ones(1024, 512, device=device).t(),
    "more than the budget": lambda device: torch.ones(POLICY.budget_nbytes + 48, dtype=torch.uint8, device=device),
    "of odd length and place": lambda device: torch.ones(40001, dtype=torch.uint8, device=device)[3:],
    "too small": lambda device: torch.ones(15, dtype=torch.uint8, device=device),
    "empty": lambda device: torch.empty(0, device=device),
    "with gaps": lambda device: torch.ones(512, 512, device=device)[:, ::3],
}


def hints(ranks: Ranks, kind: str = "a weight") -> list[torch.Tensor]:
    return [HINTS[kind](f"cuda:{rank}") for rank in range(ranks.world_size)]


def check(ranks: Ranks, parts, following, **options) -> None:
    ys = ranks.communicator.allreduce(ranks.place(parts), prefetch=following, **options)
    ranks.communicator.synchronize()
    ranks.check_result(ys, parts)


@pytest.mark.promise("A prefetch reads all of its tensor once, and changes no result.")
@pytest.mark.parametrize("algorithm", [*EXACT_ALGORITHMS, "auto"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_algorithm_gives_the_specification_bit_for_bit(ranks: Ranks, algorithm, dtype):
    for numel in NUMELS:
        if algorithm == "auto" or fits(algorithm, ranks.world_size, numel, dtype):
            for fill in (normal, bit_patterns):
                parts = [fill(rank, numel, dtype) for rank in range(ranks.world_size)]
                check(ranks, parts, hints(ranks), algorithm=algorithm)


@pytest.mark.parametrize("kind", HINTS)
def test_any_tensor_may_be_prefetched(ranks: Ranks, kind):
    following = hints(ranks, kind)
    before = [one.clone() for one in following]
    for numel in (1, 8192, 262144):
        for _ in range(5):
            check(ranks, [normal(rank, numel, torch.bfloat16) for rank in range(ranks.world_size)], following)

    assert [bool(torch.equal(*pair)) for pair in zip(following, before, strict=True)] == [True] * ranks.world_size


@pytest.mark.parametrize("algorithm", kernels_that(lambda row: row.prefetches))
def test_the_kernel_that_prefetches_is_the_one_asked_for_and_leaves_its_scratch_as_ever(ranks: Ranks, algorithm):
    parts = [normal(rank, 8192, torch.bfloat16) for rank in range(ranks.world_size)]
    before = ranks.calls_of(algorithm)

    check(ranks, parts, hints(ranks), algorithm=algorithm.value)

    assert ranks.calls_of(algorithm) == before + 1
    assert ranks.grid_is_idle(algorithm)
    assert ranks.scratch_is_as_before(algorithm)


def test_calls_with_and_without_follow_each_other_at_any_size(ranks: Ranks):
    following = hints(ranks)
    for turn in range(60):
        parts = [normal(rank, 1 + 8191 * (turn % 7), torch.bfloat16) for rank in range(ranks.world_size)]
        check(ranks, parts, following if turn % 3 else None)


def test_one_rank_alone_may_have_something_to_prefetch(ranks: Ranks):
    parts = [normal(rank, 8192, torch.bfloat16) for rank in range(ranks.world_size)]
    following = [torch.empty(0, device=f"cuda:{rank}") for rank in range(ranks.world_size)]
    following[0] = hints(ranks)[0]

    check(ranks, parts, following)


@pytest.mark.promise("A prefetch reads all of its tensor once, and changes no result.")
def test_a_graph_prefetches_at_every_replay_and_gives_the_same_bits(ranks: Ranks):
    parts = [normal(rank, 8192, torch.bfloat16) for rank in range(ranks.world_size)]
    xs, following = ranks.place(parts), hints(ranks)
    outs = [torch.empty_like(x) for x in xs]
    ranks.communicator.allreduce(xs, out=outs, prefetch=following)
    graph = ranks.capture(lambda: ranks.communicator.allreduce(xs, out=outs, prefetch=following))
    for _ in range(100):
        for out in outs:
            out.fill_(float("nan"))
            torch.cuda.synchronize(out.device)
        graph.replay()
        ranks.communicator.synchronize()
        ranks.check_result(outs, parts)


@pytest.mark.parametrize("rows", [1, 64, 2048])
@pytest.mark.parametrize("partition", ["auto", "none", "split_m", "tiles"])
def test_the_fused_op_gives_the_bits_it_gives_without(ranks: Ranks, rows, partition):
    each = range(ranks.world_size)
    a, w = (
        ranks.place([normal(seed + rank, count * 512, torch.bfloat16).view(count, 512) for rank in each])
        for seed, count in ((0, rows), (10, 1024))
    )
    options = {"partition": partition, "num_partitions": min(rows, 2) if partition == "split_m" else None}
    options["group"] = ranks.communicator
    fused = graphar.fused_matmul_allreduce

    pairs = zip(fused(a, w, prefetch=hints(ranks), **options), fused(a, w, **options), strict=True)

    assert [same_bits(mine, expected) for mine, expected in pairs] == [0] * ranks.world_size


# ---- one process a GPU ----------------------------------------------------------------------------------------------


def differing_bits(rank, world_size):
    parts = [normal(r, 8192, torch.bfloat16) for r in range(world_size)]
    x, weight = parts[rank].cuda(), torch.nn.Parameter(torch.ones(512, 512, device="cuda"))
    expected = graphar.reference.allreduce(parts)
    fast = torch.compile(lambda x: graphar.allreduce(x * 2, prefetch=weight), backend="aot_eager", fullgraph=True)
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    found = [graphar.allreduce(x, prefetch=weight), graphar.allreduce(x, prefetch=weight, out=torch.empty_like(x))]
    found += [fast(x) / 2]
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = graphar.allreduce(static, prefetch=weight)
    graph.replay()
    torch.cuda.synchronize()
    return [same_bits(one.cpu(), expected) for one in (*found, captured)]


def test_processes_get_the_bits_they_get_without():
    world_size = torch.cuda.device_count()

    assert run_ranks(differing_bits, world_size, backend="cpu:gloo,cuda:nccl") == [[0] * 4] * world_size

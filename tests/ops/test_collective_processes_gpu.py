"""Collectives with one process per GPU: calls back to back, groups, torch.compile and graphs."""

import gc

import pytest
import torch
import torch.distributed as dist

import graphar
from tests.cases import integers, normal, parts_of, same_bits
from tests.gpu import kernel_calls
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import SHARED_WORLD_SIZES

every_shared_world_size = pytest.mark.parametrize("world_size", SHARED_WORLD_SIZES)


def assert_part(y, rank, parts, axis=0, what=""):
    assert same_bits(y.cpu(), graphar.reference.reducescatter(parts, axis)[rank]) == 0, what


def assert_reduced(y, parts, what=""):
    assert same_bits(y.cpu(), graphar.reference.allreduce(parts)) == 0, what


def assert_joined(y, parts, axis=0, what=""):
    assert same_bits(y.cpu(), graphar.reference.allgather(parts, axis)) == 0, what


def sizes_of(length, world_size):
    return [len(part) for part in torch.empty(length).tensor_split(world_size)]


@every_shared_world_size
@on_ranks(by=run_on_gpus)
def test_calls_back_to_back_and_in_place(rank, world_size):
    calls = [[normal(100 * seed + r, 262149, torch.bfloat16) for r in range(world_size)] for seed in range(3)]
    xs = [parts[rank].cuda() for parts in calls]
    ops = (graphar.allreduce, graphar.reducescatter, graphar.allgather)
    results = [[op(xs[turn % 3]) for op in ops] for turn in range(105)]
    for turn, (total, part, whole) in enumerate(results):
        assert_reduced(total, calls[turn % 3], f"call {turn}")
        assert_part(part, rank, calls[turn % 3], what=f"call {turn}")
        assert_joined(whole, calls[turn % 3], what=f"call {turn}")
    x, parts = xs[0], calls[0]
    assert_reduced(graphar.allreduce(torch._neg_view(x)), [-part for part in parts])
    graphar.allreduce(x, out=x)
    assert_reduced(x, parts)
    assert kernel_calls() == 317


@pytest.mark.gpu(4, shared=True)
@on_ranks(4, by=run_on_gpus)
def test_overlapping_subgroups_in_turn(rank, world_size):
    members = [(1, 3), (0, 2, 3), (0, 1, 2, 3)]
    groups = [dist.new_group(list(ranks)) for ranks in members]
    for turn in range(20):
        for group, ranks in zip(groups, members, strict=True):
            if rank in ranks:
                parts = [normal(100 * turn + r, 8199, torch.bfloat16) for r in ranks]
                mine = ranks.index(rank)
                assert_reduced(graphar.allreduce(parts[mine].cuda(), group), parts, f"{ranks}")
                y = graphar.reducescatter(parts[mine].cuda(), group)
                assert_part(y, mine, parts, 0, f"{ranks}")
                total = graphar.allgather(y, group, sizes=sizes_of(8199, len(ranks)))
                assert same_bits(total.cpu(), graphar.reference.allreduce(parts)) == 0, f"{ranks}"


@pytest.mark.promise("The CPU gives the same bits, and so do compiled, captured and replayed calls.")
@pytest.mark.gpu(2, shared=True)
@on_ranks(2, by=run_on_gpus, timeout_s=300)
def test_torch_compile_takes_them_whole_also_in_cuda_graphs(rank, world_size):
    def model(x):
        y = torch.relu(x) * 2
        return graphar.reducescatter(y) + 1, graphar.allgather(x * 3), graphar.allreduce(y) + 1

    def check(outs, parts):
        assert_part(outs[0] - 1, rank, [torch.relu(part) * 2 for part in parts])
        assert_joined(outs[1], [part * 3 for part in parts])
        assert_reduced(outs[2] - 1, [torch.relu(part) * 2 for part in parts])

    eager = torch.compile(model, fullgraph=True, dynamic=True)
    for rows in (8192, 8199, 100):
        parts = parts_of(integers, world_size, (rows, 2), torch.float32)
        check(eager(parts[rank].cuda()), parts)
    replayed = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    parts = parts_of(integers, world_size, (8193,), torch.float32)
    for _ in range(5):
        check(replayed(parts[rank].cuda()), parts)


@every_shared_world_size
@on_ranks(by=run_on_gpus)
def test_a_thousand_graph_replays_between_eager_calls(rank, world_size):
    parts = parts_of(normal, world_size, (8199,), torch.bfloat16)
    sizes = sizes_of(8199, world_size)
    x = parts[rank].cuda()
    graphar.allgather(graphar.reducescatter(x), sizes=sizes)
    graphar.allreduce(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = graphar.reducescatter(x)
        z = graphar.allgather(y, sizes=sizes)
        once = graphar.allreduce(x)
        twice = graphar.allreduce(once)
    gc.collect()
    torch.cuda.empty_cache()
    junk = torch.full((1 << 28,), 0x55, dtype=torch.uint8, device="cuda")
    total = graphar.reference.allreduce(parts)
    for turn in range(1000):
        if turn % 100 == 99:
            for one in (y, z, once, twice):
                one.fill_(torch.nan)
        graph.replay()
        if turn % 100 == 99:
            assert_part(y, rank, parts, what=f"turn {turn}")
            assert same_bits(z.cpu(), total) == 0, f"turn {turn}"
            assert_reduced(once, parts, f"turn {turn}")
            assert_reduced(twice, [total] * world_size, f"turn {turn}")
            assert_part(graphar.reducescatter(x), rank, parts, what=f"turn {turn}, eager")
            assert_reduced(graphar.allreduce(x), parts, f"turn {turn}, eager")
    assert bool((junk == 0x55).all())

"""The hierarchical all-reduce on 4 GPUs that are said to be of two hosts: kernels inside, NCCL across."""

import pytest
import torch

import graphar
from graphar import reference
from graphar.ranks import hierarchical
from tests.cases import KERNEL_DTYPES, bit_patterns, integers, normal, parts_of, same_bits
from tests.processes import on_ranks, run_on_gpus

pytestmark = pytest.mark.gpu(4)

TWO_BY_TWO = [[0, 1], [2, 3]]
CHUNK = 1 << 18  # in tests, so that there are several
NUMELS = (0, 1, 8199, CHUNK, 3 * CHUNK + 77)


def summed(communicator, x, **options):
    return communicator.allreduce(x, algorithm="hierarchical", **options)


@on_ranks(4, by=run_on_gpus)
def test_every_rank_gets_the_specifications_bits(rank, world_size):
    hierarchical._CHUNK_NUMEL = CHUNK
    cases = [(fill, dtype, None) for fill in (normal, bit_patterns) for dtype in KERNEL_DTYPES]
    cases += [(integers, torch.float64, None), (integers, torch.int64, None), (normal, torch.bfloat16, "int8")]
    wrong = []
    for split in (TWO_BY_TWO, [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]):
        with graphar.Communicator(hosts=split) as communicator:
            for fill, dtype, codec in cases:
                for numel in NUMELS:
                    parts = parts_of(fill, world_size, numel, dtype)
                    y = summed(communicator, parts[rank].cuda(), codec=codec).cpu()
                    expected = reference.hierarchical_allreduce(parts, split, codec and graphar.Codec(8))
                    if same_bits(y, expected):
                        wrong.append((split, fill.__name__, str(dtype), codec, numel))
    assert wrong == []


@on_ranks(4, by=run_on_gpus)
def test_graphars_kernels_serve_what_is_inside_and_nothing_else(rank, world_size):
    with graphar.Communicator(hosts=TWO_BY_TWO) as communicator:
        summed(communicator, torch.ones(8199, device="cuda"))
        assert communicator.engine.hierarchy.kernels.why_no_runner is None
        assert communicator.engine.runner is None


@on_ranks(4, by=run_on_gpus)
def test_calls_follow_each_other_on_any_streams(rank, world_size):
    """Calls back to back, in place and beside other work."""
    hierarchical._CHUNK_NUMEL = CHUNK
    parts = parts_of(normal, world_size, 5 * CHUNK + 3, torch.bfloat16)
    expected = reference.hierarchical_allreduce(parts, TWO_BY_TWO)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    with graphar.Communicator(hosts=TWO_BY_TWO) as communicator:
        for turn in range(20):
            with torch.cuda.stream(streams[turn % 2]):
                x = parts[rank].cuda()
                summed(communicator, x, out=x)
                results.append(x)
        torch.cuda.synchronize()
    assert [same_bits(y.cpu(), expected) for y in results] == [0] * 20


@on_ranks(4, by=run_on_gpus)
def test_a_captured_call_replays(rank, world_size):
    hierarchical._CHUNK_NUMEL = CHUNK
    parts = parts_of(normal, world_size, 3 * CHUNK + 77, torch.bfloat16)
    with graphar.Communicator(hosts=TWO_BY_TWO) as communicator:
        x = parts[rank].cuda()
        summed(communicator, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y = summed(communicator, x)
        wrong = []
        for sign in (1, -1):
            x.copy_(sign * parts[rank])
            graph.replay()
            torch.cuda.synchronize()
            wrong.append(same_bits(y.cpu(), reference.hierarchical_allreduce([sign * p for p in parts], TWO_BY_TWO)))
        del graph
    assert wrong == [0, 0]

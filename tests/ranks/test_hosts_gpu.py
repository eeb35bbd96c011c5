"""The hierarchical all-reduce on 4 GPUs that are said to be of two hosts: kernels inside, NCCL across."""

import pytest
import torch

import graphar
from graphar import reference
from graphar.ranks import hierarchical
from tests.cases import KERNEL_DTYPES, bit_patterns, integers, normal, same_bits
from tests.processes import run_on_gpus

pytestmark = pytest.mark.gpu(4)

TWO_BY_TWO = [[0, 1], [2, 3]]
CHUNK = 1 << 18  # in tests, so that there are several
NUMELS = (0, 1, 8199, CHUNK, 3 * CHUNK + 77)


def run(function):
    return run_on_gpus(function, 4)


def parts_of(fill, numel, dtype):
    return [fill(rank, numel, dtype) for rank in range(4)]


def summed(communicator, x, **options):
    return communicator.allreduce(x, algorithm="hierarchical", **options)


def wrong_sums(rank, world_size):
    """The calls whose results differ from the specification."""
    hierarchical._CHUNK_NUMEL = CHUNK
    cases = [(fill, dtype, None) for fill in (normal, bit_patterns) for dtype in KERNEL_DTYPES]
    cases += [(integers, torch.float64, None), (integers, torch.int64, None), (normal, torch.bfloat16, "int8")]
    wrong = []
    for split in (TWO_BY_TWO, [[0, 2], [1, 3]], [[0, 1, 2, 3]], [[0], [1], [2], [3]]):
        with graphar.Communicator(hosts=split) as communicator:
            for fill, dtype, codec in cases:
                for numel in NUMELS:
                    parts = parts_of(fill, numel, dtype)
                    y = summed(communicator, parts[rank].cuda(), codec=codec).cpu()
                    expected = reference.hierarchical_allreduce(parts, split, codec and graphar.Codec(8))
                    if same_bits(y, expected):
                        wrong.append((split, fill.__name__, str(dtype), codec, numel))
    return wrong


def test_every_rank_gets_the_specifications_bits():
    assert run(wrong_sums) == [[]] * 4


def kernels_inside(rank, world_size):
    with graphar.Communicator(hosts=TWO_BY_TWO) as communicator:
        summed(communicator, torch.ones(8199, device="cuda"))
        return communicator.engine.hierarchy._kernels.why_no_runner, communicator.engine.runner is None


def test_graphars_kernels_serve_what_is_inside_and_nothing_else():
    assert run(kernels_inside) == [(None, True)] * 4


def call_in_turn(rank, world_size):
    """Calls back to back, in place and beside other work, on alternating streams."""
    hierarchical._CHUNK_NUMEL = CHUNK
    parts = parts_of(normal, 5 * CHUNK + 3, torch.bfloat16)
    expected = reference.hierarchical_allreduce(parts, TWO_BY_TWO)
    streams, results = [torch.cuda.Stream() for _ in range(2)], []
    with graphar.Communicator(hosts=TWO_BY_TWO) as communicator:
        for turn in range(20):
            with torch.cuda.stream(streams[turn % 2]):
                x = parts[rank].cuda()
                summed(communicator, x, out=x)
                results.append(x)
        torch.cuda.synchronize()
    return [same_bits(y.cpu(), expected) for y in results]


def test_calls_follow_each_other_on_any_streams():
    assert run(call_in_turn) == [[0] * 20] * 4


def replay(rank, world_size):
    hierarchical._CHUNK_NUMEL = CHUNK
    parts = parts_of(normal, 3 * CHUNK + 77, torch.bfloat16)
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
    return wrong


def test_a_captured_call_replays():
    assert run(replay) == [[0, 0]] * 4

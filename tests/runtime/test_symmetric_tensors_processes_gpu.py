"""All-reduces straight into the symmetric tensors of other processes, also of late ones."""

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.plan.algorithms import Algorithm
from graphar.plan.config import Kernel
from graphar.runtime.registry import engine_of_group
from tests.cases import normal, same_bits
from tests.gpu import DIRECT_ALGORITHMS, DTYPES
from tests.processes import on_ranks, run_on_gpus
from tests.worlds import GPU_WORLD_SIZES

pytestmark = pytest.mark.gpu

GUARD = 4096  # elements on either side
PIPELINED = "two_shot_pipelined"


def inputs_of(world_size, numel, dtype, salt=0):
    return [normal(100 * salt + rank, numel, dtype) for rank in range(world_size)]


def assert_reduced(y, inputs, what="") -> None:
    assert same_bits(y.cpu(), graphar.reference.allreduce(inputs)) == 0, what


@pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)
@on_ranks(by=run_on_gpus)
def test_processes_reduce_straight_into_each_others_tensors(rank, world_size):
    for algorithm in DIRECT_ALGORITHMS:
        for dtype in DTYPES:
            for numel in (1, 7, 8199, 262149):
                inputs = inputs_of(world_size, numel, dtype)
                x, out = (graphar.empty(numel + 2 * GUARD, dtype=dtype) for _ in range(2))
                out.fill_(7)
                x[GUARD : GUARD + numel] = inputs[rank].cuda()
                part = out[GUARD : GUARD + numel]
                said = graphar.explain(x[GUARD : GUARD + numel], out=part, algorithm=algorithm).reason
                assert ", straight " in said
                graphar.allreduce(x[GUARD : GUARD + numel], out=part, algorithm=algorithm)
                assert_reduced(part, inputs, f"{algorithm} {dtype} {numel}")
                assert bool((out[:GUARD] == 7).all() and (out[GUARD + numel :] == 7).all())
    loaded = set(engine_of_group("").runner._functions)
    assert loaded == {
        Kernel(Algorithm(algorithm), dtype, direct=True).key for algorithm in DIRECT_ALGORITHMS for dtype in DTYPES
    }


@pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)
@on_ranks(by=run_on_gpus)
def test_nothing_comes_too_early_for_a_process_that_is_late(rank, world_size):
    numel = 1 << 20
    out = graphar.empty(numel, dtype=torch.bfloat16)
    for turn in range(3 * world_size):
        inputs = [inputs_of(world_size, numel, torch.bfloat16, salt=2 * turn + call) for call in range(2)]
        first, second = (one[rank].cuda() for one in inputs)
        if turn % world_size == rank:
            torch.cuda._sleep(20_000_000)
        graphar.allreduce(first, out=out, algorithm=PIPELINED)
        if turn % world_size == rank:
            torch.cuda._sleep(20_000_000)
        copy = out.clone()
        graphar.allreduce(second, out=out, algorithm=PIPELINED)
        assert_reduced(copy, inputs[0], f"turn {turn}: copied")
        assert_reduced(out, inputs[1], f"turn {turn}: overwritten")


@pytest.mark.gpu(4)
@on_ranks(4, by=run_on_gpus)
def test_subgroups_have_symmetric_tensors_of_their_own(rank, world_size):
    groups = {ranks: dist.new_group(ranks) for ranks in ((1, 3), (0, 2, 3))}
    for ranks, group in groups.items():
        if rank in ranks:
            inputs = inputs_of(len(ranks), 262149, torch.float32)
            out = graphar.empty(262149, dtype=torch.float32, group=group)
            x = inputs[ranks.index(rank)].cuda()
            graphar.allreduce(x, group, out=out, algorithm=PIPELINED)
            assert_reduced(out, inputs, f"{ranks}")

"""The multimem kernels on real GPUs, with the stand-in for their instructions: no multicast object is made or touched.

The stand-in adds in rank order, so the specification's bits are expected. What tests of other files do with every
algorithm they do with these two as well: small tensors, graphs, timeouts, epochs that wrap, calls back to back.
"""

import pytest
import torch
import torch.distributed as dist

import graphar
from graphar.plan.algorithms import kernels_that
from tests.cases import normal, same_bits
from tests.gpu import DTYPES, Ranks, fits
from tests.processes import on_ranks
from tests.worlds import GPU_WORLD_SIZES

pytestmark = pytest.mark.gpu

MULTIMEM_KERNELS = tuple(one.value for one in kernels_that(lambda row: not row.exact))
LARGE_NUMELS = (16777216, 16777224, 16777240, 33554432)  # the last is the most a two-shot takes
every_multimem_kernel = pytest.mark.parametrize("algorithm", MULTIMEM_KERNELS)
process_worlds = pytest.mark.parametrize("world_size", GPU_WORLD_SIZES)


@every_multimem_kernel
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_tensors_give_the_specification(ranks: Ranks, algorithm, dtype):
    for numel in LARGE_NUMELS:  # test_allreduce_gpu.py has the largest tensors that kernels take
        if fits(algorithm, ranks.world_size, numel, dtype):
            ranks.check_on_gpu(numel, dtype, algorithm)


def test_sizes_that_shrink_and_grow_while_the_algorithms_take_turns(ranks: Ranks):
    for numel in (4194304, 8, 262149, 9, 2097152, 1, 8200, 4194304):
        for algorithm in MULTIMEM_KERNELS:
            ranks.check(normal, numel, torch.bfloat16, algorithm)


@process_worlds
@on_ranks(backend="cpu:gloo,cuda:nccl", timeout_s=120)
def test_the_stand_in_works_between_processes(rank, world_size):
    communicator = graphar.Communicator(dist.group.WORLD, timeout_s=20)
    communicator.engine.multimem_stand_in = True
    for algorithm in MULTIMEM_KERNELS:
        for dtype in DTYPES:
            for numel in (8199, 1, 262149):
                parts = [normal(r, numel, dtype) for r in range(world_size)]
                y = communicator.allreduce(parts[rank].cuda(), algorithm=algorithm)
                assert same_bits(y.cpu(), graphar.reference.allreduce(parts)) == 0, f"{algorithm} {dtype} {numel}"
    communicator.close()

"""What all-reduces prefetch while they wait, executed on the host: all of it, once, and the same bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from graphar.plan.algorithms import Algorithm, kernels_that
from graphar.simulator.build import Mutation
from tests.host.build import build, known
from tests.host.cases import WORLD_SIZES, Kernels, differences, draw, dtypes_of, simulate

pytestmark = pytest.mark.host

CHUNK = 16 << 10  # prefetch_chunk in cuda_src/device/prefetch.cuh
NBYTES = (16, CHUNK - 16, CHUNK, CHUNK + 16, 7 * CHUNK + 48, 0)  # by call
WARPED = 4  # a call with several warps per block


def found_wrong(kernels: Kernels, world_size: int, seed: int, mutation: Mutation | None = None) -> list[str]:
    """The errors of random calls that prefetch."""
    drawn, dtype = draw(kernels.algorithm, world_size, torch.bfloat16, seed), torch.bfloat16
    calls = [replace(call, prefetch_nbytes=nbytes) for call, nbytes in zip(drawn.calls, NBYTES, strict=True)]
    shape = replace(calls[WARPED].shape, threads=32 * world_size)
    calls[WARPED] = replace(calls[WARPED], shape=shape)
    program = build(kernels.sources(), "plain", mutation)
    return differences(drawn, simulate(program, kernels, world_size, dtype, seed, calls))


@pytest.mark.promise("A prefetch reads all of its tensor once, and changes no result.")
@pytest.mark.parametrize("algorithm", kernels_that(lambda row: row.prefetches))
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_blocks_together_prefetch_all_of_it_once(algorithm, world_size):
    kernels = Kernels(algorithm, WORLD_SIZES, dtypes_of(algorithm))  # as in test_kernels.py, which has compiled them

    for seed in range(4):
        assert found_wrong(kernels, world_size, seed) == [], f"seed {seed}"


MUTANTS = {
    "all blocks prefetch the same": ("threadIdx.x / 32 * gridDim.x + blockIdx.x", "threadIdx.x / 32 * gridDim.x"),
    "the last chunk is left out": ("at < a.prefetch_nbytes;", "at + prefetch_chunk <= a.prefetch_nbytes;"),
}


known(["device/prefetch.cuh"], MUTANTS)


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_mistake_is_noticed(mistake):
    kernels = Kernels(Algorithm.ONE_SHOT_PUSH, (2,), (torch.bfloat16,))
    mutation = Mutation("device/prefetch.cuh", *MUTANTS[mistake])

    assert any(found_wrong(kernels, 2, seed, mutation) for seed in range(4))

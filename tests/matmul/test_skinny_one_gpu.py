"""Skinny matmuls between ranks that share one GPU, launched early behind a kernel that still writes."""

from __future__ import annotations

import ctypes
import functools

import pytest
import torch

from graphar.plan.tiles import SKINNY_TILES
from graphar.runtime.catalogue import SKINNY_KERNELS
from graphar.runtime.launcher import Grid
from tests.cases import same_bits
from tests.one_gpu import RanksOfOneGpu
from tests.small_kernels import bind

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
    ),
]

COLUMNS = 1096  # several tiles for each block
DEPTHS = (64, 520, 4096)  # of K; the last takes more places than a ring has
CALLS = 3  # the first one on a stream is not launched early
every_kernel = pytest.mark.parametrize("algorithm", SKINNY_KERNELS, ids=lambda one: one.value)

WRITE_LATE = """
#include "device/ptx/ptx.cuh"
extern "C" __global__ void __launch_bounds__(256) write_late(const Pack* from, Pack* to, u64 packs) {
  wait_for_previous_kernel();
  release_next_kernel();
  const u64 begin = global_time_ns();
  while (global_time_ns() - begin < 2000000) continue;
  for (u64 i = threadIdx.x; i < packs; i += blockDim.x) to[i] = from[i];
}
"""


@pytest.fixture(scope="module", params=[2, 3], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


@functools.cache
def late_writer():
    """The launch of the kernel above, and its parameters, which it reads when it is enqueued."""
    parameters = [ctypes.c_uint64() for _ in range(3)]
    return bind(WRITE_LATE, "write_late", 0, parameters, Grid(1, 256, 0, overlaps=False)), parameters


def write_late(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies on the current stream, long after the next kernel there could start."""
    launch, parameters = late_writer()
    for parameter, value in zip(parameters, (source.data_ptr(), target.data_ptr(), source.nbytes // 16), strict=True):
        parameter.value = value
    launch.enqueue(torch.cuda.current_stream().cuda_stream)


def drawn(ranks: RanksOfOneGpu, rows: int, k: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Operands of each rank: small integers, so that every sum is exact."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = (rows, k), (COLUMNS, k)
    return [
        tuple(torch.randint(-2, 3, one, generator=generator, device="cuda").to(torch.bfloat16) for one in shapes)
        for _ in range(ranks.world_size)
    ]


def wrong_elements(ranks: RanksOfOneGpu, algorithm, pairs, late: int, constant_weight: bool) -> list[int]:
    """How many elements of each rank's result are wrong, of the last of some calls.

    The kernel before each call writes one of the operands, number ``late``, after the call's kernel could start.
    """
    products = [(a.float() @ w.float().t()).bfloat16().float() for a, w in pairs]
    expected = sum(products[1:], products[0]).bfloat16()
    targets = [tuple(torch.zeros_like(one) if at == late else one for at, one in enumerate(pair)) for pair in pairs]
    found = []
    for _ in range(CALLS):
        for target in targets:
            target[late].zero_()

        found = ranks.skinny_allreduce(
            targets, algorithm, constant_weight, lambda rank: write_late(pairs[rank][late], targets[rank][late])
        )
    return [same_bits(result, expected) for result in found]


@every_kernel
@pytest.mark.parametrize("rows", [1, *(tile.rows for tile in SKINNY_TILES)])
@pytest.mark.parametrize("constant_weight", [False, True])
def test_rows_that_the_kernel_before_writes_are_those_multiplied(ranks, algorithm, rows, constant_weight):
    for k in DEPTHS:
        pairs = drawn(ranks, rows, k, seed=rows + k)
        assert wrong_elements(ranks, algorithm, pairs, 0, constant_weight) == [0] * ranks.world_size


@every_kernel
def test_a_weight_that_the_kernel_before_writes_is_too_unless_it_is_called_constant(ranks, algorithm):
    pairs = drawn(ranks, 16, 520, seed=1)

    assert wrong_elements(ranks, algorithm, pairs, 1, constant_weight=False) == [0] * ranks.world_size
    assert all(wrong_elements(ranks, algorithm, pairs, 1, constant_weight=True))

"""Fused matmuls in tiles between ranks that share one GPU."""

from __future__ import annotations

import contextlib
import ctypes
import time

import pytest
import torch

from graphar.plan.algorithms import Algorithm
from graphar.runtime.launcher import Grid, sm_count
from tests.cases import same_bits
from tests.one_gpu import MOST_BLOCKS, RanksOfOneGpu
from tests.small_kernels import bind

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
    ),
]

TILES = Algorithm.MATMUL_ALLREDUCE.row.tiles
ROWS, COLUMNS, K = 1664, 1096, 320  # no owner's tiles are a multiple of MOST_BLOCKS


@pytest.fixture(scope="module", params=[2, 3], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


def wrong_elements(ranks: RanksOfOneGpu, tile, beside=None) -> list[int]:
    """How many elements of each rank's result are wrong. Operands are small integers, so that every sum is exact."""
    generator = torch.Generator().manual_seed(ranks.world_size)
    shapes = (ROWS, K), (COLUMNS, K)
    pairs = [
        tuple(torch.randint(-2, 3, shape, generator=generator).to(torch.bfloat16).cuda() for shape in shapes)
        for _ in range(ranks.world_size)
    ]
    products = [(a.float() @ w.float().t()).bfloat16().float() for a, w in pairs]
    expected = sum(products[1:], products[0]).bfloat16()
    found = ranks.matmul_allreduce(pairs, tile, beside or contextlib.nullcontext())
    return [same_bits(result, expected) for result in found]


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_every_tile_gives_the_sum_of_the_rounded_products(ranks, tile):
    for _ in range(3):
        assert wrong_elements(ranks, tile) == [0] * ranks.world_size


HOLD = """
#include "device/ptx/ptx.cuh"
extern "C" __global__ void __launch_bounds__(1024, 1) hold(volatile u32* stop, u32* started) {
  const u64 begin = global_time_ns();
  if (threadIdx.x == 0) started[blockIdx.x] = 1;
  while (*stop == 0 && global_time_ns() - begin < 20000000000ull) continue;
}
"""
WHOLE_SM_NBYTES = 200 << 10


@contextlib.contextmanager
def held(sms: int):
    """Another kernel holds so many SMs of the GPU."""
    words = torch.zeros(1 + sms, dtype=torch.int32).pin_memory()
    pointers = [ctypes.c_uint64(words.data_ptr()), ctypes.c_uint64(words.data_ptr() + 4)]
    stream = torch.cuda.Stream()
    holder = bind(HOLD, "hold", 0, pointers, Grid(sms, 1024, WHOLE_SM_NBYTES, overlaps=False))
    holder.enqueue(stream.cuda_stream)
    until = time.monotonic() + 10
    while not words[1:].all() and time.monotonic() < until:
        time.sleep(1e-3)
    assert words[1:].all()
    try:
        yield
    finally:
        words[0] = 1
        stream.synchronize()


@pytest.mark.promise(
    "Calls of two communicators, or as many as declared, end in any order, if a matmul's K is equal on all ranks."
)
@pytest.mark.parametrize("tile", [tile for tile in TILES if tile.cluster == 1], ids=str)
def test_a_rank_with_room_for_one_block_ends(ranks, tile):
    """Another kernel holds most SMs. The first ranks have room for all blocks of their grids, the last one for one."""
    room = MOST_BLOCKS * (ranks.world_size - 1) + 1
    beside = held(sm_count(0) - room)

    assert wrong_elements(ranks, tile, beside) == [0] * ranks.world_size

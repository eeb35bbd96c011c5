"""Fused tiles of e4m3 operands between ranks that share one GPU: the sum of the scaled matmul's partials."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphar import reference
from graphar.numerics.fp8_products import FP8
from graphar.plan.algorithms import Algorithm
from graphar.plan.tiles import REDUCED_FP8_TILES, SCATTERED_FP8_TILES
from graphar.product.scaled_gemm import scaled_matmul
from tests.cases import same_bits
from tests.one_gpu import RanksOfOneGpu

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
    ),
]

KERNELS = (Algorithm.MATMUL_ALLREDUCE, Algorithm.MATMUL_REDUCESCATTER)
SHAPES = ((7, 136, 48), (300, 1096, 528), (1030, 520, 4096))  # rows, columns, K
every_kernel = pytest.mark.parametrize("algorithm", KERNELS, ids=lambda one: one.value)
every_format = pytest.mark.parametrize("scales", ["rows", "blocks"])


@pytest.fixture(scope="module", params=[2, 4, 8], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


def drawn(ranks, scales, rows, columns, k, seed):
    """Each rank's a, w and their scales. Ranks differ in K, and the scales of A lie column by column."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def scale(*shape):
        return torch.rand(shape, generator=generator, device="cuda") + 0.5

    found = []
    for rank in range(ranks.world_size):
        blocks = -(-(k + 16 * rank) // 128)
        a, w = (torch.randn(n, k + 16 * rank, generator=generator, device="cuda").to(FP8) for n in (rows, columns))
        if scales == "rows":
            found.append((a, w, scale(rows, 1), scale(1, columns)))
        else:
            found.append((a, w, scale(blocks, rows).t(), scale(-(-columns // 128), blocks)))
    return found


def expected(algorithm, operands, dtype=torch.bfloat16, bias=None):
    """What each rank gets of the sum of the scaled matmul's partials in the order of ranks."""
    parts = [scaled_matmul(a, w, a_scale=of_a, w_scale=of_w, out_dtype=dtype) for a, w, of_a, of_w in operands]
    if bias is None:
        total = reference.allreduce(parts)
    else:
        total = reference.with_bias(reference.allreduce([reference.widened(one, bias) for one in parts]), bias, dtype)
    return total.tensor_split(len(parts)) if algorithm is Algorithm.MATMUL_REDUCESCATTER else [total] * len(parts)


def wrong(found, wanted):
    return [same_bits(one, part) for one, part in zip(found, wanted, strict=True)]


@every_kernel
@every_format
@pytest.mark.parametrize("tile", [None, *SCATTERED_FP8_TILES], ids=str)
def test_every_tile_has_the_bits_of_the_scaled_matmuls_partials(ranks, algorithm, scales, tile):
    if tile and ranks.world_size == 4:
        pytest.skip("each tile is compiled for 2 and for 8 ranks")
    if tile and algorithm is Algorithm.MATMUL_ALLREDUCE and tile not in REDUCED_FP8_TILES:
        pytest.skip("not a tile of all-reduces")
    dtype = torch.float16 if ranks.world_size == 2 else torch.bfloat16
    for (rows, columns, k), with_bias in itertools.product(SHAPES, (False, True)):
        operands = drawn(ranks, scales, rows, columns, k, seed=rows + k)
        bias = torch.arange(columns, device="cuda").remainder(17).to(dtype) if with_bias else None
        wanted = expected(algorithm, operands, dtype, bias)
        for _ in range(2):
            found = ranks.scaled_sum(operands, algorithm, scales, dtype, tile=tile, bias=bias)

            assert wrong(found, wanted) == [0] * ranks.world_size, (rows, columns, k, with_bias)


@every_kernel
@every_format
def test_a_captured_launch_has_the_same_bits_whenever_it_is_replayed(ranks, algorithm, scales):
    operands = drawn(ranks, scales, 300, 1096, 528, seed=3)
    wanted = expected(algorithm, operands)

    for replays in (1, 3):
        found = ranks.scaled_sum(operands, algorithm, scales, torch.bfloat16, replays=replays)

        assert wrong(found, wanted) == [0] * ranks.world_size

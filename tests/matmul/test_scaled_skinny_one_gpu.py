"""Skinny matmuls of e4m3 operands between ranks that share one GPU: the sum of the scaled matmul's partials."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphar import reference
from graphar.numerics.fp8_products import FP8
from graphar.product.scaled_gemm import scaled_matmul
from graphar.product.tensor_maps import aligned_copy
from graphar.runtime.catalogue import SKINNY_KERNELS
from tests.cases import same_bits
from tests.matmul.test_skinny_one_gpu import write_late
from tests.one_gpu import RanksOfOneGpu

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
    ),
]

COLUMNS = 1096  # several tiles for each block, and a block of scales that ends within a tile
DEPTHS = (48, 528, 4096)  # of K; the last takes more places than a ring has
ROWS = (1, 16, 17, 64)  # of every tile
CALLS = 3  # the first one on a stream is not launched early
every_kernel = pytest.mark.parametrize("algorithm", SKINNY_KERNELS, ids=lambda one: one.value)
every_format = pytest.mark.parametrize("scales", ["rows", "blocks"])


@pytest.fixture(scope="module", params=[2, 4, 8], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


def drawn(ranks, scales, rows, k, seed):
    """Each rank's a, w and their scales. Ranks differ in K, and the scales of A lie column by column."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def scale(*shape):
        return torch.rand(shape, generator=generator, device="cuda") + 0.5

    found = []
    for rank in range(ranks.world_size):
        columns = k + 16 * rank
        blocks = -(-columns // 128)
        a, w = (torch.randn(n, columns, generator=generator, device="cuda").to(FP8) for n in (rows, COLUMNS))
        if scales == "rows":
            found.append((a, w, scale(rows, 1), scale(1, COLUMNS)))
        else:
            found.append((a, w, scale(blocks, rows).t(), scale(-(-COLUMNS // 128), blocks)))
    return found


def partial(a, w, a_scale, w_scale, dtype):
    return scaled_matmul(aligned_copy(a), aligned_copy(w), a_scale=a_scale, w_scale=w_scale, out_dtype=dtype)


def expected(operands, dtype=torch.bfloat16, bias=None):
    """The sum of the scaled matmul's partials in the order of ranks."""
    parts = [partial(*own, dtype) for own in operands]
    if bias is None:
        return reference.allreduce(parts)
    total = reference.allreduce([reference.widened(part, bias) for part in parts])
    return reference.with_bias(total, bias, dtype)


@every_kernel
@every_format
def test_every_number_of_rows_has_the_bits_of_the_scaled_matmuls_partials(ranks, algorithm, scales):
    dtype = torch.float16 if ranks.world_size == 2 else torch.bfloat16
    for rows, k, with_bias in itertools.product(ROWS, DEPTHS, (False, True)):
        operands = drawn(ranks, scales, rows, k, seed=rows + k)
        bias = torch.arange(COLUMNS, device="cuda").remainder(17).to(dtype) if with_bias else None
        wanted = expected(operands, dtype, bias)
        for _ in range(2):
            found = ranks.scaled_sum(operands, algorithm, scales, dtype, bias=bias)

            wrong = [same_bits(one, wanted) for one in found]
            assert wrong == [0] * ranks.world_size, (rows, k, with_bias)


@every_kernel
@every_format
def test_a_captured_launch_has_the_same_bits_whenever_it_is_replayed(ranks, algorithm, scales):
    operands = drawn(ranks, scales, 8, 528, seed=3)
    wanted = expected(operands)

    for replays in (1, CALLS):
        found = ranks.scaled_sum(operands, algorithm, scales, torch.bfloat16, replays=replays)

        assert [same_bits(one, wanted) for one in found] == [0] * ranks.world_size


@every_kernel
@every_format
def test_operands_that_tma_cannot_load_are_copied(ranks, algorithm, scales):
    operands = drawn(ranks, scales, 5, 100, seed=4)
    by_columns = [(a, w.t().contiguous().t(), *more) for a, w, *more in operands]

    found = ranks.scaled_sum(by_columns, algorithm, scales, torch.bfloat16)

    assert [same_bits(one, expected(operands)) for one in found] == [0] * ranks.world_size


@every_kernel
@every_format
@pytest.mark.parametrize("constant_weight", [False, True])
@pytest.mark.parametrize("late", [0, 2], ids=["a", "a_scale"])
def test_what_the_kernel_before_writes_is_what_is_multiplied(ranks, algorithm, scales, constant_weight, late):
    operands = drawn(ranks, scales, 16, 4096, seed=6)
    wanted = expected(operands)
    targets = [tuple(torch.zeros_like(one) if at == late else one for at, one in enumerate(own)) for own in operands]
    for _ in range(CALLS):
        for target in targets:
            target[late].zero_()

        found = ranks.scaled_sum(
            targets,
            algorithm,
            scales,
            torch.bfloat16,
            constant_weight=constant_weight,
            before=lambda rank: write_late(operands[rank][late], targets[rank][late]),
        )

    assert [same_bits(one, wanted) for one in found] == [0] * ranks.world_size


@every_kernel
@every_format
def test_a_rank_whose_k_is_zero_adds_nothing(ranks, algorithm, scales):
    (first, *others), cut = drawn(ranks, scales, 8, 528, seed=7), 4 if scales == "blocks" else 2
    empty = *[one[:, :0] for one in first[:cut]], *first[cut:]

    found = ranks.scaled_sum([empty, *others], algorithm, scales, torch.bfloat16)

    wanted = reference.allreduce([torch.zeros_like(found[0]), *[partial(*own, torch.bfloat16) for own in others]])
    assert [same_bits(one, wanted) for one in found] == [0] * ranks.world_size

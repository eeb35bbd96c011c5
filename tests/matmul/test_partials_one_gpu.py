"""Fused matmuls that add partials as a tree, between ranks that share one GPU: the bits of a single rank."""

from __future__ import annotations

import itertools

import pytest
import torch

from graphar import reference
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.numerics.leaf_tree import LEAVES
from graphar.plan.algorithms import Algorithm
from graphar.plan.tiles import LAYOUTS, PARTIAL_TILES, skinny_tile
from graphar.plan.work import MATMUL_ALLREDUCE
from graphar.runtime.catalogue import SKINNY_KERNELS
from tests.cases import leaf_product, normal, same_bits
from tests.one_gpu import RanksOfOneGpu

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
    ),
]

ALGORITHMS = (Algorithm.MATMUL_ALLREDUCE, Algorithm.MATMUL_REDUCESCATTER)
ROWS, COLUMNS = 1664, 1096  # several tiles of each owner, and partial ones
DTYPES = (torch.bfloat16, torch.float16)
every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)


@pytest.fixture(scope="module", params=[2, 4, 8], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


def drawn(seed, *shape, dtype):
    return normal(seed, torch.Size(shape).numel(), dtype).view(shape).cuda()


def operands(k, dtype, layout, rows=ROWS):
    a, w = drawn(0, rows, k, dtype=dtype), drawn(1, COLUMNS, k, dtype=dtype)
    return a, w if layout == "by_rows" else w.t().contiguous().t()


def of_ranks(ranks, a, w):
    """Each rank's columns, which lie as in the whole operands."""
    return list(zip(a.chunk(ranks.world_size, 1), w.chunk(ranks.world_size, 1), strict=True))


def assert_parts(found, whole, algorithm):
    parts = itertools.repeat(whole) if algorithm.op == MATMUL_ALLREDUCE else whole.tensor_split(len(found))
    assert [same_bits(*pair) for pair in zip(found, parts, strict=False)] == [0] * len(found)


@every_algorithm
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile_gives_the_bits_of_one_rank(ranks, algorithm, layout):
    for tile, dtype, k in itertools.product(PARTIAL_TILES[LEAVES // ranks.world_size], DTYPES, (512, 3072)):
        a, w = operands(k, dtype, layout)
        bias = drawn(2, COLUMNS, dtype=dtype)
        whole = leaf_product(a, w, LEAVES, bias=bias)

        for _ in range(2):
            found = ranks.matmul_in_leaves(of_ranks(ranks, a, w), algorithm, tile, bias)
            assert_parts(found, whole, algorithm)


@every_algorithm
def test_an_epilogue_is_done_to_the_sum_before_it_is_rounded(ranks, algorithm):
    tile, form = PARTIAL_TILES[LEAVES // ranks.world_size][2], Pointwise("max(v, 0) * 0.37", (), COLUMNS)
    a, w = operands(1024, torch.bfloat16, "by_rows")
    total = leaf_product(a, w, LEAVES, out_dtype=torch.float32)
    whole = reference.rounded_after(form, EpilogueInputs([], []), total, torch.bfloat16)

    found = ranks.matmul_in_leaves(of_ranks(ranks, a, w), algorithm, tile, epilogue=form.text)

    assert_parts(found, whole, algorithm)


@every_algorithm
def test_leaves_that_are_no_whole_loads_give_the_bits_of_one_rank(ranks, algorithm):
    a, w = operands(8 * 100, torch.bfloat16, "by_rows")

    found = ranks.matmul_in_leaves(of_ranks(ranks, a, w), algorithm, PARTIAL_TILES[LEAVES // ranks.world_size][0])

    assert_parts(found, leaf_product(a, w, LEAVES), algorithm)


@pytest.mark.parametrize("algorithm", SKINNY_KERNELS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_rows_have_the_bits_of_one_rank(ranks, algorithm, layout):
    for rows, dtype, k in itertools.product((1, 8, 17, 64), DTYPES, (512, 800, 3072)):
        a, w = operands(k, dtype, layout, rows)
        bias, tile = drawn(2, COLUMNS, dtype=dtype), skinny_tile(rows, LEAVES // ranks.world_size)
        whole = leaf_product(a, w, LEAVES, bias=bias)

        for _ in range(2):
            found = ranks.matmul_in_leaves(of_ranks(ranks, a, w), algorithm, tile, bias)
            assert_parts(found, whole, algorithm)

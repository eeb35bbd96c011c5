"""An all-gather and a matmul in one kernel, between ranks that share one GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.nn import functional

from graphar.matmul import gemm
from graphar.matmul.tensor_maps import aligned_copy
from graphar.plan.tiles import GATHERED_TILES
from tests.cases import raw, same_bits
from tests.one_gpu import RanksOfOneGpu

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
    ),
]


@pytest.fixture(scope="module", params=[2, 3, 4, 8], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


def normal(generator, *shape, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=generator).to(dtype)


def wrong_elements(ranks, counts, columns, k, tile=None, dtype=torch.bfloat16, transposed=False, with_bias=False):
    """How many elements of all products and gathered rows differ from those of a gather and graphar's matmul.

    Rank r's weight has ``columns`` + r rows.
    """
    generator = torch.Generator().manual_seed(sum(counts) + k)
    parts = [normal(generator, count, k, dtype=dtype) for count in counts]
    weights = [normal(generator, columns + rank, k, dtype=dtype).cuda() for rank in range(len(counts))]
    weights = [w.t().contiguous().t() if transposed else w for w in weights]
    biases = [normal(generator, len(w), dtype=dtype) for w in weights] if with_bias else None
    products, gathered = ranks.allgather_matmul(parts, weights, biases, tile)
    whole, found = torch.cat(parts).cuda(), 0
    for rank, w in enumerate(weights):
        expected = matmul(whole, w, biases[rank].cuda() if biases else w.new_zeros(len(w)))
        found += same_bits(products[rank].contiguous(), expected) + same_bits(gathered[rank].contiguous(), whole)
    return found


def matmul(a, w, bias):
    """graphar's matmul, for any K and N."""
    to_eights = [(0, 0, 0, -len(w) % 8), (0, -len(w) % 8)]
    w, padded = (functional.pad(one, by) for one, by in zip((w, bias), to_eights, strict=True))
    return gemm.matmul(aligned_copy(a), aligned_copy(w), bias=padded)[:, : len(bias)].contiguous()


@pytest.mark.parametrize("transposed", [False, True], ids=["by_rows", "by_columns"])
@pytest.mark.parametrize("tile", GATHERED_TILES, ids=str)
def test_every_tile_gives_the_bits_of_a_gather_and_a_matmul(ranks, tile, transposed):
    counts = [300 + 17 * rank for rank in range(ranks.world_size)]

    assert wrong_elements(ranks, counts, 456, 328, tile, transposed=transposed, with_bias=True) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_any_rows_and_columns_in_a_row_give_these_bits(ranks, dtype):
    choices = random.Random(ranks.world_size)
    for _ in range(12):
        counts = [choices.choice([0, 1, 64, choices.randint(1, 700)]) for _ in range(ranks.world_size)]
        counts[choices.randrange(len(counts))] = choices.randint(1, 700)
        columns, k = choices.randint(0, 700), choices.choice([8, 200, 1024, choices.randint(8, 600)])

        assert wrong_elements(ranks, counts, columns, k, dtype=dtype) == 0, (counts, columns, k)


def test_gathered_rows_have_every_bit_pattern(ranks):
    parts = [raw(rank, 64 * 96, torch.bfloat16).view(64, 96) for rank in range(ranks.world_size)]
    weights = [torch.zeros(8, 96, dtype=torch.bfloat16)] * ranks.world_size

    _, gathered = ranks.allgather_matmul(parts, weights)

    assert [same_bits(one, torch.cat(parts).cuda()) for one in gathered] == [0] * ranks.world_size


def test_rows_that_fill_several_launches_give_these_bits(ranks, monkeypatch):
    monkeypatch.setattr("graphar.matmul.allgather_matmul.gathered_rows_a_launch", lambda world_size, k: 256)
    counts = [choice for choice, _ in zip(itertools.cycle((700, 256, 0, 1000)), range(ranks.world_size))]

    assert wrong_elements(ranks, counts, 200, 264) == 0

"""An all-gather and a matmul of e4m3 operands with scales in one kernel, between ranks that share one GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.nn import functional

from graphar.numerics.fp8_products import BLOCK, FP8
from graphar.plan.tiles import FP8_TILES
from graphar.product.scaled_gemm import scaled_matmul
from graphar.product.tensor_maps import aligned_copy
from tests.cases import same_bits
from tests.one_gpu import RanksOfOneGpu

pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability(0) != (9, 0), reason="needs an sm_90 GPU"
    ),
]
FORMATS = ("rows", "blocks")
HEIGHTS = (1, 8, 40, 64, 100, 200)  # of a rank's part, below a tile's and above


@pytest.fixture(scope="module", params=[2, 3, 4, 8], ids=lambda n: f"{n}ranks")
def ranks(request):
    made = RanksOfOneGpu(request.param)
    yield made
    made.close()


def normal(generator, *shape):
    return torch.randn(*shape, generator=generator).to(FP8)


def scale(generator, rows, columns, transposed):
    """Scales near one, in one layout or the other."""
    made = (torch.rand(rows, columns, generator=generator) + 0.5).cuda()
    return made.t().contiguous().t() if transposed else made


def scales_of(generator, form, rows, n, k, transposed):
    """A rank's scales of its rows, and of its weight."""
    blocks = -(-k // BLOCK)
    shapes = ((rows, 1), (n, 1)) if form == "rows" else ((rows, blocks), (-(-n // BLOCK), blocks))
    return tuple(scale(generator, *shape, transposed) for shape in shapes)


def multiplied(a, w, a_scale, w_scale, bias, out_dtype):
    """graphar's matmul of e4m3 operands, for any K and N."""
    n = len(w)
    if n == 0:
        return torch.empty(len(a), 0, dtype=out_dtype, device="cuda:0")
    w = torch.cat([w.view(torch.uint8), w.new_zeros(-n % 8, w.shape[1]).view(torch.uint8)]).view(FP8)
    if a_scale.shape[1] == 1:  # of rows
        w_scale = functional.pad(w_scale, (0, 0, 0, len(w) - n))
    bias = None if bias is None else functional.pad(bias.cuda(), (0, len(w) - n))
    scales = {"a_scale": a_scale, "w_scale": w_scale}
    return scaled_matmul(aligned_copy(a), aligned_copy(w), bias=bias, out_dtype=out_dtype, **scales)[:, :n]


def wrong_elements(ranks, form, counts, columns, k, tile=None, out_dtype=torch.bfloat16, transposed=False, bias=False):
    """How many elements of all products, gathered rows and scales differ from those of a gather and graphar's matmul.

    Rank r's weight has ``columns`` + r rows.
    """
    generator = torch.Generator().manual_seed(sum(counts) + k)
    parts = [normal(generator, count, k) for count in counts]
    weights = [normal(generator, columns + rank, k).cuda() for rank in range(len(counts))]
    biases = [torch.randn(len(w), generator=generator).to(out_dtype) for w in weights] if bias else None
    scales = [
        scales_of(generator, form, len(part), len(w), k, transposed) for part, w in zip(parts, weights, strict=True)
    ]
    how = {"scales": scales, "out_dtype": out_dtype}
    products, gathered, gathered_scales = ranks.allgather_matmul(parts, weights, biases, tile, **how)
    whole = torch.cat([part.view(torch.uint8) for part in parts]).view(FP8).cuda()
    of_rows = torch.cat([own for own, _ in scales])
    found = 0
    for rank, w in enumerate(weights):
        own = biases[rank] if biases else None
        expected = multiplied(whole, w, of_rows, scales[rank][1], own, out_dtype)
        found += same_bits(products[rank].contiguous(), expected.contiguous())
        found += int((gathered[rank].view(torch.uint8) != whole.view(torch.uint8)).sum())
        found += same_bits(gathered_scales[rank], of_rows.contiguous())
    return found


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
def test_every_tile_gives_the_bits_of_a_gather_and_a_matmul(ranks, form, tile):
    counts = [300 + 17 * rank for rank in range(ranks.world_size)]

    for out_dtype, transposed in itertools.product((torch.bfloat16, torch.float16), (False, True)):
        assert wrong_elements(ranks, form, counts, 456, 656, tile, out_dtype, transposed, bias=True) == 0


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tile", FP8_TILES, ids=str)
def test_parts_that_are_no_whole_tiles_give_these_bits(ranks, form, tile):
    for first in range(len(HEIGHTS)):
        counts = [HEIGHTS[(first + rank) % len(HEIGHTS)] for rank in range(ranks.world_size)]

        assert wrong_elements(ranks, form, counts, 456, 400, tile) == 0, counts


@pytest.mark.parametrize("form", FORMATS)
def test_ranks_that_take_different_tiles_give_these_bits(ranks, form, monkeypatch):
    turns = itertools.cycle(FP8_TILES)
    monkeypatch.setattr("graphar.product.fused.best_tile", lambda *given: next(turns))

    for rows in HEIGHTS:
        assert wrong_elements(ranks, form, [rows] * ranks.world_size, 456, 400) == 0, rows


@pytest.mark.parametrize("form", FORMATS)
def test_any_rows_and_columns_in_a_row_give_these_bits(ranks, form):
    choices = random.Random(ranks.world_size)
    for _ in range(12):
        counts = [choices.choice([0, 1, 64, choices.randint(1, 700)]) for _ in range(ranks.world_size)]
        counts[choices.randrange(len(counts))] = choices.randint(1, 700)
        # Scales of up to 128 rows and 128 columns could be of either format.
        columns, k = choices.randint(129, 700), choices.choice([144, 200, 1024, choices.randint(129, 900)])

        assert wrong_elements(ranks, form, counts, columns, k) == 0, (counts, columns, k)


@pytest.mark.parametrize("form", FORMATS)
def test_rows_that_fill_several_launches_give_these_bits(ranks, form, monkeypatch):
    monkeypatch.setattr("graphar.product.fused.gathered_rows_a_launch", lambda *given: 256)
    counts = [choice for choice, _ in zip(itertools.cycle((700, 256, 0, 1000)), range(ranks.world_size))]

    assert wrong_elements(ranks, form, counts, 200, 272) == 0


def test_a_rank_without_columns_sends_its_rows(ranks):
    assert wrong_elements(ranks, "rows", [130] * ranks.world_size, 0, 272) == 0

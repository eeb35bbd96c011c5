"""An all-gather and a matmul in one kernel, between ranks that share one GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch.nn import functional

import graphar
from graphar import Epilogue, reference
from graphar.numerics.epilogues.epilogue import EpilogueInputs, Pointwise
from graphar.plan.tiles import GATHERED_TILES
from graphar.product import gemm
from graphar.product.tensor_maps import aligned_copy
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


@pytest.mark.parametrize(("tile", "layout"), [(tile, layout) for tile in GATHERED_TILES for layout in tile.layouts])
def test_every_tile_gives_the_bits_of_a_gather_and_a_matmul(ranks, tile, layout):
    counts = [300 + 17 * rank for rank in range(ranks.world_size)]

    assert wrong_elements(ranks, counts, 456, 328, tile, transposed=layout == "by_columns", with_bias=True) == 0


HEIGHTS = (1, 8, 40, 64, 100, 200)  # of a rank's part, below a tile's and above


def parts_of_every_height(world_size):
    """The rows of all ranks in several calls: equally many on all ranks, then different ones on neighbours."""
    yield from ([rows] * world_size for rows in HEIGHTS)
    yield from ([HEIGHTS[(first + rank) % len(HEIGHTS)] for rank in range(world_size)] for first in range(len(HEIGHTS)))


@pytest.mark.parametrize("tile", GATHERED_TILES, ids=str)
def test_parts_that_are_no_whole_tiles_give_these_bits(ranks, tile):
    for counts in parts_of_every_height(ranks.world_size):
        assert wrong_elements(ranks, counts, 456, 328, tile) == 0, counts


def test_ranks_that_take_different_tiles_give_these_bits(ranks, monkeypatch):
    turns = itertools.cycle(GATHERED_TILES)
    monkeypatch.setattr("graphar.product.fused.best_tile", lambda *given: next(turns))

    for counts in parts_of_every_height(ranks.world_size):
        assert wrong_elements(ranks, counts, 456, 328) == 0, counts


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
    monkeypatch.setattr("graphar.product.fused.gathered_rows_a_launch", lambda *given: 256)
    counts = [choice for choice, _ in zip(itertools.cycle((700, 256, 0, 1000)), range(ranks.world_size))]

    assert wrong_elements(ranks, counts, 200, 264) == 0


# ---- with an epilogue -----------------------------------------------------------------------------------------------

EXACT = "max(v * scale, c[col]) + f[index] - r[row] + row * 3 - col + bf16(index)"


def inputs_of(rows, columns, rank):
    """One rank's tensors of EXACT, and its number."""
    generator = torch.Generator().manual_seed(rank)
    sizes = (columns, rows * columns, rows)
    return EpilogueInputs([normal(generator, size).cuda() for size in sizes], [0.375])


def wrong_after_epilogue(ranks, counts, columns, k, tile=None, dtype=torch.bfloat16):
    """How many elements of integer products differ from the specification after EXACT, and of the gathered rows."""
    generator = torch.Generator().manual_seed(sum(counts) + k)

    def integers(*shape):
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)

    parts = [integers(count, k) for count in counts]
    weights = [integers(own, k).cuda() for own in columns]
    inputs = [inputs_of(sum(counts), own, rank) for rank, own in enumerate(columns)]
    products, gathered = ranks.allgather_matmul(parts, weights, None, tile, EXACT, inputs)
    rows, found = [part.cuda() for part in parts], 0
    for rank, own in enumerate(columns):
        tensors = dict(zip("cfr", inputs[rank].tensors, strict=True))
        form = Pointwise(EXACT, (torch.bfloat16,) * 3, max(1, own))
        expected = reference.linear_with_epilogue(torch.cat(rows), weights[rank], form, inputs[rank])
        specified = Epilogue(EXACT, scale=0.375, **tensors)
        found += same_bits(expected, reference.fused_allgather_matmul(rows, weights[rank], epilogue=specified))
        found += same_bits(products[rank].contiguous(), expected)
        found += same_bits(gathered[rank].contiguous(), torch.cat(rows))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tile", GATHERED_TILES, ids=str)
def test_an_epilogue_is_applied_to_each_element_in_its_place(ranks, tile, dtype):
    counts, columns = (
        [first + step * rank for rank in range(ranks.world_size)] for first, step in ((300, 17), (456, 1))
    )

    assert wrong_after_epilogue(ranks, counts, columns, 328, tile, dtype) == 0


def test_an_epilogue_of_ranks_without_rows_or_columns_gives_the_specification(ranks):
    counts = [0 if rank == 1 else 130 for rank in range(ranks.world_size)]
    columns = [0 if rank == 0 else 77 + rank for rank in range(ranks.world_size)]

    assert wrong_after_epilogue(ranks, counts, columns, 72) == 0


def test_an_epilogue_counts_on_over_several_launches(ranks, monkeypatch):
    monkeypatch.setattr("graphar.product.fused.gathered_rows_a_launch", lambda *given: 256)
    counts = [choice for choice, _ in zip(itertools.cycle((700, 256, 0, 1000)), range(ranks.world_size))]

    assert wrong_after_epilogue(ranks, counts, [200] * ranks.world_size, 264) == 0


@pytest.mark.parametrize("tile", GATHERED_TILES, ids=str)
def test_an_epilogue_that_adds_a_bias_gives_the_bits_of_a_bias(ranks, tile):
    generator = torch.Generator().manual_seed(5)
    parts = [normal(generator, 200, 520) for _ in range(ranks.world_size)]
    weights = [normal(generator, 328, 520) for _ in parts]
    biases = [normal(generator, 328) for _ in parts]

    added, _ = ranks.allgather_matmul(parts, weights, biases, tile)
    inputs = [EpilogueInputs([bias.cuda()], []) for bias in biases]
    followed, _ = ranks.allgather_matmul(parts, weights, None, tile, "v + b[col]", inputs)

    assert [same_bits(*pair) for pair in zip(added, followed, strict=True)] == [0] * ranks.world_size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [0, 136])
def test_behind_an_all_gather_the_epilogue_is_applied_to_the_unrounded_product(dtype, columns):
    """One rank alone gathers, then multiplies by torch."""
    generator = torch.Generator().manual_seed(columns)
    x, w = (
        torch.randint(-60, 61, shape, generator=generator).to(dtype).cuda() for shape in ((96, 264), (columns, 264))
    )
    c = torch.arange(columns).to(dtype).cuda()
    with graphar.Communicator(devices=["cuda:0"]) as alone:
        (y,) = graphar.fused_allgather_matmul(
            [x], [w], bias=[c], epilogue=Epilogue("v / 64 + c[col] - row", c=[c]), group=alone
        )

    expected = reference.fused_allgather_matmul([x], w, c, epilogue=Epilogue("v / 64 + c[col] - row", c=c))
    assert same_bits(y, expected) == 0

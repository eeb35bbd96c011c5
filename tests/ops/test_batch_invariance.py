"""A row has the same bits, however many rows a call has, on the CPU; kernels give the bits of the CPU."""

import pytest
import torch

import graphar
from graphar.numerics.codecs import NAMES, codec
from tests.cases import normal, same_bits

MOST, COLUMNS, RANKS = 100, 384, 3
WINDOWS = [slice(0, 1), slice(7, 8), slice(3, 20), slice(36, 100)]

every_window = pytest.mark.parametrize("rows", WINDOWS, ids=str)


def drawn(seed: int, columns: int = COLUMNS) -> torch.Tensor:
    return normal(seed, MOST * columns, torch.bfloat16).view(MOST, columns)


def parts_of(columns: int = COLUMNS) -> list[torch.Tensor]:
    return [drawn(rank, columns) for rank in range(RANKS)]


@every_window
def test_sums(rows):
    parts = parts_of()
    whole = graphar.allreduce(parts)[0]

    for found in (
        graphar.allreduce([part[rows] for part in parts])[1],
        torch.cat(graphar.reducescatter([part[rows] for part in parts])),
    ):
        assert same_bits(found, whole[rows]) == 0


@every_window
@pytest.mark.parametrize("out_dtype", [None, torch.float8_e4m3fn], ids=str)
def test_norms(rows, out_dtype):
    parts, residual, weight = parts_of(), drawn(10), drawn(11)[0]

    def normed(own: slice) -> list[torch.Tensor]:
        given = [part[own] for part in parts], [residual[own]] * RANKS, [weight] * RANKS
        return [ones[0] for ones in graphar.allreduce_residual_rmsnorm(*given, out_dtype=out_dtype)]

    for found, whole in zip(normed(rows), normed(slice(None)), strict=True):
        assert torch.equal(found.view(torch.uint8), whole[rows].view(torch.uint8))


@every_window
@pytest.mark.parametrize("name", NAMES)
def test_codecs_where_rows_are_whole_buckets(rows, name):
    parts = parts_of(codec(name).bucket_size * 3)
    whole = graphar.allreduce(parts, codec=name)[0]

    found = graphar.allreduce([part[rows] for part in parts], codec=name)[0]

    assert same_bits(found, whole[rows]) == 0


def test_codecs_change_bits_with_the_rows_where_a_bucket_spans_rows():
    parts = parts_of(codec("int4").bucket_size + 8)
    whole = graphar.allreduce(parts, codec="int4")[0]

    found = graphar.allreduce([part[7:] for part in parts], codec="int4")[0]

    assert same_bits(found, whole[7:]) > 0

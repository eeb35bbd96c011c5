"""fused_matmul_allreduce and fused_matmul_reducescatter on the CPU: the specification's bits in both forms."""

from __future__ import annotations

import itertools

import pytest
import torch

import graphar
from graphar import Codec, Communicator, reference
from tests.cases import HALVES, integers, normal, same_bits
from tests.processes import run_ranks

DTYPES = (*HALVES, torch.float32, torch.float64)
SIZES = ((1, 1, 1), (7, 129, 65), (129, 7, 1), (33, 40, 130), (64, 136, 7))  # M, N, K
WAYS = (("none", None), ("split_m", None), ("split_n", None), ("split_m", 3), ("split_n", 5), ("auto", None))
STOCHASTIC = Codec(4, 128, "stochastic", seed=11)
OPS = (graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)

every_way = pytest.mark.parametrize(("partition", "count"), WAYS, ids=str)
every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def operands(m, n, k, dtype, ranks=3, fill=normal, with_bias=False):
    a = [fill(rank, m * k, dtype).view(m, k) for rank in range(ranks)]
    w = [fill(100 + rank, n * k, dtype).view(n, k) for rank in range(ranks)]
    return a, w, fill(200, n, dtype) if with_bias else None


def specified(op, a, w, bias=None, **options):
    """By rank."""
    if op is graphar.fused_matmul_allreduce:
        return [reference.fused_matmul_allreduce(a, w, bias, **options)] * len(a)
    return reference.fused_matmul_reducescatter(a, w, bias, **options)


def call(op, a, w, bias=None, **options):
    return op(a, w, bias=None if bias is None else [bias] * len(a), **options)


def wrong(found, wanted):
    """By rank, how many elements differ."""
    return [same_bits(*pair) for pair in zip(found, wanted, strict=True)]


def can_cut(op, partition, count, m, n, ranks):
    rows = m if op is graphar.fused_matmul_allreduce else -(-m // ranks)
    return count is None or count <= (rows if partition == "split_m" else n)


# ---- the specification ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_integers_give_the_exact_sum_of_exact_products(dtype):
    (m, n, k), ranks = (9, 11, 5), 3
    a, w, bias = operands(m, n, k, dtype, ranks, lambda rank, numel, kind: integers(rank, numel, kind) % 4, True)

    found = reference.fused_matmul_allreduce(a, w, bias)

    exact = sum(x.double() @ y.double().t() for x, y in zip(a, w, strict=True)) + bias.double()
    assert same_bits(found, exact.to(dtype)) == 0


def test_random_data_are_as_close_to_float64_as_two_roundings_can_be():
    a, w, bias = operands(40, 50, 256, torch.bfloat16, 4, with_bias=True)

    found = reference.fused_matmul_allreduce(a, w, bias)

    products = [x.double() @ y.double().t() for x, y in zip(a, w, strict=True)]
    error = (found.double() - sum(products) - bias.double()).abs()
    rounding = torch.finfo(torch.bfloat16).eps / 2
    bound = rounding * (sum(one.abs() for one in products) + found.double().abs()) * 1.01
    assert (error <= bound).all()


def test_each_product_is_rounded_first_and_the_bias_enters_once_before_the_last_rounding():
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    a = [torch.tensor([[1.0, 2**-8]], dtype=torch.bfloat16)] * 2  # the product 1 + 2^-8 rounds to 1
    w = [torch.ones(1, 2, dtype=torch.bfloat16)] * 2
    small = torch.tensor([2**-7], dtype=torch.bfloat16)

    assert reference.fused_matmul_allreduce(a, w).item() == 2
    assert reference.fused_matmul_allreduce([one, one * 2**-8], [one, one], small).item() == 1 + 2**-6
    assert reference.fused_matmul_allreduce([one, one * 2**-8], [one, one]).item() == 1


# ---- both forms -----------------------------------------------------------------------------------------------------


@every_op
@every_way
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_list_gets_the_specifications_bits_whatever_the_partition(op, partition, count, dtype):
    for (m, n, k), with_bias in itertools.product(SIZES, (False, True)):
        if can_cut(op, partition, count, m, n, 3):
            given = operands(m, n, k, dtype, with_bias=with_bias)
            found = call(op, *given, partition=partition, num_partitions=count)

            assert wrong(found, specified(op, *given)) == [0] * 3
            assert all(one.is_contiguous() for one in found)


@every_op
@pytest.mark.parametrize("ranks", [1, 2, 4, 5, 6, 7, 8])
def test_any_number_of_ranks_gets_them(op, ranks):
    for partition, with_bias in itertools.product(("none", "split_m", "split_n"), (False, True)):
        given = operands(19, 24, 33, torch.bfloat16, ranks, with_bias=with_bias)

        assert wrong(call(op, *given, partition=partition), specified(op, *given)) == [0] * ranks


@every_op
def test_the_parts_joined_are_the_whole(op):
    a, w, bias = operands(19, 24, 33, torch.bfloat16, 4, with_bias=True)

    parts = call(graphar.fused_matmul_reducescatter, a, w, bias, partition="split_m")

    assert same_bits(torch.cat(parts), reference.fused_matmul_allreduce(a, w, bias)) == 0


def as_rank(rank, world_size):
    found = []
    for (partition, count), (m, n, k), with_bias in itertools.product(WAYS, SIZES[1:], (False, True)):
        for op in OPS:
            if can_cut(op, partition, count, m, n, world_size):
                a, w, bias = operands(m, n, k, torch.bfloat16, world_size, with_bias=with_bias)
                y = op(a[rank], w[rank], bias=bias, partition=partition, num_partitions=count)
                found.append(same_bits(y, specified(op, a, w, bias)[rank]))
    return found


def test_processes_get_the_specifications_bits_whatever_the_partition():
    for found in run_ranks(as_rank, 3):
        assert found.count(0) == len(found) > 60


@every_op
@every_way
def test_with_a_codec_each_partition_is_a_call_of_its_own(op, partition, count):
    for with_bias in (False, True):
        given = operands(40, 64, 33, torch.bfloat16, with_bias=with_bias)
        options = {"partition": partition, "num_partitions": count, "codec": STOCHASTIC}
        with Communicator(devices=["cpu"] * 3) as communicator:
            found = call(op, *given, **options, group=communicator)

        assert wrong(found, specified(op, *given, **options, seed=11)) == [0] * 3


def with_codec_as_rank(rank, world_size):
    a, w, bias = operands(40, 64, 33, torch.bfloat16, world_size, with_bias=True)
    options = {"bias": bias, "partition": "split_n", "codec": STOCHASTIC}
    y = graphar.fused_matmul_allreduce(a[rank], w[rank], **options)
    return same_bits(y, reference.fused_matmul_allreduce(a, w, **options, seed=11))


def test_processes_take_a_codec():
    assert run_ranks(with_codec_as_rank, 2) == [0, 0]


# ---- any tensor -----------------------------------------------------------------------------------------------------


@every_op
def test_a_transposed_weight_is_one_like_any_other(op):
    a, w, _ = operands(33, 40, 24, torch.bfloat16)
    transposed = [one.t().contiguous().t() for one in w]

    assert wrong(op(a, transposed, partition="split_n"), specified(op, a, w)) == [0] * 3


@every_op
def test_leading_dimensions_are_as_those_of_a_linear_layer(op):
    a, w, bias = operands(6 * 5, 8, 7, torch.float32, with_bias=True)
    cubes = [one.view(6, 5, 7) for one in a]

    found = call(op, cubes, w, bias, partition="split_m", num_partitions=2)

    assert wrong(found, [one.view(-1, 5, 8) for one in specified(op, a, w, bias)]) == [0] * 3
    assert wrong(found, specified(op, cubes, w, bias)) == [0] * 3


def test_a_vector_gives_a_vector():
    a, w, _ = operands(1, 8, 7, torch.float32)

    found = graphar.fused_matmul_allreduce([one[0] for one in a], w)

    assert wrong(found, [reference.fused_matmul_allreduce(a, w)[0]] * 3) == [0] * 3


@every_op
def test_ranks_may_have_parts_of_k_of_different_lengths_or_none(op):
    a = [normal(rank, 9 * k, torch.float32).view(9, k) for rank, k in enumerate((5, 0, 3))]
    w = [normal(rank, 8 * k, torch.float32).view(8, k) for rank, k in enumerate((5, 0, 3))]

    assert wrong(op(a, w), specified(op, a, w)) == [0] * 3


@every_op
def test_a_sum_of_no_products_is_zero_and_the_bias(op):
    a, w, bias = operands(6, 8, 0, torch.float16, with_bias=True)

    assert all(not one.any() for one in op(a, w))
    assert all(same_bits(one, bias.expand_as(one)) == 0 for one in call(op, a, w, bias))


@every_op
@pytest.mark.parametrize(("m", "n"), [(0, 5), (5, 0)])
def test_no_rows_or_no_columns_give_an_empty_result(op, m, n):
    a, w, _ = operands(m, n, 4, torch.float32)

    for partition in ("none", "split_m", "split_n"):
        assert [one.shape for one in op(a, w, partition=partition)] == [one.shape for one in specified(op, a, w)]


@every_op
def test_strided_operands_are_read_where_they_lie(op):
    a, w, _ = operands(9, 8, 12, torch.float32)
    wide = [one.repeat_interleave(2, 1)[:, ::2] for one in a]

    assert wrong(op(wide, w), specified(op, a, w)) == [0] * 3


def test_what_is_not_a_number_is_the_canonical_one():
    a, w, bias = operands(4, 8, 3, torch.bfloat16, with_bias=True)
    a[1][2, 0], bias[3] = float("nan"), float("nan")

    for y in call(graphar.fused_matmul_allreduce, a, w, bias):
        assert (y.view(torch.int16)[y.isnan()] == 0x7FFF).all()
        assert y.isnan().sum() == 8 + 4 - 1


# ---- out ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition", ["none", "split_m", "split_n"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_the_result_goes_to_out(partition, contiguous):
    given = operands(9, 16, 12, torch.bfloat16, with_bias=True)
    outs = [torch.full((9, 16), 7.0, dtype=torch.bfloat16) for _ in range(3)]
    outs = outs if contiguous else [torch.zeros(16, 9, dtype=torch.bfloat16).t() for _ in range(3)]

    found = call(graphar.fused_matmul_allreduce, *given, out=outs, partition=partition)

    assert [mine is out for mine, out in zip(found, outs, strict=True)] == [True] * 3
    assert wrong(found, specified(graphar.fused_matmul_allreduce, *given)) == [0] * 3


def out_as_rank(rank, world_size):
    a, w, _ = operands(9, 16, 12, torch.bfloat16, world_size)
    out = torch.zeros(9, 32, dtype=torch.bfloat16)
    y = graphar.fused_matmul_allreduce(a[rank], w[rank], out=out[:, 8:24])
    assert not out[:, :8].any()
    assert not out[:, 24:].any()
    return same_bits(y, reference.fused_matmul_allreduce(a, w))


def test_the_result_of_a_process_goes_to_out_and_nowhere_else():
    assert run_ranks(out_as_rank, 2) == [0, 0]

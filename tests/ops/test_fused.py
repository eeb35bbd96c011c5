"""Fused matmuls on the CPU: the order of roundings, odd operands, and the communication of a backward pass."""

import pytest
import torch

import graphar
from graphar import Epilogue, reference
from tests.cases import HALVES, integers, normal, same_bits
from tests.processes import on_ranks

DTYPES = (*HALVES, torch.float32, torch.float64)
OPS = (graphar.fused_matmul_allreduce, graphar.fused_matmul_reducescatter)

every_op = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def operands(m, n, k, dtype, ranks=3, fill=normal, with_bias=False):
    a = [fill(rank, m * k, dtype).view(m, k) for rank in range(ranks)]
    w = [fill(100 + rank, n * k, dtype).view(n, k) for rank in range(ranks)]
    return a, w, fill(200, n, dtype) if with_bias else None


def specified(op, a, w, bias=None, **options):
    """The specification's result on each rank."""
    if op is graphar.fused_matmul_allreduce:
        return [reference.fused_matmul_allreduce(a, w, bias, **options)] * len(a)
    return reference.fused_matmul_reducescatter(a, w, bias, **options)


def call(op, a, w, bias=None, **options):
    return op(a, w, bias=None if bias is None else [bias] * len(a), **options)


def wrong(found, wanted):
    """By rank, how many elements differ."""
    return [same_bits(*pair) for pair in zip(found, wanted, strict=True)]


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


def test_a_vector_gives_a_vector():
    a, w, _ = operands(1, 8, 7, torch.float32)

    found = graphar.fused_matmul_allreduce([one[0] for one in a], w)

    assert wrong(found, [reference.fused_matmul_allreduce(a, w)[0]] * 3) == [0] * 3


@every_op
def test_ranks_may_have_parts_of_k_of_different_lengths_or_none(op):
    a = [normal(rank, 9 * k, torch.float32).view(9, k) for rank, k in enumerate((5, 0, 3))]
    w = [normal(rank, 8 * k, torch.float32).view(8, k) for rank, k in enumerate((5, 0, 3))]

    assert wrong(op(a, w), specified(op, a, w)) == [0] * 3


def test_what_is_not_a_number_is_the_canonical_one():
    a, w, bias = operands(4, 8, 3, torch.bfloat16, with_bias=True)
    a[1][2, 0], bias[3] = float("nan"), float("nan")

    for y in call(graphar.fused_matmul_allreduce, a, w, bias):
        assert (y.view(torch.int16)[y.isnan()] == 0x7FFF).all()
        assert y.isnan().sum() == 8 + 4 - 1


def test_the_bits_are_those_of_the_products_reduced_with_the_epilogue():
    a, w, bias = operands(33, 40, 65, torch.bfloat16, with_bias=True)
    products = [reference.linear(*pair) for pair in zip(a, w, strict=True)]

    found = graphar.fused_matmul_allreduce(a, w, epilogue="gelu(v) - row", partition="split_n")

    for one in (*found, reference.fused_matmul_allreduce(a, w, epilogue="gelu(v) - row")):
        assert same_bits(one, reference.allreduce(products, "gelu(v) - row")) == 0
    with_bias = reference.fused_matmul_allreduce(a, w, bias, epilogue="relu(v)")
    assert same_bits(with_bias, reference.allreduce(products, Epilogue("relu(v + b[col])", b=bias))) == 0


@every_op
def test_a_tensor_may_have_the_name_bias(op):
    a, w, bias = operands(9, 8, 12, torch.float32, with_bias=True)

    found = op(a, w, bias=[bias] * 3, epilogue=Epilogue("v + bias[col] * bias_", bias=[bias] * 3, bias_=2))

    wanted = specified(op, a, w, bias, epilogue=Epilogue("v + twice[col] * 2", twice=bias))
    assert [same_bits(*pair) for pair in zip(found, wanted, strict=True)] == [0] * 3


SHAPES = ((0, 7 * 5, (7, 5)), (10, 4 * 5, (4, 5)), (20, 4, (4,)))


@on_ranks(2)
def test_the_gradients_of_an_all_reduce_of_processes_send_nothing(rank, world_size):
    a, w, _ = (normal(at + rank, numel, torch.float32).view(shape) for at, numel, shape in SHAPES)
    with graphar.Communicator() as communicator:
        y = graphar.fused_matmul_allreduce(a.requires_grad_(), w.requires_grad_(), group=communicator)
        made = communicator.engine.without_kernels._group_calls._made
        y.backward(normal(30, 7 * 4, torch.float32).view(7, 4))
        assert communicator.engine.without_kernels._group_calls._made - made == 0

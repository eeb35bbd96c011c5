"""Tensor-parallel invariance on one GPU: what a rank multiplies is a node of the tree, and gradients are too."""

import pytest
import torch

import graphar
from graphar.numerics.leaf_tree import LEAVES, tree_sum
from tests.cases import leaf_product, normal, same_bits

pytestmark = [pytest.mark.gpu(1), pytest.mark.usefixtures("hopper")]

SHAPES = ((1, 64, 512), (33, 120, 1024), (64, 5120, 1024), (130, 264, 3584), (512, 1024, 8192), (7, 12, 600))
INVARIANT = {"partition": "tp_invariant"}


def drawn(seed, *shape, dtype=torch.bfloat16):
    return normal(seed, torch.Size(shape).numel(), dtype).view(shape).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_partials_of_all_ranks_add_up_to_the_product_of_one(shape, dtype):
    m, n, k = shape
    a, w, bias = drawn(0, m, k, dtype=dtype), drawn(1, n, k, dtype=dtype), drawn(2, n, dtype=dtype)
    whole = graphar.fused_matmul_allreduce(a, w, bias=bias, **INVARIANT)
    exact = a.double() @ w.double().t() + bias.double()

    assert (whole.double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps
    for ranks in (1, 2, 4, 8):
        parts = zip(a.chunk(ranks, 1), w.chunk(ranks, 1), strict=True)
        partials = [leaf_product(*own, LEAVES // ranks, out_dtype=torch.float32) for own in parts]
        assert same_bits((tree_sum(partials) + bias.float()).to(dtype), whole) == 0, ranks


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_features_and_rows_alone_have_the_bits_that_they_have_together(shape):
    m, n, k = shape
    a, w, bias = drawn(0, m, k), drawn(1, n, k), drawn(2, n)
    whole = graphar.linear(a, w, bias)
    gathered = graphar.fused_allgather_matmul(a, w, bias=bias, **INVARIANT)

    assert same_bits(gathered, whole) == 0
    for ranks in (2, 4):
        halves = [graphar.linear(a, *own) for own in zip(w.chunk(ranks), bias.chunk(ranks), strict=True)]
        assert same_bits(torch.cat(halves, 1), whole) == 0
    assert same_bits(graphar.linear(a[m // 2 :], w, bias), whole[m // 2 :]) == 0


def test_gradients_are_close_to_those_of_fp64_and_the_same_for_the_columns_of_a_rank():
    m, n, k = 200, 512, 1024
    a, w, bias, dy = drawn(0, m, k), drawn(1, n, k), drawn(2, n), drawn(3, m, n)

    def gradients(a, w):
        leaves = [one.detach().clone().requires_grad_() for one in (a, w, bias)]
        y = graphar.fused_matmul_allreduce(leaves[0], leaves[1], bias=leaves[2], **INVARIANT)
        return torch.autograd.grad(y, leaves, dy)

    da, dw, dbias = gradients(a, w)
    exact = dy.double() @ w.double(), dy.double().t() @ a.double(), dy.double().sum(0)
    for found, wanted in zip((da, dw, dbias), exact, strict=True):
        assert (found.double() - wanted).abs().max() <= wanted.abs().max() * torch.finfo(torch.bfloat16).eps
    half = gradients(a[:, : k // 2], w[:, : k // 2])
    assert same_bits(half[0], da[:, : k // 2]) == same_bits(half[1], dw[:, : k // 2]) == same_bits(half[2], dbias) == 0


def test_the_gradient_of_divided_features_is_a_node_of_their_tree():
    m, n, k = 200, 1024, 256
    x, w, dy = drawn(0, m, k).requires_grad_(), drawn(1, n, k), drawn(2, m, n)
    (dx,) = torch.autograd.grad(graphar.linear(x, w), x, dy)

    for ranks in (2, 4, 8):
        parts = zip(dy.chunk(ranks, 1), w.chunk(ranks), strict=True)
        partials = [leaf_product(one, own.t(), LEAVES // ranks, out_dtype=torch.float32) for one, own in parts]
        assert same_bits(tree_sum(partials).bfloat16(), dx) == 0


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
def test_a_norm_adds_the_residual_before_the_only_rounding(shape):
    m, n, k = shape
    a, w, residual, weight = drawn(0, m, k), drawn(1, n, k), drawn(2, m, n), drawn(3, n)
    total = leaf_product(a, w, LEAVES, out_dtype=torch.float32)

    normed, summed = graphar.fused_matmul_allreduce_residual_rmsnorm(a, w, residual, weight, **INVARIANT)
    scattered = graphar.fused_matmul_reducescatter_residual_rmsnorm(a, w, residual, weight, **INVARIANT)

    assert same_bits(summed, (total + residual.float()).bfloat16()) == 0
    unit = summed.double() / (summed.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert torch.allclose(normed.double(), unit * weight.double(), rtol=0.01, atol=1e-3)
    assert [same_bits(*pair) for pair in zip(scattered, (normed, summed), strict=True)] == [0, 0]

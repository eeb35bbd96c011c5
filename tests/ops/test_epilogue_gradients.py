"""The gradients of allreduce with an epilogue, on the CPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import graphar
from graphar import Epilogue
from tests.cases import normal, same_bits
from tests.processes import run_ranks


def test_a_second_derivative_is_refused_where_it_is_asked_for():
    xs = [torch.ones(3, requires_grad=True) for _ in range(2)]
    ys = graphar.allreduce(xs, epilogue="v * v")

    (first, _) = torch.autograd.grad(sum(y.sum() for y in ys), xs, create_graph=True)

    assert first.tolist() == [8.0] * 3
    with pytest.raises(NotImplementedError, match="an epilogue has no second derivative"):
        first.sum().backward()


def test_the_gradients_are_those_of_the_sum_and_what_follows():
    xs, biases = ([normal(r + k, 12, torch.float32).view(3, 4) for r in range(2)] for k in (0, 5))
    biases = [bias[0].clone() for bias in biases]
    leaves = [one.clone().requires_grad_() for one in (*xs, *biases)]
    expected = [one.clone().requires_grad_() for one in (*xs, *biases)]

    ys = graphar.allreduce(leaves[:2], epilogue=Epilogue("gelu(v) * 2 + v * bias[col]", bias=leaves[2:]))
    (ys[0] * 3 + ys[1] ** 2).sum().backward()

    v = expected[0] + expected[1]
    zs = [functional.gelu(v) * 2 + v * bias for bias in expected[2:]]
    (zs[0] * 3 + zs[1] ** 2).sum().backward()
    for mine, theirs in zip(leaves, expected, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_gradient_knows_the_places():
    x = torch.zeros(3, 4, requires_grad=True)

    graphar.allreduce([x], epilogue="v * (index + 100 * row + 10000 * col)")[0].sum().backward()

    row, col = torch.arange(3.0).view(3, 1), torch.arange(4.0)
    assert torch.equal(x.grad, 4 * row + col + 100 * row + 10000 * col)


def gradient_of_rank(rank, world_size):
    x, bias = normal(rank, 12, torch.bfloat16).view(3, 4).requires_grad_(), torch.ones(4, requires_grad=True)
    y = graphar.allreduce(x, epilogue=Epilogue("v * v + bias[col]", bias=bias))
    y.backward(torch.full_like(y, 1.0 + rank))
    return x.grad, bias.grad


def test_the_gradient_of_a_process_sums_those_of_all_and_an_arguments_is_its_own():
    v = sum(normal(rank, 12, torch.bfloat16).float() for rank in range(2)).view(3, 4)
    expected = graphar.reference.allreduce([(v * 2 * (1 + rank)).bfloat16() for rank in range(2)])

    for rank, (gradient, of_bias) in enumerate(run_ranks(gradient_of_rank, 2)):
        assert same_bits(gradient, expected) == 0
        assert of_bias.tolist() == [3 * (1.0 + rank)] * 4


def test_what_the_sum_has_no_part_in_has_no_gradient():
    x = torch.ones(3, requires_grad=True)

    graphar.allreduce([x], epilogue="row + 2")[0].sum().backward()

    assert x.grad.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w, **how: graphar.allreduce([x], **how),
        lambda x, w, **how: graphar.reducescatter([x], **how),
        lambda x, w, **how: graphar.fused_matmul_allreduce([x], [w], **how),
        lambda x, w, **how: graphar.fused_matmul_reducescatter([x], [w], **how),
    ],
)
def test_a_checkpoint_which_gives_saved_tensors_once_gives_the_same_gradients(call):
    def layer(x, w, bias):
        return call(x, w, epilogue=Epilogue("v * v + bias[col] * v", bias=[bias]))[0]

    def gradients_of(run):
        leaves = [normal(seed, 16, torch.float32).view(4, 4) for seed in range(2)] + [normal(2, 4, torch.float32)]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        run(layer, *leaves).sum().backward()
        return [leaf.grad for leaf in leaves]

    plain = gradients_of(lambda layer, *leaves: layer(*leaves))
    recomputed = gradients_of(partial(checkpoint, use_reentrant=False))

    assert plain[0].abs().sum() > 0
    assert [one is None or torch.equal(one, other) for one, other in zip(plain, recomputed, strict=True)] == [True] * 3
